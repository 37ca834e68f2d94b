//! Expert lists: the slots of each expert, and their
//! memory layout.

use std::ops::Range;

/// Alignment of the parts, in bytes.
pub(super) const ALIGNMENT: usize = 256;
pub(super) const WORD: usize = size_of::<u32>();

/// Byte ranges of the offsets `[experts + 1]` and of the
/// slots of all lists, or `None` on overflow.
///
/// The slots of an expert start at its offset and are
/// contiguous, as `routing` writes them.
pub fn list_parts(experts: usize, slots: usize) -> Option<[Range<usize>; 2]> {
    let offsets = experts.checked_add(1)?.checked_mul(WORD)?;
    let first = offsets.checked_next_multiple_of(ALIGNMENT)?;
    Some([0..offsets, first..first.checked_add(slots.checked_mul(WORD)?)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_lists_follow_one_another() {
        assert_eq!(list_parts(128, 256), Some([0..516, 768..1792]));
        assert_eq!(list_parts(1, 0), Some([0..8, 256..256]));
        assert_eq!(list_parts(usize::MAX, 1), None);
        assert_eq!(list_parts(1, usize::MAX / 2), None);
    }
}

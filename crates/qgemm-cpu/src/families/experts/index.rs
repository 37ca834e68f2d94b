//! Expert index: rows of each expert, and faults.

use std::ops::Range;

use qgemm_hal::{CheckedExperts, ExpertFault};

/// The first fault and its position; usually `None`.
pub type Fault = Option<(ExpertFault, u32)>;

/// The `u32` at an index.
fn word(bytes: &[u8], place: usize) -> u32 {
    bytes.get(place * 4..).and_then(|bytes| bytes.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word))
}

/// Rows of `expert` by offsets, out of `rows`; empty
/// when the offsets descend.
pub fn ascending(offsets: &[u8], expert: usize, rows: usize) -> Range<usize> {
    let bound = |place| (word(offsets, place) as usize).min(rows);
    bound(expert)..bound(expert + 1)
}

/// Rows of `expert` by counts, at most `capacity`.
pub fn counted(counts: &[u8], expert: usize, capacity: usize) -> usize {
    (word(counts, expert) as usize).min(capacity)
}

/// Expert of a slot, if valid.
pub fn expert_at(ids: &[u8], slot: usize, experts: usize) -> Option<usize> {
    // A negative id becomes a large number.
    Some(word(ids, slot) as usize).filter(|&expert| expert < experts)
}

/// The first offset that is below the previous
/// one or beyond the rows.
pub fn offset_fault(offsets: &[u8], experts: usize, rows: usize) -> Fault {
    let mut before = 0;
    for place in 0..=experts {
        let offset = word(offsets, place);
        if offset < before || offset as usize > rows {
            return Some((ExpertFault::Offset, place as u32));
        }
        before = offset;
    }
    None
}

/// The first count beyond the capacity.
pub fn count_fault(counts: &[u8], experts: usize, capacity: usize) -> Fault {
    let place = (0..experts).find(|&expert| word(counts, expert) as usize > capacity)?;
    Some((ExpertFault::Count, place as u32))
}

/// The first slot with an invalid expert.
pub fn id_fault(ids: &[u8], op: &CheckedExperts) -> Fault {
    let slot = (0..op.each.m).find(|&slot| expert_at(ids, slot, op.experts).is_none())?;
    Some((ExpertFault::Id, slot as u32))
}

/// Writes the fault status.
pub fn report(fault: Fault, status: &mut [u8]) {
    let (code, place) = fault.map_or((0, 0), |(fault, place)| (fault as u32, place));
    status[..4].copy_from_slice(&code.to_le_bytes());
    status[4..8].copy_from_slice(&place.to_le_bytes());
}

/// Slots sorted by expert, in slot order within an expert.
pub struct Lists<'a> {
    /// One offset for each expert, plus the end.
    offsets: &'a [u32],
    slots: &'a [u32],
}

impl<'a> Lists<'a> {
    /// Words of memory for the lists.
    pub fn words(op: &CheckedExperts) -> usize {
        op.experts + 1 + op.each.m
    }

    /// Builds the lists for `ids`; slots without a valid expert are
    /// left out. `memory` has [`Lists::words`].
    pub fn make(op: &CheckedExperts, ids: &[u8], memory: &'a mut [u32]) -> Self {
        let (offsets, slots) = memory.split_at_mut(op.experts + 1);
        let known = || (0..op.each.m).filter_map(|slot| Some((slot, expert_at(ids, slot, op.experts)?)));
        offsets.fill(0);
        known().for_each(|(_, expert)| offsets[expert + 1] += 1);
        for expert in 0..op.experts {
            offsets[expert + 1] += offsets[expert];
        }
        let count = offsets[op.experts] as usize;
        // Every offset advances to the end of its expert's slots, where
        // the next expert's slots begin.
        for (slot, expert) in known() {
            slots[offsets[expert] as usize] = slot as u32;
            offsets[expert] += 1;
        }
        offsets.copy_within(0..op.experts, 1);
        offsets[0] = 0;
        Self { offsets, slots: &slots[..count] }
    }

    /// Slots of all experts.
    pub fn slots(&self) -> &[u32] {
        self.slots
    }

    /// Range of an expert's slots.
    pub fn rows(&self, expert: usize) -> Range<usize> {
        self.offsets[expert] as usize..self.offsets[expert + 1] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[i32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn faults_are_found_where_they_are_first() {
        assert_eq!(offset_fault(&bytes(&[0, 2, 2, 5]), 3, 5), None);
        assert_eq!(offset_fault(&bytes(&[0, 3, 2, 5]), 3, 5), Some((ExpertFault::Offset, 2)));
        assert_eq!(offset_fault(&bytes(&[0, 3, 4, 6]), 3, 5), Some((ExpertFault::Offset, 3)));
        assert_eq!(count_fault(&bytes(&[1, 4, 5]), 3, 4), Some((ExpertFault::Count, 2)));
        assert!(ascending(&bytes(&[0, 3, 2, 9]), 1, 5).is_empty());
        assert_eq!(ascending(&bytes(&[0, 3, 2, 9]), 2, 5), 2..5);
        assert_eq!((expert_at(&bytes(&[-1, 3, 2]), 0, 3), expert_at(&bytes(&[-1, 3, 2]), 2, 3)), (None, Some(2)));
        let mut status = [9; 8];
        report(Some((ExpertFault::Count, 7)), &mut status);
        assert_eq!(status, [3, 0, 0, 0, 7, 0, 0, 0]);
    }
}

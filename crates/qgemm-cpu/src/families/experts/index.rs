//! What an index says: which rows are whose, and what is wrong with it.

use std::ops::Range;

use qgemm_hal::{CheckedExperts, ExpertFault};

/// What is wrong, and where first; nothing is most of the time.
pub type Fault = Option<(ExpertFault, u32)>;

/// The `u32` at a place.
fn word(bytes: &[u8], place: usize) -> u32 {
    bytes.get(place * 4..).and_then(|bytes| bytes.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word))
}

/// The rows of `expert` by offsets, of `rows` in all: none where they do not ascend.
pub fn ascending(offsets: &[u8], expert: usize, rows: usize) -> Range<usize> {
    let bound = |place| (word(offsets, place) as usize).min(rows);
    bound(expert)..bound(expert + 1)
}

/// The rows that `expert` uses by counts, `capacity` at most.
pub fn counted(counts: &[u8], expert: usize, capacity: usize) -> usize {
    (word(counts, expert) as usize).min(capacity)
}

/// The expert at a slot, if there is such a one.
pub fn expert_at(ids: &[u8], slot: usize, experts: usize) -> Option<usize> {
    // A negative id is a large number here.
    Some(word(ids, slot) as usize).filter(|&expert| expert < experts)
}

/// The first offset that is below the one before or beyond the rows.
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

/// The first slot whose expert does not exist.
pub fn id_fault(ids: &[u8], op: &CheckedExperts) -> Fault {
    let slot = (0..op.each.m).find(|&slot| expert_at(ids, slot, op.experts).is_none())?;
    Some((ExpertFault::Id, slot as u32))
}

/// Writes what is wrong, or that nothing is.
pub fn report(fault: Fault, status: &mut [u8]) {
    let (code, place) = fault.map_or((0, 0), |(fault, place)| (fault as u32, place));
    status[..4].copy_from_slice(&code.to_le_bytes());
    status[4..8].copy_from_slice(&place.to_le_bytes());
}

/// Slots sorted by expert, those of an expert in their order.
pub struct Lists<'a> {
    /// An offset an expert, and the end.
    offsets: &'a [u32],
    slots: &'a [u32],
}

impl<'a> Lists<'a> {
    /// Words of memory that the lists take.
    pub fn words(op: &CheckedExperts) -> usize {
        op.experts + 1 + op.each.m
    }

    /// The lists for `ids`; slots with none are left out. `memory` has [`Lists::words`].
    pub fn make(op: &CheckedExperts, ids: &[u8], memory: &'a mut [u32]) -> Self {
        let (offsets, slots) = memory.split_at_mut(op.experts + 1);
        let known = || (0..op.each.m).filter_map(|slot| Some((slot, expert_at(ids, slot, op.experts)?)));
        offsets.fill(0);
        known().for_each(|(_, expert)| offsets[expert + 1] += 1);
        for expert in 0..op.experts {
            offsets[expert + 1] += offsets[expert];
        }
        let count = offsets[op.experts] as usize;
        // Every offset moves to the end of its expert's slots, which is where the next one's begin.
        for (slot, expert) in known() {
            slots[offsets[expert] as usize] = slot as u32;
            offsets[expert] += 1;
        }
        offsets.copy_within(0..op.experts, 1);
        offsets[0] = 0;
        Self { offsets, slots: &slots[..count] }
    }

    /// The slots of all experts.
    pub fn slots(&self) -> &[u32] {
        self.slots
    }

    /// Which of them are an expert's.
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

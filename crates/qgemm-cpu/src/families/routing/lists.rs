//! Expert lists (stable counting sort): counts of slot chunks, start
//! of each chunk in a list, slots.

use std::marker::PhantomData;

use qgemm_hal::op::routing::ELSEWHERE;
use rayon::prelude::*;

/// The lists to write.
pub(super) struct Lists<'a> {
    pub offsets: &'a mut [u32],
    pub counts: &'a mut [u32],
    pub rows: &'a mut [u32],
}

/// Expert of an id, if valid.
fn expert(id: i32, experts: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|&id| id < experts)
}

/// The first slot with an invalid id.
pub(super) fn first_bad(ids: &[i32], experts: usize) -> Option<usize> {
    ids.iter().position(|&id| id != ELSEWHERE && expert(id, experts).is_none())
}

impl Lists<'_> {
    /// Lists `ids` in chunks of `chunk`. `counts` has a row of
    /// `experts` numbers for each chunk, with any contents. Returns the
    /// first slot with an invalid id.
    pub fn write(self, ids: &[i32], chunk: usize, experts: usize, counts: &mut [u32]) -> Option<usize> {
        let Self { offsets, counts: totals, rows } = self;
        let count = |(ids, counts): (&[i32], &mut [u32])| {
            counts.fill(0);
            ids.iter().filter_map(|&id| expert(id, experts)).for_each(|expert| counts[expert] += 1);
        };
        let alone = ids.len() <= chunk;
        match alone {
            true => count((ids, &mut *counts)),
            false => ids.par_chunks(chunk).zip(counts.par_chunks_mut(experts)).for_each(count),
        }
        // Every count becomes the position of the chunk's first
        // slot in the expert's list.
        let mut end = 0;
        for e in 0..experts {
            offsets[e] = end;
            for counts in counts.chunks_mut(experts) {
                end += std::mem::replace(&mut counts[e], end);
            }
            totals[e] = end - offsets[e];
        }
        offsets[experts] = end;
        let listed = end as usize;
        rows[listed..].fill(u32::MAX);
        let places = Places::new(&mut rows[..listed]);
        let scatter = |(i, (ids, next)): (usize, (&[i32], &mut [u32]))| {
            for (slot, &id) in (i * chunk..).zip(ids) {
                if let Some(expert) = expert(id, experts) {
                    // SAFETY: the positions of a chunk's slots for an
                    // expert follow the first one, as many as were counted.
                    // No two chunks share one.
                    unsafe { places.set(next[expert] as usize, slot as u32) };
                    next[expert] += 1;
                }
            }
        };
        match alone {
            true => scatter((0, (ids, counts))),
            false => ids.par_chunks(chunk).zip(counts.par_chunks_mut(experts)).enumerate().for_each(scatter),
        }
        if listed < ids.len() { first_bad(ids, experts) } else { None }
    }
}

/// Numbers that threads write concurrently.
struct Places<'a> {
    start: *mut u32,
    len: usize,
    numbers: PhantomData<&'a mut [u32]>,
}

// SAFETY: `Places` is a `&mut [u32]` whose only access
// is `set`, an unsafe method whose callers must not
// write a number from two threads.
unsafe impl Sync for Places<'_> {}

impl<'a> Places<'a> {
    fn new(numbers: &'a mut [u32]) -> Self {
        Self { start: numbers.as_mut_ptr(), len: numbers.len(), numbers: PhantomData }
    }

    /// Writes a number.
    ///
    /// # Safety
    /// No other thread may write it.
    ///
    /// # Panics
    /// When the index is out of bounds.
    unsafe fn set(&self, place: usize, value: u32) {
        assert!(place < self.len, "places are counted");
        // SAFETY: it is within the numbers that `self` borrows mutably (asserted).
        // The caller guarantees that nobody else writes it.
        unsafe { self.start.add(place).write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_any_size_make_the_same_lists() {
        let ids: Vec<i32> = (0..1000).map(|i: i32| (i * i + 7 * i) % 13 - 1).collect();
        let experts = 11;
        let mut expected: Vec<u32> = Vec::new();
        for e in 0..experts as i32 {
            expected.extend((0..1000u32).filter(|&slot| ids[slot as usize] == e));
        }
        let listed = expected.len();
        assert!(listed < 1000);
        expected.resize(1000, u32::MAX);
        for chunk in [1, 7, 64, 999, 1000, 5000] {
            let (mut offsets, mut totals, mut rows) = (vec![9; experts + 1], vec![9; experts], vec![9; 1000]);
            let mut counts = vec![5; 1000usize.div_ceil(chunk) * experts];
            let lists = Lists { offsets: &mut offsets, counts: &mut totals, rows: &mut rows };
            let bad = lists.write(&ids, chunk, experts, &mut counts);
            assert_eq!(bad, ids.iter().position(|id| !(0..11).contains(id)));
            assert_eq!((&rows, offsets[0], offsets[experts]), (&expected, 0, listed as u32), "chunks of {chunk}");
            assert!((0..experts).all(|e| offsets[e + 1] - offsets[e] == totals[e]));
        }
    }
}

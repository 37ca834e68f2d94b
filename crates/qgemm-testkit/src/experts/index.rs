//! Expert index of a case: its words in device memory, and their
//! meaning.

use qgemm_hal::ExpertFault;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{ExpertCase, FormCase, IndexKind};

/// Assignment of rows to experts.
pub(super) struct Index {
    /// The words of the index, as bits.
    pub words: Vec<u32>,
    /// The expert of every row; `None` without one.
    pub owner: Vec<Option<usize>>,
    /// Router weight of every slot; empty if slots are not combined.
    pub router_weights: Vec<f32>,
    /// The fault of the index and its first position, if any.
    pub fault: Option<(ExpertFault, usize)>,
}

impl Index {
    pub fn new(case: &ExpertCase) -> Self {
        let rng = &mut StdRng::seed_from_u64(case.each.seed ^ 0x1d5);
        match case.form {
            FormCase::Contiguous => Self::contiguous(case, rng),
            FormCase::Masked { capacity } => Self::masked(case, capacity, rng),
            FormCase::Indexed { combined, .. } => Self::indexed(case, combined, rng),
        }
    }

    /// The index with only `row`. Combined slots stay together. Rows
    /// of a capacity keep the rows before them.
    pub fn alone(&self, case: &ExpertCase, row: usize) -> Self {
        let summed = case.summed();
        let stays = |r: usize| match case.form {
            FormCase::Masked { capacity } => r / capacity == row / capacity && r <= row,
            _ => r / summed == row / summed,
        };
        let owner: Vec<_> = self.owner.iter().enumerate().map(|(r, o)| o.filter(|_| stays(r))).collect();
        let words = match case.form {
            FormCase::Contiguous => {
                let expert = self.owner[row].unwrap_or(0);
                (0..=case.experts).map(|e| if e <= expert { row as u32 } else { row as u32 + 1 }).collect()
            }
            FormCase::Indexed { .. } => {
                let word = |slot: usize| if stays(slot) { self.words[slot] } else { u32::MAX };
                (0..case.each.m).map(word).collect()
            }
            FormCase::Masked { capacity } => {
                let count = |expert: usize| if expert == row / capacity { row % capacity + 1 } else { 0 };
                (0..case.experts).map(|expert| count(expert) as u32).collect()
            }
        };
        Self { words, owner, router_weights: self.router_weights.clone(), fault: None }
    }

    /// Slot lists of the experts as bytes: offsets, then the slots of
    /// each expert.
    pub fn lists(&self, experts: usize) -> Vec<u8> {
        let mut offsets = vec![0u32];
        let mut rows = Vec::new();
        for expert in 0..experts {
            rows.extend((0..self.owner.len()).filter(|&slot| self.owner[slot] == Some(expert)).map(|slot| slot as u32));
            offsets.push(rows.len() as u32);
        }
        rows.resize(self.owner.len(), u32::MAX);
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let first = qgemm_api::expert_lists(experts, rows.len()).map_or(0, |[_, slots]| slots.start);
        let mut lists = bytes(&offsets);
        lists.resize(first, 0xff);
        lists.extend(bytes(&rows));
        lists
    }

    /// Draws an expert for one row.
    fn draw(case: &ExpertCase, rng: &mut StdRng) -> usize {
        let experts = case.experts;
        match case.index {
            IndexKind::Uniform | IndexKind::Sparse | IndexKind::Faulty => rng.random_range(0..experts),
            // The cube of a uniform number is mostly small.
            IndexKind::Skewed => ((rng.random::<f64>().powi(3) * experts as f64) as usize).min(experts - 1),
            IndexKind::Hot => experts / 2,
        }
    }

    fn contiguous(case: &ExpertCase, rng: &mut StdRng) -> Self {
        let (experts, rows) = (case.experts, case.each.m);
        let used = if case.index == IndexKind::Sparse { rows / 2 } else { rows };
        let mut counts = vec![0u32; experts];
        (0..used).for_each(|_| counts[Self::draw(case, rng)] += 1);
        let mut words = vec![0u32];
        counts.iter().for_each(|count| words.push(words[words.len() - 1] + count));
        let mut fault = None;
        if case.index == IndexKind::Faulty {
            if experts > 1 {
                // The first expert ends before its start; the second has the
                // rest of both.
                words[0] = words[1] + 1;
                fault = Some((ExpertFault::Offset, if words[0] as usize > rows { 0 } else { 1 }));
            }
            words[experts] = u32::MAX;
            fault = fault.or(Some((ExpertFault::Offset, experts)));
        }
        let mut owner = vec![None; rows];
        for expert in 0..experts {
            let bound = |at: usize| (words[at] as usize).min(rows);
            (bound(expert)..bound(expert + 1)).for_each(|row| owner[row] = Some(expert));
        }
        Self { words, owner, router_weights: Vec::new(), fault }
    }

    fn masked(case: &ExpertCase, capacity: usize, rng: &mut StdRng) -> Self {
        let mut count = |expert: usize| match case.index {
            IndexKind::Uniform => rng.random_range(0..=capacity),
            IndexKind::Skewed => (rng.random::<f64>().powi(3) * (capacity + 1) as f64) as usize,
            IndexKind::Hot => {
                if expert == case.experts / 2 {
                    capacity
                } else {
                    0
                }
            }
            IndexKind::Sparse => {
                if expert.is_multiple_of(2) {
                    0
                } else {
                    capacity / 2
                }
            }
            IndexKind::Faulty => {
                if expert.is_multiple_of(3) {
                    capacity + 1 + expert
                } else {
                    capacity / 2
                }
            }
        };
        let words: Vec<u32> = (0..case.experts).map(|expert| count(expert) as u32).collect();
        let fault = words.iter().position(|&count| count as usize > capacity);
        let owner = (0..case.each.m).map(|row| {
            let expert = row / capacity;
            Some(expert).filter(|&expert| row % capacity < words[expert] as usize)
        });
        let fault = fault.map(|place| (ExpertFault::Count, place));
        Self { owner: owner.collect(), words, router_weights: Vec::new(), fault }
    }

    fn indexed(case: &ExpertCase, combined: bool, rng: &mut StdRng) -> Self {
        let slots = case.each.m;
        let bad = [-1, case.experts as i32, i32::MIN, i32::MAX];
        let id = |slot: usize, rng: &mut StdRng| match case.index == IndexKind::Faulty && slot % 3 == 1 {
            true => bad[slot / 3 % bad.len()],
            false => Self::draw(case, rng) as i32,
        };
        let ids: Vec<i32> = (0..slots).map(|slot| id(slot, rng)).collect();
        let known = |id: i32| usize::try_from(id).ok().filter(|&id| id < case.experts);
        let weight = |slot: usize, rng: &mut StdRng| match case.index == IndexKind::Faulty && slot % 5 == 3 {
            true => f32::NAN,
            // Exact cases stay exact.
            false => [0.5, 0.25, 1.0, 0.125][rng.random_range(0..4)],
        };
        let router_weights: Vec<f32> =
            if combined { (0..slots).map(|slot| weight(slot, rng)).collect() } else { Vec::new() };
        let bad_id = ids.iter().position(|&id| known(id).is_none()).map(|slot| (ExpertFault::Id, slot));
        let bad_weight = router_weights.iter().position(|w| w.is_nan()).map(|slot| (ExpertFault::RouterWeight, slot));
        Self {
            owner: ids.iter().map(|&id| known(id)).collect(),
            words: ids.iter().map(|&id| id as u32).collect(),
            router_weights,
            fault: bad_id.or(bad_weight),
        }
    }
}

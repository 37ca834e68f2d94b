//! Indexer scores in f64, and the order of chosen keys.

use super::case::IndexerCase;

/// A correct score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Score {
    pub value: f64,
    /// Sum of squares of its summands.
    pub energy: f64,
}

/// Inputs of the indexer.
pub(super) struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub weights: Vec<f32>,
    pub q_scales: Vec<f32>,
    pub k_scales: Vec<f32>,
    pub table: Vec<u32>,
}

impl Inputs {
    pub fn of(case: &IndexerCase) -> Self {
        let table = case.table();
        let k = case.keys(&table);
        Self {
            q: case.queries(),
            weights: case.of_heads(3),
            q_scales: case.of_heads(4),
            k_scales: case.key_scales(&k),
            k,
            table,
        }
    }

    /// Scores of a query; `None` for masked keys.
    pub fn scores(&self, case: &IndexerCase, query: usize) -> Vec<Option<Score>> {
        let mut all = vec![None; case.most_keys()];
        for key in case.visible(query) {
            all[key] = case.row(query, key, &self.table).map(|row| self.score(case, query, row));
        }
        all
    }

    fn score(&self, case: &IndexerCase, query: usize, row: usize) -> Score {
        let k = &self.k[row * case.features..][..case.features];
        let factor = if case.format.has_factors() { f64::from(self.k_scales[row]) } else { 1.0 };
        let (mut value, mut energy) = (0.0, 0.0);
        for head in query * case.heads..(query + 1) * case.heads {
            let q = &self.q[head * case.features..][..case.features];
            let products = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k));
            let (product, squares) = products.fold((0.0, 0.0), |(sum, squares), p| (sum + p, squares + p * p));
            let scale = if case.q_scales { f64::from(self.q_scales[head]) } else { 1.0 };
            let weight = f64::from(self.weights[head]) * scale * factor;
            // Unlike `max`, this keeps NaN.
            value += weight * if product < 0.0 { 0.0 } else { product };
            energy += weight * weight * squares;
        }
        Score { value, energy }
    }
}

/// The keys with the highest scores: equal scores by index, NaN
/// last, then −1.
pub(super) fn chosen(case: &IndexerCase, query: usize, scores: &[f32], table: &[u32], count: usize) -> Vec<i32> {
    let mut keys: Vec<usize> = case.visible(query).filter(|&key| case.row(query, key, table).is_some()).collect();
    keys.sort_by(|&a, &b| {
        let (a, b) = (scores[a], scores[b]);
        // A stable sort: equal scores stay in the order of keys.
        a.is_nan().cmp(&b.is_nan()).then(b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal))
    });
    let mut chosen: Vec<i32> = keys.into_iter().take(count).map(|key| key as i32).collect();
    chosen.resize(count, -1);
    chosen
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::KvFormat;

    use super::*;
    use crate::indexer::IndexedKeys;

    #[test]
    fn keys_are_chosen_by_score_then_index_and_nan_last() {
        let case = IndexerCase::new(1, (1, 16), KvFormat::Plain(DType::F16), IndexedKeys::Ranges(7, vec![(0, 6)]));
        let scores = [0.0, f32::NAN, 2.0, -0.0, f32::NEG_INFINITY, 2.0, 9.0];
        assert_eq!(chosen(&case, 0, &scores, &[], 8), [2, 5, 0, 3, 4, 1, -1, -1]);
        assert_eq!(chosen(&case, 0, &scores, &[], 3), [2, 5, 0]);
    }
}

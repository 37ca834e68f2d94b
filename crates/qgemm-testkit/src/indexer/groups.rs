//! The suite of `indexer`: cases that every backend must pass.

use qgemm_formats::DType;
use qgemm_hal::KvFormat;

use super::case::{IndexedKeys, IndexerCase, IndexerValues};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<IndexerCase>] = &[
    group("indexer_lengths", "no keys, one, a tile and one more or less; ranges, pages of every size", lengths),
    group("indexer_heads", "one head to many, every number of features and format", heads),
    group("indexer_values", "exact scores, NaN and infinities in keys and outside, pages that are none", values),
    group("indexer_best", "keys chosen: few, all, more than there are; equal scores, zeros, NaN", best),
    group("indexer_layouts", "strides, unaligned operands, scales within pages", layouts),
];

const E4M3: KvFormat = KvFormat::E4M3;
const F16: KvFormat = KvFormat::Plain(DType::F16);
const BF16: KvFormat = KvFormat::Plain(DType::BF16);

fn formats(i: usize) -> KvFormat {
    [E4M3, F16, E4M3, BF16][i % 4]
}

/// Numbers the seeds of cases, so that random values differ.
fn numbered(cases: Vec<IndexerCase>) -> Vec<IndexerCase> {
    cases.into_iter().enumerate().map(|(i, case)| IndexerCase { seed: i as u64, ..case }).collect()
}

/// Ranges in `keys` keys: some empty, some adjacent, some past
/// the last key.
fn ranges(queries: usize, keys: usize) -> IndexedKeys {
    let keys_u32 = keys as u32;
    let range = |i: usize| match i % 6 {
        0 => (0, keys_u32),
        1 => (keys_u32 / 3, keys_u32 / 2 + 1),
        2 => (5, 5),
        3 => (keys_u32 / 2, u32::MAX),
        4 => (keys_u32, 3),
        _ => (0, i as u32 + 1),
    };
    IndexedKeys::Ranges(keys, (0..queries).map(range).collect())
}

fn lengths() -> Vec<IndexerCase> {
    let mut cases = Vec::new();
    for (i, keys) in [0, 1, 2, 15, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300].into_iter().enumerate() {
        let queries = [1, 2, 5, 7][i % 4];
        cases.push(IndexerCase::new(queries, (8, 64), formats(i), IndexedKeys::All(keys)));
        cases.push(IndexerCase::new(6, (4, 32), formats(i + 1), ranges(6, keys)));
    }
    for (i, queries) in [0, 1, 31, 65, 130].into_iter().enumerate() {
        cases.push(IndexerCase::new(queries, (2, 16), formats(i), IndexedKeys::All(40)));
        cases.push(IndexerCase::new(queries, (3, 16), formats(i + 1), ranges(queries, 150)));
    }
    let all: [&[usize]; 5] = [&[1], &[0, 3, 200], &[129, 128, 127, 1, 0], &[7; 20], &[70]];
    for (i, lengths) in all.into_iter().enumerate() {
        for (j, size) in [1, 3, 16, 64, 100].into_iter().enumerate() {
            let queries = lengths.len() * [1, 2, 5][(i + j) % 3];
            let keys = IndexedKeys::Paged(size, lengths.to_vec());
            cases.push(IndexerCase::new(queries, (4, 32), formats(i + j), keys));
        }
    }
    let many = IndexedKeys::Paged(16, vec![150, 90]);
    cases.push(IndexerCase::new(140, (2, 16), E4M3, many));
    numbered(cases)
}

fn heads() -> Vec<IndexerCase> {
    let mut cases = Vec::new();
    for (i, heads) in [1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 100, 128].into_iter().enumerate() {
        let features = [128, 64, 16][i % 3];
        let case = IndexerCase::new(3, (heads, features), formats(i), IndexedKeys::All(70));
        cases.push(IndexerCase { q_scales: i % 2 == 0, ..case });
    }
    // Enough queries for kernels that keep keys in registers.
    for (i, (heads, features)) in [(64, 128), (32, 128), (33, 112), (64, 64), (5, 16)].into_iter().enumerate() {
        let case =
            IndexerCase::new(21, (heads, features), E4M3, [IndexedKeys::All(300), ranges(21, 270)][i % 2].clone());
        cases.push(IndexerCase { q_scales: i % 2 == 0, ..case });
    }
    cases.push(IndexerCase::new(34, (64, 128), E4M3, IndexedKeys::Paged(16, vec![270, 30])));
    for features in (16..=256).step_by(16) {
        for (i, format) in [E4M3, F16, BF16].into_iter().enumerate() {
            if (features / 16 + i) % 3 == 0 || features % 64 == 0 {
                let case = IndexerCase::new(2, (5 + i, features), format, ranges(2, 45));
                cases.push(IndexerCase { q_scales: i == 1, ..case });
            }
        }
    }
    numbered(cases)
}

fn values() -> Vec<IndexerCase> {
    use IndexerValues as V;
    let mut cases = Vec::new();
    for (i, values) in [V::Integers, V::Nan, V::Infinite, V::Zeros].into_iter().enumerate() {
        for (j, format) in [E4M3, F16, BF16].into_iter().enumerate() {
            let (heads, features) = [(12, 128), (3, 48), (64, 64)][(i + j) % 3];
            let of =
                |queries, keys| IndexerCase { values, ..IndexerCase::new(queries, (heads, features), format, keys) };
            cases.push(of(3, IndexedKeys::All(130)));
            cases.push(of(6, ranges(6, 140)));
            cases.push(of(4, IndexedKeys::Paged(7, vec![90, 33])));
        }
    }
    for (i, size) in [1, 16, 5].into_iter().enumerate() {
        let keys = IndexedKeys::Paged(size, vec![60, 100, 3]);
        cases.push(IndexerCase { values: V::BadPages, ..IndexerCase::new(6, (9, 64), formats(i), keys) });
    }
    numbered(cases)
}

fn best() -> Vec<IndexerCase> {
    use IndexerValues as V;
    let mut cases = Vec::new();
    let counts = [0, 1, 2, 16, 31, 64, 100, 129, 500, 2048];
    for (i, count) in counts.into_iter().enumerate() {
        let values = [V::Normal, V::Integers, V::Zeros, V::Nan][i % 4];
        let of = |queries, format, keys| IndexerCase {
            values,
            best: Some(count),
            ..IndexerCase::new(queries, (4, 32), format, keys)
        };
        cases.push(of(2, formats(i), IndexedKeys::All(130)));
        cases.push(of(6, formats(i + 1), ranges(6, 300)));
        cases.push(of(4, formats(i + 2), IndexedKeys::Paged([16, 3][i % 2], vec![100, 40])));
    }
    for (i, values) in [V::Normal, V::Integers, V::Zeros, V::Nan, V::Infinite].into_iter().enumerate() {
        for (j, keys) in [1, 64, 1000, 3000].into_iter().enumerate() {
            let best = Some([1, 33, 600, 2048][(i + j) % 4]);
            let case = IndexerCase::new(2, (2, 16), formats(i + j), IndexedKeys::All(keys));
            cases.push(IndexerCase { values, best, ..case });
        }
    }
    // More equal scores than are sorted together.
    for (keys, values) in [(9001, V::Zeros), (5000, V::Integers)] {
        let case = IndexerCase::new(1, (1, 16), E4M3, IndexedKeys::All(keys));
        cases.push(IndexerCase { values, best: Some(2048), ..case });
    }
    // Scores of so many queries and keys are not all stored; keys
    // above a threshold are. Equal scores mislead the threshold.
    for (values, keys) in [(V::Normal, ranges(64, 1 << 14)), (V::Integers, IndexedKeys::All(1 << 14))] {
        let case = IndexerCase::new(64, (1, 16), E4M3, keys);
        cases.push(IndexerCase { values, best: Some(2048), ..case });
    }
    // A sample of the scores gives the threshold. Ranges begin and
    // end off multiples of four keys.
    for (i, values) in [V::Normal, V::Nan, V::Infinite, V::Normal].into_iter().enumerate() {
        let keys = IndexedKeys::Ranges(9001, vec![(0, 9001), (3, 8990), (4090, 9000), (2, 6001)]);
        let case = IndexerCase::new(4, (2, 16), formats(i), keys);
        cases.push(IndexerCase { values, best: Some([2048, 100, 1, 1500][i]), ..case });
    }
    let bad = IndexedKeys::Paged(5, vec![60, 100, 3]);
    cases.push(IndexerCase { values: V::BadPages, best: Some(70), ..IndexerCase::new(6, (9, 64), F16, bad) });
    cases.push(IndexerCase { best: Some(7), ..IndexerCase::new(3, (2, 16), E4M3, IndexedKeys::All(0)) });
    numbered(cases)
}

fn layouts() -> Vec<IndexerCase> {
    let mut cases = Vec::new();
    for (i, (gap, offset)) in [(16, 0), (3, 0), (0, 1), (5, 3), (8, 8)].into_iter().enumerate() {
        for (j, format) in [E4M3, F16, BF16].into_iter().enumerate() {
            let keys = match (i + j) % 3 {
                0 => IndexedKeys::All(75),
                1 => ranges(4, 75),
                _ => IndexedKeys::Paged(10, vec![35, 20]),
            };
            let case = IndexerCase::new(4, (6, 48), format, keys);
            cases.push(IndexerCase { gap, offset, best: Some(9), q_scales: j == 0, ..case });
        }
    }
    for (i, size) in [16, 64, 4].into_iter().enumerate() {
        let keys = IndexedKeys::Paged(size, vec![35, 20, 100]);
        let case = IndexerCase::new(6, (8, 128), E4M3, keys);
        cases.push(IndexerCase { scales_in_pages: true, best: (i > 0).then_some(12), ..case });
    }
    numbered(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_meets_every_kind_of_keys() {
        let all: Vec<IndexerCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for format in [E4M3, F16, BF16] {
            let has = |of: fn(&IndexedKeys) -> bool| all.iter().any(|case| case.format == format && of(&case.keys));
            assert!(has(|keys| matches!(keys, IndexedKeys::All(_))), "{format}");
            assert!(has(|keys| matches!(keys, IndexedKeys::Ranges(..))), "{format}");
            assert!(has(|keys| matches!(keys, IndexedKeys::Paged(..))), "{format}");
        }
    }
}

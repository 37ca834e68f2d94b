//! The suite of `gather_rows`: cases that every backend must pass, and
//! random ones.

use qgemm_formats::{DType, Encoding, Format};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::GatherRowsCase;
use crate::gemm::ActOrder;
use crate::suite::Group;
use crate::weights::WeightKind;

/// A group and its cases for a format; empty if the group does
/// not apply to the format.
type Cases = (Group, fn(Format) -> Vec<GatherRowsCase>);

const fn group(name: &'static str, summary: &'static str, cases: fn(Format) -> Vec<GatherRowsCase>) -> Cases {
    (Group { name, summary }, cases)
}

/// All groups.
pub(super) const GROUPS: &[Cases] = &[
    group("gather_rows_formats", "rows of every format to every type, around tiles and k-tiles", formats),
    group("gather_rows_ids", "ids that are no rows: zeros, and a status that names the first", ids),
    group("gather_rows_layouts", "leading dimensions, offsets, permuted columns and a scale", layouts),
];

/// Ids and rows of W: one, and around tiles of 16 and 32 rows.
const SIZES: [[usize; 2]; 4] = [[1, 1], [3, 16], [9, 33], [40, 70]];

/// A K that ends inside a k-tile, and inside a block if the
/// format allows.
fn ragged_k(format: Format) -> usize {
    match (format.block_len, format.ragged_k) {
        (1, _) => 131,
        (block, true) => 2 * block + 5,
        (block, false) => (64 / block + 1) * block,
    }
}

fn dtype(i: usize) -> DType {
    DType::ALL[i % DType::ALL.len()]
}

fn formats(format: Format) -> Vec<GatherRowsCase> {
    let case = |(i, [rows, table_rows]): (usize, [usize; 2])| {
        // A long K needs several CTAs a row.
        let k = if i == 0 { 2304usize.next_multiple_of(format.block_len) } else { ragged_k(format) };
        let case = GatherRowsCase::new(format, [rows, table_rows, k]);
        [0, 1].map(|step| GatherRowsCase { d_dtype: dtype(i + step), seed: (i + step) as u64, ..case })
    };
    SIZES.into_iter().enumerate().flat_map(case).collect()
}

fn ids(format: Format) -> Vec<GatherRowsCase> {
    let case = GatherRowsCase { bad_ids: true, ..GatherRowsCase::new(format, [30, 20, ragged_k(format)]) };
    vec![case, GatherRowsCase { d_dtype: DType::BF16, table_rows: 1, seed: 2, ..case }]
}

fn layouts(format: Format) -> Vec<GatherRowsCase> {
    let case = GatherRowsCase::new(format, [6, 50, ragged_k(format)]);
    let mut cases = vec![
        GatherRowsCase { d_dtype: DType::F16, d_gap: 3, d_offset: 1, ..case },
        GatherRowsCase { d_dtype: DType::BF16, d_gap: 8, seed: 2, ..case },
        GatherRowsCase { scale: -25.3, d_dtype: DType::F32, seed: 5, ..case },
    ];
    if format.encoding == Encoding::IntZero {
        let case = GatherRowsCase { k: 3 * format.block_len + 9, ..case };
        cases.push(GatherRowsCase {
            act_order: Some(ActOrder::Full),
            d_dtype: DType::F16,
            scale: 0.375,
            seed: 3,
            ..case
        });
        cases.push(GatherRowsCase { act_order: Some(ActOrder::Padded), seed: 4, ..case });
    }
    cases
}

/// The random case of a seed.
pub(super) fn random_case(all: &[Format], seed: u64) -> GatherRowsCase {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x6a70_5eed_0000_0000);
    let format = all[rng.random_range(0..all.len())];
    let k = rng.random_range(1..=12) * format.block_len.max(32).next_multiple_of(format.block_len);
    let case = GatherRowsCase::new(format, [rng.random_range(1..=60), rng.random_range(1..=200), k]);
    GatherRowsCase {
        d_dtype: dtype(rng.random_range(0..3)),
        weights: WeightKind::Raw,
        bad_ids: rng.random_bool(0.3),
        d_gap: [0, 0, 1, 8][rng.random_range(0..4)],
        d_offset: [0, 0, 1, 3][rng.random_range(0..4)],
        scale: [1.0, 1.0, 33.94, -0.5][rng.random_range(0..4)],
        seed,
        ..case
    }
}

//! Gated pairs: gate and up weights (GLU) interleaved as
//! one weight. One pass then accumulates gate and up of a
//! feature in one lane.

use rayon::prelude::*;

use crate::error::FormatError;
use crate::weight::{HostWeight, NO_COLUMN};

/// Rows per interleaved run: the row distance within a lane
/// of `MmaM16`.
pub const PAIR_ROWS: usize = 8;

/// Rows of each weight of a pair with `n` output
/// features. `None` on overflow.
pub(crate) fn pair_rows(n: usize) -> Option<usize> {
    n.div_ceil(PAIR_ROWS).checked_mul(2 * PAIR_ROWS)
}

impl HostWeight {
    /// Interleaves gate and up in runs of 8 rows.
    ///
    /// For `i` in 0..8, row `16 j + i` is row `8 j + i` of the gate,
    /// and row `16 j + 8 + i` is row `8 j + i` of the up weight.
    /// If 8 does not divide N, zero rows with a row factor of 0 fill
    /// the last run; their results are discarded. A weight without row
    /// factors gets factors of 1 if the other has them.
    ///
    /// # Errors
    /// [`FormatError::PairMismatch`] when format, N, K or column order
    /// differ; [`FormatError::Overflow`].
    pub fn gated_pair(gate: &Self, up: &Self) -> Result<Self, FormatError> {
        check_alike(gate, up)?;
        in_eights(gate.n(), [gate, up].map(|weight| Every { weight, first: 0, step: 1 }))
    }

    /// [`HostWeight::gated_pair`] of a weight with alternating gate and
    /// up rows (gate first), as gpt-oss stores them. Every
    /// format serves: rows are independent, and rows with shared
    /// scales (128×128 blocks) stay in runs of 8.
    /// [`pair_bias`] reorders its bias.
    ///
    /// # Errors
    /// [`FormatError::PairMismatch`] for an odd number of rows;
    /// [`FormatError::Overflow`].
    pub fn interleaved_pair(&self) -> Result<Self, FormatError> {
        check_even(self.n(), "number of alternate rows")?;
        in_eights(self.n() / 2, [0, 1].map(|first| Every { weight: self, first, step: 2 }))
    }
}

/// Bias of a gated pair, first the gate's, from alternating values
/// of gate and up (gate first).
///
/// # Errors
/// [`FormatError::PairMismatch`] for an odd number of values.
pub fn pair_bias<T: Copy>(interleaved: &[T]) -> Result<Vec<T>, FormatError> {
    check_even(interleaved.len(), "number of alternate biases")?;
    let of = |first| interleaved.iter().skip(first).step_by(2).copied();
    Ok(of(0).chain(of(1)).collect())
}

fn check_even(count: usize, what: &'static str) -> Result<(), FormatError> {
    if count.is_multiple_of(2) {
        return Ok(());
    }
    let (gate, up) = (count.div_ceil(2).to_string(), (count / 2).to_string());
    Err(FormatError::PairMismatch { what, gate, up })
}

/// Rows of a weight at equal distances.
#[derive(Clone, Copy)]
struct Every<'a> {
    weight: &'a HostWeight,
    first: usize,
    step: usize,
}

impl Every<'_> {
    fn row(&self, i: usize) -> usize {
        self.first + i * self.step
    }
}

/// A pair of `n` rows of gate and up, in runs of 8.
fn in_eights(n: usize, parts: [Every<'_>; 2]) -> Result<HostWeight, FormatError> {
    let gate = parts[0].weight;
    let (format, stored_k) = (gate.format(), gate.stored_k());
    let groups = n.div_ceil(PAIR_ROWS);
    let row_bytes = format.row_bytes(stored_k);
    let overflow = || FormatError::Overflow {
        what: format!("gated pair of {format} weights"),
        dims: vec![n as u64, stored_k as u64],
    };
    let group_bytes = row_bytes.checked_mul(2 * PAIR_ROWS).ok_or_else(overflow)?;
    let mut blocks = vec![0; group_bytes.checked_mul(groups).ok_or_else(overflow)?];
    blocks.par_chunks_mut(group_bytes).enumerate().for_each(|(group, out)| {
        for (out, part) in out.chunks_exact_mut(group_bytes / 2).zip(&parts) {
            let rows = group * PAIR_ROWS..n.min((group + 1) * PAIR_ROWS);
            for (out, row) in out.chunks_exact_mut(row_bytes).zip(rows) {
                out.copy_from_slice(part.weight.row(part.row(row)));
            }
        }
    });
    let rows = pair_rows(n).ok_or_else(overflow)?;
    let pair = match gate.k_order() {
        None => HostWeight::new(format, rows, gate.k(), blocks.into())?,
        Some(order) => HostWeight::with_k_order(format, rows, gate.k(), blocks.into(), order.to_vec())?,
    }
    .with_stated_x(HostWeight::stated_by_all(parts.iter().map(|part| part.weight)));
    if parts.iter().all(|part| part.weight.row_scale().is_none()) {
        return Ok(pair);
    }
    let mut scales = vec![0.0; rows];
    for (first, part) in [0, PAIR_ROWS].into_iter().zip(&parts) {
        for row in 0..n {
            let at = row / PAIR_ROWS * 2 * PAIR_ROWS + row % PAIR_ROWS + first;
            scales[at] = part.weight.row_scale().map_or(1.0, |scales| scales[part.row(row)]);
        }
    }
    pair.with_row_scale(scales)
}

fn check_alike(gate: &HostWeight, up: &HostWeight) -> Result<(), FormatError> {
    if gate.format() == up.format() && gate.n() != up.n() {
        return Err(FormatError::PairMismatch { what: "N", gate: gate.n().to_string(), up: up.n().to_string() });
    }
    match row_difference(gate, up) {
        None => Ok(()),
        Some((what, gate, up)) => Err(FormatError::PairMismatch { what, gate, up }),
    }
}

/// First property that prevents the rows of `a` and `b` from
/// sharing a weight, with both values.
pub(crate) fn row_difference(a: &HostWeight, b: &HostWeight) -> Option<(&'static str, String, String)> {
    if a.format() != b.format() {
        return Some(("format", a.format().to_string(), b.format().to_string()));
    }
    let sizes = |w: &HostWeight| [("K", w.k()), ("stored columns", w.stored_k())];
    for ((what, a), (_, b)) in sizes(a).into_iter().zip(sizes(b)) {
        if a != b {
            return Some((what, a.to_string(), b.to_string()));
        }
    }
    let stored = |w: &HostWeight, i: usize| match w.k_order().map(|order| order[i]) {
        None => i as u32,
        Some(column) => column,
    };
    let describe = |column| match column {
        NO_COLUMN => "nothing".to_owned(),
        column => format!("input feature {column}"),
    };
    if let Some(i) = (0..a.stored_k()).find(|&i| stored(a, i) != stored(b, i)) {
        let (a, b) = (describe(stored(a, i)), describe(stored(b, i)));
        return Some(("column order", format!("{a} at {i}"), format!("{b} at {i}")));
    }
    let name = |w: &HostWeight| if w.k_order().is_some() { "a list" } else { "none" }.to_owned();
    (a.k_order().is_some() != b.k_order().is_some()).then(|| ("column order", name(a), name(b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::sample;
    use crate::{DType, Format};

    fn weight(format: Format, n: usize, blocks: usize, seed: u32) -> HostWeight {
        sample(format, n, format.block_len * blocks, seed)
    }

    #[test]
    fn rows_stand_in_eights() {
        for format in Format::all() {
            for n in [1, 8, 19] {
                let (gate, up) = (weight(format, n, 2, 1), weight(format, n, 2, 2));
                let pair = HostWeight::gated_pair(&gate, &up).expect("alike");
                assert_eq!((pair.n(), pair.k()), (n.div_ceil(8) * 16, gate.k()), "{format}");
                for row in 0..pair.n() {
                    let (weight, of) = (if row % 16 < 8 { &gate } else { &up }, row / 16 * 8 + row % 8);
                    match of < n {
                        true => assert_eq!(pair.row(row), weight.row(of), "{format} {row}"),
                        false => assert!(pair.row(row).iter().all(|&byte| byte == 0), "{format} {row}"),
                    }
                }
            }
        }
    }

    #[test]
    fn alternating_rows_make_the_pair_of_their_halves() {
        for format in Format::all() {
            for n in [1, 8, 19] {
                let both = weight(format, 2 * n, 2, 3);
                let scales: Vec<f32> = (0..2 * n).map(|i| i as f32 + 0.5).collect();
                let of = |weight: &HostWeight, first: usize| {
                    let blocks: Vec<u8> = (0..n).flat_map(|i| weight.row(2 * i + first).to_vec()).collect();
                    let scales = (0..n).map(|i| scales[2 * i + first]).collect();
                    let one = HostWeight::new(format, n, both.k(), blocks.into()).expect("valid");
                    one.with_row_scale(scales).expect("one each")
                };
                let expected = HostWeight::gated_pair(&of(&both, 0), &of(&both, 1)).expect("alike");
                let pair =
                    both.clone().with_row_scale(scales.clone()).expect("one each").interleaved_pair().expect("even");
                assert_eq!((pair.n(), pair.k()), (expected.n(), expected.k()), "{format}");
                assert_eq!(pair.blocks()[..], expected.blocks()[..], "{format}");
                assert_eq!(pair.row_scale(), expected.row_scale(), "{format}");
            }
            let odd = weight(format, 3, 1, 1).interleaved_pair();
            assert!(matches!(odd, Err(FormatError::PairMismatch { .. })), "{odd:?}");
        }
        assert_eq!(pair_bias(&[1, 2, 3, 4, 5, 6]).expect("even"), [1, 3, 5, 2, 4, 6]);
        assert!(pair_bias(&[1.0; 3]).is_err());
    }

    #[test]
    fn row_scales_stand_beside_their_rows() {
        let f32: Format = "f32".parse().expect("a format");
        let plain = |n: usize| HostWeight::new(f32, n, 1, DType::F32.encode(&vec![1.0; n]).into()).expect("valid");
        let gate = plain(9).with_row_scale((1..=9).map(|i| i as f32).collect()).expect("nine");
        let pair = HostWeight::gated_pair(&gate, &plain(9)).expect("alike");
        let mut expected: Vec<f32> = (1..=8).map(|i| i as f32).chain([1.0; 8]).collect();
        expected.extend([9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(pair.row_scale(), Some(&*expected));
    }

    #[test]
    fn what_differs_is_named() {
        let [f32, f16]: [Format; 2] = ["f32", "f16"].map(|name| name.parse().expect("a format"));
        let mismatch = |gate: &HostWeight, up: &HostWeight| match HostWeight::gated_pair(gate, up) {
            Err(FormatError::PairMismatch { what, gate, up }) => (what, gate, up),
            other => panic!("{other:?}"),
        };
        let expect = |what, gate: &str, up: &str| (what, gate.to_owned(), up.to_owned());
        let base = weight(f32, 4, 6, 1);
        assert_eq!(mismatch(&base, &weight(f16, 4, 6, 1)), expect("format", "f32", "f16"));
        assert_eq!(mismatch(&base, &weight(f32, 5, 6, 1)), expect("N", "4", "5"));
        assert_eq!(mismatch(&base, &weight(f32, 4, 7, 1)), expect("K", "6", "7"));
        let ordered = |order: [u32; 6]| {
            HostWeight::with_k_order(f32, 4, 6, base.blocks().to_vec().into(), order.to_vec()).expect("a permutation")
        };
        let swapped = expect("column order", "input feature 1 at 0", "input feature 0 at 0");
        assert_eq!(mismatch(&ordered([1, 0, 2, 3, 4, 5]), &base), swapped);
        assert_eq!(mismatch(&ordered([0, 1, 2, 3, 4, 5]), &base), expect("column order", "a list", "none"));
        assert!(HostWeight::gated_pair(&ordered([1, 0, 2, 3, 4, 5]), &ordered([1, 0, 2, 3, 4, 5])).is_ok());
    }
}

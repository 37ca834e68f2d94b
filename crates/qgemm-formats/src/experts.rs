//! Expert weights: [`HostExperts`] stacks all experts of a layer into one weight.
//! One packed copy then serves every kind of product.

use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// Row alignment of each expert: the largest tile height of the packed layouts.
/// An expert therefore begins at a tile.
pub const EXPERT_ROWS: usize = 32;

/// Expert weights of one layer in host memory, stacked along N. All experts
/// have one format, N and K.
///
/// Each expert is padded with zero rows to a multiple of [`EXPERT_ROWS`]. Results
/// of padding rows are discarded.
#[derive(Clone, Debug)]
pub struct HostExperts {
    stacked: HostWeight,
    experts: usize,
    rows: usize,
    features: usize,
    gated: bool,
    k_orders: Option<Vec<Vec<u32>>>,
}

impl HostExperts {
    /// Stacks experts; ids are their positions.
    ///
    /// # Errors
    /// [`FormatError::NoExperts`] for none. [`FormatError::ExpertMismatch`] when format,
    /// N, K or stored K differ from expert 0. [`FormatError::Overflow`].
    pub fn new(experts: &[HostWeight]) -> Result<Self, FormatError> {
        let first = experts.first().ok_or(FormatError::NoExperts)?;
        for (expert, weight) in experts.iter().enumerate() {
            check_alike(expert, first, weight)?;
        }
        let (format, n) = (first.format(), first.n());
        let row_bytes = format.row_bytes(first.stored_k());
        let pitch = padded(n).and_then(|rows| rows.checked_mul(row_bytes));
        let total = pitch.and_then(|pitch| pitch.checked_mul(experts.len()));
        let (Some(pitch), Some(total)) = (pitch, total) else { return Err(overflow(experts.len(), first)) };
        let mut blocks = vec![0; total];
        for (out, weight) in blocks.chunks_exact_mut(pitch).zip(experts) {
            out[..weight.blocks().len()].copy_from_slice(weight.blocks());
        }
        let scales: Vec<Option<&[f32]>> = experts.iter().map(HostWeight::row_scale).collect();
        let k_orders = match experts.iter().any(|weight| weight.k_order().is_some()) {
            false => None,
            true => Some(experts.iter().map(order_of).collect()),
        };
        let stacked = Self::build(first, blocks.into(), experts.len(), &scales, k_orders)?;
        let stated = HostWeight::stated_by_all(experts.iter());
        Ok(Self { stacked: stacked.stacked.with_stated_x(stated), ..stacked })
    }

    /// Stacks gated pairs (gate, up), one per expert: see [`HostWeight::gated_pair`].
    ///
    /// # Errors
    /// As [`HostExperts::new`], and [`FormatError::PairMismatch`].
    pub fn gated(pairs: &[(HostWeight, HostWeight)]) -> Result<Self, FormatError> {
        let first = pairs.first().ok_or(FormatError::NoExperts)?;
        let features = first.0.n();
        for (expert, (gate, _)) in pairs.iter().enumerate() {
            check_alike(expert, &first.0, gate)?;
        }
        let paired: Result<Vec<_>, _> = pairs.iter().map(|(gate, up)| HostWeight::gated_pair(gate, up)).collect();
        Ok(Self { features, gated: true, ..Self::new(&paired?)? })
    }

    /// Stacks gated pairs whose gate and up rows alternate, one per expert: see
    /// [`HostWeight::interleaved_pair`].
    ///
    /// # Errors
    /// As [`HostExperts::new`], and [`FormatError::PairMismatch`] for an odd number of rows.
    pub fn interleaved(experts: &[HostWeight]) -> Result<Self, FormatError> {
        let first = experts.first().ok_or(FormatError::NoExperts)?;
        let features = first.n() / 2;
        for (expert, weight) in experts.iter().enumerate() {
            check_alike(expert, first, weight)?;
        }
        let paired: Result<Vec<_>, _> = experts.iter().map(HostWeight::interleaved_pair).collect();
        Ok(Self { features, gated: true, ..Self::new(&paired?)? })
    }

    /// Splits a stacked weight into `experts` experts of equal row count, as in GGUF's
    /// three-dimensional tensors.
    ///
    /// Copies nothing when an expert's rows are a multiple of [`EXPERT_ROWS`].
    ///
    /// # Errors
    /// [`FormatError::NoExperts`] for none. [`FormatError::UnevenExperts`] when rows are no
    /// multiple of `experts`. [`FormatError::Overflow`].
    pub fn of_stacked(weight: &HostWeight, experts: usize) -> Result<Self, FormatError> {
        if experts == 0 {
            return Err(FormatError::NoExperts);
        }
        if !weight.n().is_multiple_of(experts) {
            return Err(FormatError::UnevenExperts { rows: weight.n(), experts });
        }
        let rows = weight.n() / experts;
        let k_orders = weight.k_order().map(|order| vec![order.to_vec(); experts]);
        if rows.is_multiple_of(EXPERT_ROWS) && k_orders.is_none() {
            let stacked = weight.clone();
            return Ok(Self { stacked, experts, rows, features: rows, gated: false, k_orders });
        }
        let one = |expert: usize| weight.rows_between(expert * rows..(expert + 1) * rows);
        Self::new(&(0..experts).map(one).collect::<Result<Vec<_>, FormatError>>()?)
    }

    /// Stacks `blocks` of experts that are shaped like `first`, with their row scales.
    fn build(
        first: &HostWeight,
        blocks: SharedBytes,
        experts: usize,
        scales: &[Option<&[f32]>],
        k_orders: Option<Vec<Vec<u32>>>,
    ) -> Result<Self, FormatError> {
        let rows = first.n();
        let pitch = padded(rows).ok_or_else(|| overflow(experts, first))?;
        let mut stacked = HostWeight::of_stored(first.format(), pitch * experts, first.k(), first.stored_k(), blocks)?;
        if scales.iter().any(Option::is_some) {
            let mut all = vec![0.0; pitch * experts];
            for (out, scales) in all.chunks_exact_mut(pitch).zip(scales) {
                match scales {
                    Some(scales) => out[..rows].copy_from_slice(scales),
                    None => out[..rows].fill(1.0),
                }
            }
            stacked = stacked.with_row_scale(all)?;
        }
        Ok(Self { stacked, experts, rows, features: rows, gated: false, k_orders })
    }

    /// Other experts of the same kind.
    pub(crate) fn with_experts(&self, stacked: HostWeight, experts: usize, k_orders: Option<Vec<Vec<u32>>>) -> Self {
        Self { stacked, experts, k_orders, ..*self }
    }

    /// These experts as gated pairs of `features` output features.
    pub(crate) fn of_pairs(self, features: usize) -> Self {
        Self { features, gated: true, ..self }
    }

    /// Stacked weight of [`HostExperts::row_pitch`] rows per expert, without a column
    /// order.
    pub fn stacked(&self) -> &HostWeight {
        &self.stacked
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.stacked.format()
    }

    /// Stored rows of an expert without padding: output features, or interleaved rows
    /// of a gated pair.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row distance between experts, a multiple of [`EXPERT_ROWS`].
    pub fn row_pitch(&self) -> usize {
        self.stacked.n() / self.experts
    }

    /// Output features of an expert. A gated pair counts one of its weights.
    pub fn n(&self) -> usize {
        self.features
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.stacked.k()
    }

    /// Columns of a stored row.
    pub fn stored_k(&self) -> usize {
        self.stacked.stored_k()
    }

    /// Whether each expert is a gated pair.
    pub fn is_gated(&self) -> bool {
        self.gated
    }

    /// Column order of each expert ([`HostWeight::k_order`]); `None` when all orders are
    /// natural.
    pub fn k_orders(&self) -> Option<&[Vec<u32>]> {
        self.k_orders.as_deref()
    }
}

/// Order of stored columns, explicit even if natural.
fn order_of(weight: &HostWeight) -> Vec<u32> {
    weight.k_order().map_or_else(|| (0..weight.stored_k() as u32).collect(), <[u32]>::to_vec)
}

fn padded(rows: usize) -> Option<usize> {
    rows.checked_next_multiple_of(EXPERT_ROWS)
}

fn overflow(experts: usize, first: &HostWeight) -> FormatError {
    FormatError::Overflow {
        what: format!("{} weights of experts", first.format()),
        dims: vec![experts as u64, first.n() as u64, first.stored_k() as u64],
    }
}

fn check_alike(expert: usize, first: &HostWeight, weight: &HostWeight) -> Result<(), FormatError> {
    let shape = |w: &HostWeight| format!("{} of {} x {} ({} stored)", w.format(), w.n(), w.k(), w.stored_k());
    let (expected, got) = (shape(first), shape(weight));
    if expected == got { Ok(()) } else { Err(FormatError::ExpertMismatch { expert, expected, got }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize_matrix;

    fn weight(format: &str, n: usize, k: usize, seed: usize) -> HostWeight {
        let values: Vec<f32> = (0..n * k).map(|i| ((i * 7 + seed * 13) % 29) as f32 - 14.0).collect();
        quantize_matrix(&values, n, k, format.parse().expect("a format")).expect("quantizes").weight
    }

    #[test]
    fn experts_lie_one_below_the_other_and_begin_at_tiles() {
        let all: Vec<_> = (0..3).map(|seed| weight("q8_0", 33, 64, seed)).collect();
        let experts = HostExperts::new(&all).expect("alike");
        assert_eq!((experts.experts(), experts.rows(), experts.row_pitch(), experts.n()), (3, 33, 64, 33));
        for (e, one) in all.iter().enumerate() {
            for row in [0, 32] {
                assert_eq!(experts.stacked().row(e * 64 + row), one.row(row));
            }
            assert!(experts.stacked().row(e * 64 + 33).iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn stacked_tensors_of_whole_tiles_are_shared() {
        let tall = weight("q4_0", 4 * 64, 32, 1);
        let experts = HostExperts::of_stacked(&tall, 4).expect("even");
        assert_eq!(experts.stacked().blocks().as_ptr(), tall.blocks().as_ptr());
        let uneven = HostExperts::of_stacked(&weight("q4_0", 6, 32, 1), 4).expect_err("6 rows");
        assert!(uneven.to_string().contains("6 rows"), "{uneven}");
        let small = HostExperts::of_stacked(&weight("q4_0", 6, 32, 1), 3).expect("even");
        assert_eq!((small.rows(), small.row_pitch()), (2, 32));
        assert_eq!(small.stacked().row(33), weight("q4_0", 6, 32, 1).row(3));
    }

    #[test]
    fn what_differs_is_named() {
        let (a, b) = (weight("q4_0", 4, 32, 1), weight("q4_0", 5, 32, 1));
        let error = HostExperts::new(&[a.clone(), a.clone(), b]).expect_err("differs").to_string();
        assert!(error.contains("expert 2") && error.contains("5 x 32"), "{error}");
        assert!(matches!(HostExperts::new(&[]), Err(FormatError::NoExperts)));
        let gated = HostExperts::gated(&[(a.clone(), a.clone()), (a.clone(), a)]).expect("alike");
        assert_eq!((gated.n(), gated.rows(), gated.row_pitch(), gated.is_gated()), (4, 16, 32, true));
    }
}

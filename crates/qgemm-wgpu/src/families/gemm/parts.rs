//! Split-K for few tokens and few rows of W, which
//! would leave workgroups idle.
//!
//! One launch writes the partial sums to the workspace, and a
//! second adds them in order, so that the bits are reproducible.

use std::ops::Range;

use qgemm_hal::{CheckedGemm, DeviceInfo, Feature, LaunchPlan, TileConfig};

use super::launches::{Launch, Product, TILE_ROWS};
use crate::families::dispatch::{MARGIN, MAX_GROUPS};

/// Maximum split-K.
const MOST_SPLITS: usize = 32;
/// Minimum columns of a part. Shorter parts take longer to start
/// and to reduce than to multiply.
const LEAST_COLUMNS: usize = 512;
/// Minimum columns on a software adapter, where starting and
/// finishing a workgroup is slow.
const LEAST_SOFTWARE_COLUMNS: usize = 16384;
/// Columns of a unit of W. Each slice of a workgroup
/// processes one unit at a time.
const UNIT: usize = 32;

/// Invocations of a workgroup that reduces partial sums.
pub(super) const SUM_THREADS: u32 = 64;

/// Phase of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The whole product.
    Whole,
    /// Partial sums of this many splits.
    Parts(u32),
    /// Outputs from this many partial sums.
    Sum(u32),
}

impl Phase {
    /// Its bits of `Params::modes`, where shaders find the number of splits.
    pub fn packed(self) -> u32 {
        match self {
            Phase::Whole => 0,
            Phase::Parts(splits) | Phase::Sum(splits) => (splits - 1) << 24,
        }
    }
}

/// Rows of a matrix of partial sums: whole W tiles.
pub(super) fn sum_rows(op: &CheckedGemm) -> usize {
    op.stored_rows.next_multiple_of(TILE_ROWS)
}

/// Bytes of the partial sums of `splits` parts.
fn sum_bytes(op: &CheckedGemm, splits: usize) -> usize {
    [op.m, sum_rows(op), splits, size_of::<f32>()].into_iter().fold(1, usize::saturating_mul)
}

/// Region of the partial sums in the workspace of `plan`.
pub(super) fn sums(op: &CheckedGemm, plan: &LaunchPlan) -> Range<usize> {
    let first = plan.workspace.partials;
    first..first + sum_bytes(op, plan.splits as usize)
}

/// Maximum split-K of `product` with tiles of `config`: as many parts
/// as fit in a binding, if there would be fewer workgroups
/// than units. Products with several dispatches are large enough without.
pub(super) fn most_splits(product: &Product<'_>, config: &TileConfig, launches: &[Launch], info: &DeviceInfo) -> u32 {
    let op = product.op;
    let is_one = launches.len() == 1 && op.segments.is_empty();
    let groups = op.stored_rows.div_ceil(config.tile_n as usize) * op.m.div_ceil(config.tile_m as usize);
    if !is_one || groups > 1 && groups >= info.units.min(MAX_GROUPS) as usize {
        return 1;
    }
    let least = if info.features.contains(&Feature::SoftwareAdapter) { LEAST_SOFTWARE_COLUMNS } else { LEAST_COLUMNS };
    let columns = least.max(config.k_groups as usize * UNIT);
    let of_bytes = info.max_buffer_bytes.saturating_sub(MARGIN) / sum_bytes(op, 1) as u64;
    let most = MOST_SPLITS.min(op.stored_k / columns).min(usize::try_from(of_bytes).unwrap_or(usize::MAX));
    most.max(1) as u32
}

/// Grid of the reduction: an invocation has
/// eight rows of a token.
pub(super) fn sum_grid(op: &CheckedGemm) -> [u32; 3] {
    let groups = (op.m * sum_rows(op) / 8).div_ceil(SUM_THREADS as usize);
    let x = groups.clamp(1, MAX_GROUPS as usize);
    [x as u32, groups.div_ceil(x) as u32, 1]
}

#[cfg(test)]
mod tests {
    use super::super::{gemv, launches, simt};
    use super::*;
    use crate::weight_code::WeightCode;

    #[test]
    fn parts_are_long_and_their_sums_fit_a_binding() {
        let splits = |m: usize, n: usize, k: usize, config: &TileConfig, info: &DeviceInfo| {
            let limit = info.max_buffer_bytes;
            let op = launches::tests::op(m, n, k);
            let code = WeightCode::new(op.format).expect("q4_0");
            let product = Product::new(&op, &code).expect("plain");
            let launches = Launch::of(&product, config, limit).expect("fits");
            let most = most_splits(&product, config, &launches, info);
            assert!(most == 1 || sum_bytes(&op, most as usize) as u64 + MARGIN <= limit);
            most
        };
        let (gemv, gemm) = (&gemv::CONFIGS[0], &simt::CONFIGS[0]);
        let none = qgemm_hal::noop::devices().remove(0);
        let mut info = DeviceInfo { max_buffer_bytes: 128 << 20, units: 132, ..none };
        assert_eq!(splits(1, 64, 16384, gemv, &info), 32);
        assert_eq!(splits(1, 64, 4096, gemv, &info), 8);
        assert_eq!(splits(1, 64, 512 + 511, gemm, &info), 1);
        // As many workgroups as units.
        assert_eq!(splits(1, 64 * 131, 4096, gemv, &info), 8);
        assert_eq!(splits(1, 64 * 132, 4096, gemv, &info), 1);
        // Several dispatches.
        info.units = u32::MAX;
        assert_eq!(splits(1, 1 << 20, 4096, gemm, &info), 1);
        assert_eq!(splits(1000, 10_000, 4096, gemm, &info), 3);
        info.features.insert(Feature::SoftwareAdapter);
        assert_eq!(splits(1, 60, 49152, gemm, &info), 3);
    }

    #[test]
    fn every_sum_has_an_invocation() {
        for (m, n) in [(1, 1), (3, 17), (40, 4096)] {
            let op = launches::tests::op(m, n, 64);
            let [x, y, _] = sum_grid(&op);
            assert!((x * y * SUM_THREADS) as usize >= m * sum_rows(&op) / 8 && x <= MAX_GROUPS);
        }
    }
}

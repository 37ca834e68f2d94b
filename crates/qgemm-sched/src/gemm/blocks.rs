//! [`Blocks`]: CTA cost constants of the cost model, fitted to measurements.

use qgemm_hal::{Math, Schedule, TileConfig, Variant};

/// Largest M tile of a small-M tensor-core kernel, and the smallest
/// M tile whose warps slice K with a copy ring each.
const FEW_TOKENS: u32 = 16;
const FEWEST_OF_RINGS: u32 = 8;

/// CTA cost constants beyond the rates that a config declares.
#[derive(Debug, PartialEq)]
pub(super) struct Blocks {
    /// Share of the CTA slots that saturates memory bandwidth. It is
    /// below 1 because loads of one CTA overlap.
    pub saturating: f64,
    /// Underfill exponent: with n times fewer CTAs than a unit can
    /// hold, arithmetic is n^underfill times slower.
    pub underfill: f64,
    /// Reached share of the declared arithmetic rate.
    pub arithmetic: f64,
    /// Seconds from the start of a copy to the end of
    /// its product, for each refill of the ring. A stage covers
    /// `latency_columns` columns, or one k-tile when `None`.
    pub latency: f64,
    pub latency_columns: Option<u32>,
    /// Cost of re-reading a W tile for other tokens, as a
    /// fraction of the first read: when all CTAs fit into one
    /// wave, and when they do not.
    pub cached_rows: [f64; 2],
    /// Cost of starting and finishing a tile, in launches.
    pub tile_launches: f64,
    /// Cost of meeting at a split tile's counter, in launches, and
    /// the extra cost when CTAs fill the device. With fewer CTAs
    /// they wait less for each other.
    pub fixup_launches: [f64; 2],
    /// Cost factor of partial sums, relative to their
    /// bytes at the L2 rate.
    pub fixup_factor: f64,
    /// Cost of each further wave of a grid with split tiles,
    /// in launches: each wave starts with empty pipelines.
    pub restart_launches: f64,
    /// Extra share of multiply-adds in the split phase. Ranges start and
    /// end within tiles, and all CTAs finish together.
    pub cut_share: f64,
}

/// A plain grid. `fixup_factor` was fitted together with
/// persistent grids (H200).
const GRID: Blocks = Blocks {
    saturating: 0.5,
    underfill: 0.5,
    arithmetic: 1.0,
    latency: 0.0,
    latency_columns: None,
    cached_rows: [1.0; 2],
    tile_launches: 0.15,
    fixup_launches: [0.5, 0.0],
    fixup_factor: 1.35,
    restart_launches: 0.6,
    cut_share: 0.0,
};
/// A persistent (stream-K) grid, fitted on an H200
/// with native, Sm80 and Sm75 kernels. Re-read rows of
/// W come from the L2 cache.
const STREAM_K: Blocks = Blocks {
    saturating: 0.86,
    latency: 0.6e-6,
    latency_columns: Some(64),
    cached_rows: [0.22; 2],
    tile_launches: 0.43,
    fixup_launches: [0.97, 0.0],
    fixup_factor: 0.6,
    cut_share: 0.1,
    ..GRID
};
/// Small-M tensor-core kernels, which are bound by the latency
/// between dependent products.
const FEW: Blocks = Blocks {
    underfill: 0.75,
    tile_launches: 0.2,
    fixup_launches: [0.43, 0.0],
    fixup_factor: 1.5,
    restart_launches: 1.0,
    ..GRID
};
/// Small-M kernels whose warps slice K, each with its own copy
/// ring, above [`FEWEST_OF_RINGS`] tokens (fitted on an H200).
///
/// Starting a tile costs nothing: `latency` includes it, and
/// other CTAs multiply meanwhile.
const RINGS: Blocks = Blocks {
    saturating: 0.35,
    underfill: 0.0,
    arithmetic: 1.08,
    latency: 1.43e-6,
    cached_rows: [0.62, 1.0],
    tile_launches: 0.0,
    fixup_launches: [0.0, 0.24],
    fixup_factor: 1.6,
    restart_launches: 0.3,
    ..GRID
};
/// Sliced-K kernels with the smallest M tile.
const RINGS_OF_FEWEST: Blocks = Blocks { underfill: 0.15, arithmetic: 0.87, ..RINGS };

impl Blocks {
    pub fn of(config: &TileConfig) -> &'static Self {
        // Before Ampere there is no cp.async: copies pass through registers.
        let has_rings =
            config.tile_m >= FEWEST_OF_RINGS && config.k_groups > 1 && config.variant >= Some(Variant::Sm80);
        match has_few_tokens(config) {
            true if has_rings && config.tile_m == FEWEST_OF_RINGS => &RINGS_OF_FEWEST,
            true if has_rings => &RINGS,
            true => &FEW,
            false if config.schedule == Schedule::StreamK => &STREAM_K,
            false => &GRID,
        }
    }
}

/// Whether the config is a small-M tensor-core kernel.
fn has_few_tokens(config: &TileConfig) -> bool {
    config.tile_m <= FEW_TOKENS && config.math == Math::TensorF16 && config.schedule == Schedule::Grid
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::select::tests::config;

    #[test]
    fn kinds_follow_from_the_configuration() {
        let is = |config: &TileConfig, kind: &Blocks| Blocks::of(config) == kind;
        let few = config("gemm");
        assert!(is(&few, &FEW));
        let rings = TileConfig { k_groups: 4, variant: Some(Variant::Sm80), ..few };
        assert!(is(&rings, &RINGS));
        assert!(is(&TileConfig { tile_m: FEWEST_OF_RINGS, ..rings }, &RINGS_OF_FEWEST));
        assert!(is(&TileConfig { variant: Some(Variant::Sm75), ..rings }, &FEW), "copies pass through registers");
        assert!(is(&TileConfig { tile_m: 64, ..rings }, &GRID));
        assert!(is(&TileConfig { schedule: Schedule::StreamK, ..rings }, &STREAM_K));
    }
}

//! [`Blocks`]: what kinds of blocks cost beyond the rates that their configurations state, fitted to measurements.

use qgemm_hal::{Math, Schedule, TileConfig, Variant};

/// Most tokens of a tile of a few on matrix instructions, and fewest of one whose warps share K through rings of their own.
const FEW_TOKENS: u32 = 16;
const FEWEST_OF_RINGS: u32 = 8;

/// How blocks of a kind fare beyond the rates that a configuration states.
#[derive(Debug, PartialEq)]
pub(super) struct Blocks {
    /// Share of a device's block slots that suffices to saturate its memory: loads of a block overlap, so fewer
    /// blocks than slots still draw the full bandwidth.
    pub saturating: f64,
    /// Underfill exponent: with n times fewer CTAs than a unit has room for, it multiplies n to this power times more slowly.
    pub underfill: f64,
    /// What they reach of the arithmetic's stated share.
    pub arithmetic: f64,
    /// Seconds from the start of a copy to the end of its product, for so many columns, or for a k-tile: a ring takes as long as it has
    /// been filled anew so often.
    pub latency: f64,
    pub latency_columns: Option<u32>,
    /// What rows of W cost that blocks read for other tokens, of what they cost the first time: where all blocks are in a single wave, and
    /// read them at the same time, and where they are not.
    pub cached_rows: [f64; 2],
    /// Cost of beginning and ending a tile, as a share of a launch.
    pub tile_launches: f64,
    /// Cost of meeting at a split tile's counter, as a share of a launch, and what is added where blocks fill the device: fewer wait less
    /// for each other.
    pub fixup_launches: [f64; 2],
    /// What partial sums cost beyond the meeting, as a factor of their bytes at the rate of the last-level cache.
    pub fixup_factor: f64,
    /// Cost of every further wave of blocks where a grid cuts its tiles, as a share of a launch: each begins with empty pipelines
    /// (measured on an H200, 16 tokens in four parts).
    pub restart_launches: f64,
    /// What the multiply-adds of a cut phase cost more than those of whole tiles: ranges begin and end within tiles, and all blocks end
    /// together.
    pub cut_share: f64,
}

/// Those of a grid. What partial sums cost is what 400 problems showed on an H200, of grids and persistent grids alike.
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
/// Those of a persistent grid, fitted to 315 problems of 24 to 512 tokens and five formats, 10600 ways to run them, on an H200, natively and
/// as Sm80 and Sm75 (what was chosen of the latter two took 9 and 40 % longer than the best with the constants of before, 2 and 9 with these).
/// Rows of W that are read again come from the last-level cache.
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
/// Those of a few tokens on matrix instructions, which are bound by how long one product waits for another (measured on an
/// H200, tiles of 64 × 8: 128 blocks, of which an SM has room for two, took 15.0 µs, twice as many with half the work each 12.3).
const FEW: Blocks = Blocks {
    underfill: 0.75,
    tile_launches: 0.2,
    fixup_launches: [0.43, 0.0],
    fixup_factor: 1.5,
    restart_launches: 1.0,
    ..GRID
};
/// Those whose warps share K through rings of their own, with more than [`FEWEST_OF_RINGS`] tokens. Fitted to 757 problems of 1 to 128 tokens
/// and eight formats, 7500 ways to run them, on an H200: what was chosen took 2.7 % longer than the best in a run of its own, in 9 % of 480
/// problems more than 10 %. To begin a tile costs nothing: the latency has it, and other blocks multiply meanwhile.
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
/// The same with fewest tokens.
const RINGS_OF_FEWEST: Blocks = Blocks { underfill: 0.15, arithmetic: 0.87, ..RINGS };

impl Blocks {
    pub fn of(config: &TileConfig) -> &'static Self {
        // From Ampere on, copies pass by registers.
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

/// Whether a tile is one of a few tokens on matrix instructions.
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

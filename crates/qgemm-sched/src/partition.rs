//! Cutting an operation into blocks: tiles of outputs, and ranges of K steps that share a tile.

use std::ops::Range;

use qgemm_hal::{CheckedGemm, LaunchPlan, TileConfig, WorkspaceLayout};

/// The blocks of one launch. Block (x, y, z) of the grid computes n-tile x, m-tile y, K range z.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Partition {
    config: TileConfig,
    dims: [usize; 2],
    n_tiles: u32,
    m_tiles: u32,
    k_steps: u32,
    splits: u32,
    workspace: WorkspaceLayout,
}

/// What one block computes: rows of W, tokens, and steps of `tile_k` along K.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Output features.
    pub n: Range<usize>,
    /// Tokens.
    pub m: Range<usize>,
    /// Steps along K.
    pub k_steps: Range<u32>,
}

impl Partition {
    /// Cuts `op` into tiles of `config`, each tile's K into `splits` parts (at least 1, at most one a step).
    /// `None` when a count of tiles, or the size of the workspace, overflows.
    pub fn new(op: &CheckedGemm, config: &TileConfig, splits: u32) -> Option<Self> {
        let tiles = |len: usize, tile: u32| u32::try_from(len.div_ceil(tile as usize)).ok();
        let n_tiles = tiles(op.n, config.tile_n)?;
        let m_tiles = tiles(op.m, config.tile_m)?;
        let k_steps = tiles(op.stored_k, config.tile_k)?;
        let splits = splits.clamp(1, k_steps.max(1));
        let tile_values = u64::from(config.tile_n) * u64::from(config.tile_m);
        let workspace = WorkspaceLayout::new(splits, u64::from(n_tiles) * u64::from(m_tiles), tile_values)?;
        Some(Self { config: *config, dims: [op.n, op.m], n_tiles, m_tiles, k_steps, splits, workspace })
    }

    /// The grid, x fastest.
    pub fn grid(&self) -> [u32; 3] {
        [self.n_tiles, self.m_tiles, self.splits]
    }

    /// Blocks of the grid.
    pub fn blocks(&self) -> f64 {
        self.grid().into_iter().map(f64::from).product()
    }

    /// Steps along K.
    pub fn k_steps(&self) -> u32 {
        self.k_steps
    }

    /// Offsets of partial sums and counters.
    pub fn workspace_layout(&self) -> WorkspaceLayout {
        self.workspace
    }

    /// The steps of part `split`: `split · K/S .. (split + 1) · K/S`, as kernels compute them too.
    pub fn k_range(&self, split: u32) -> Range<u32> {
        let bound = |s: u32| (u64::from(s) * u64::from(self.k_steps) / u64::from(self.splits)) as u32;
        bound(split)..bound(split + 1)
    }

    /// What block (`x`, `y`, `z`) of the grid computes.
    pub fn block(&self, [x, y, z]: [u32; 3]) -> Block {
        let range = |tile: u32, len: u32, end: usize| {
            let start = tile as usize * len as usize;
            start..end.min(start + len as usize)
        };
        Block {
            n: range(x, self.config.tile_n, self.dims[0]),
            m: range(y, self.config.tile_m, self.dims[1]),
            k_steps: self.k_range(z),
        }
    }

    /// The launch of this partition, which `estimate` seconds are expected for.
    pub fn plan(&self, estimate: f64) -> LaunchPlan {
        LaunchPlan {
            config: self.config,
            n_tiles: self.n_tiles,
            m_tiles: self.m_tiles,
            k_steps: self.k_steps,
            splits: self.splits,
            grid: self.grid(),
            workspace_bytes: self.workspace.bytes,
            estimate,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::select::tests::{config, op};

    proptest! {
        #[test]
        fn every_product_is_computed_exactly_once(
            (m, n, blocks) in (1usize..70, 1usize..70, 1usize..12),
            (tile_m, tile_n, tile_k) in (1u32..20, 1u32..20, 1u32..3),
            splits in 1u32..9,
        ) {
            let op = op(m, n, blocks * 32);
            let config = TileConfig { tile_m, tile_n, tile_k: tile_k * 32, ..config("gemm") };
            let partition = Partition::new(&op, &config, splits).expect("small");
            let steps = partition.k_steps() as usize;
            let mut visits = vec![0u8; m * n * steps];
            let [gx, gy, gz] = partition.grid();
            for (x, y, z) in (0..gx).flat_map(|x| (0..gy).flat_map(move |y| (0..gz).map(move |z| (x, y, z)))) {
                let block = partition.block([x, y, z]);
                prop_assert!(!block.k_steps.is_empty(), "no block is idle");
                for i in block.m.clone() {
                    for j in block.n.clone() {
                        for s in block.k_steps.clone() {
                            visits[(i * n + j) * steps + s as usize] += 1;
                        }
                    }
                }
            }
            prop_assert!(visits.iter().all(|&v| v == 1));
            prop_assert!(steps * config.tile_k as usize >= op.stored_k);
        }

        #[test]
        fn the_workspace_holds_every_partial_and_counter(m in 1usize..300, n in 1usize..300, splits in 1u32..9) {
            let config = TileConfig { tile_m: 16, tile_n: 64, tile_k: 32, ..config("gemm") };
            let partition = Partition::new(&op(m, n, 512), &config, splits).expect("small");
            let plan = partition.plan(0.0);
            let layout = partition.workspace_layout();
            prop_assert_eq!(plan.workspace_layout(), Some(layout));
            prop_assert_eq!(plan.workspace_bytes, layout.bytes);
            if splits == 1 {
                prop_assert_eq!(layout.bytes, 0);
            } else {
                let tiles = (plan.n_tiles * plan.m_tiles) as usize;
                prop_assert!(layout.partials >= layout.counters + tiles * 4);
                prop_assert_eq!(layout.partials % 256, 0);
                prop_assert_eq!(layout.bytes - layout.partials, splits as usize * tiles * 16 * 64 * 4);
            }
        }
    }

    #[test]
    fn a_size_beyond_u32_is_refused() {
        let config = TileConfig { tile_m: 1, ..config("gemm") };
        assert_eq!(Partition::new(&op(1 << 33, 1, 32), &config, 1), None);
    }
}

//! Configurations and plans of products: what families offer, and what `qgemm-sched` decides.

use qgemm_formats::{DType, Format, XFormat};

use super::{GemmSpec, WorkspaceLayout};
use crate::caps::{Math, Variant};
use crate::kernel_id::{KernelId, Name, Spec};

/// What a launch of its own makes of X before the product's kernel starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum XPrologue {
    /// It writes X in the kernel's format into the workspace: row-major, in the order in which W stores its columns, padded with
    /// zeros to whole k-tiles, every row aligned to 16 bytes ([`CheckedConvert`](crate::CheckedConvert)).
    Convert {
        /// Whether each token is multiplied by a power of two, which the kernel divides its accumulators by
        /// ([`CheckedConvert::row_factors`](crate::CheckedConvert::row_factors)).
        row_factors: bool,
    },
}

/// Tile sizes and resources of one kernel instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileConfig {
    /// The family's name.
    pub family: &'static str,
    /// The main loop: generation and mechanism.
    pub main_loop: &'static str,
    /// The generation of instructions, where the backend has several.
    pub variant: Option<Variant>,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Output features a block computes.
    pub tile_n: u32,
    /// Tokens a block computes.
    pub tile_m: u32,
    /// Values along K that make one indivisible step (a k-tile); partitions of K fall on its multiples.
    pub tile_k: u32,
    /// Threads of a block; with [`Schedule::Threads`], those that share a launch.
    pub threads: u32,
    /// Blocks that one unit (SM, core) runs at once.
    pub ctas_per_unit: u32,
    /// Blocks of a cluster, which share a tile and run at once on so many units: the plan counts a cluster as one block.
    pub cluster: u32,
    /// How blocks share the tiles.
    pub schedule: Schedule,
    /// Most blocks that may share the K dimension of one output tile; 1 = tiles are never cut.
    pub max_splits: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Groups of warps that share K; with [`Schedule::Threads`], parts of K whose sums are added up apart.
    pub k_groups: u32,
    /// Buffers of the copy pipeline.
    pub stages: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Format in which X is multiplied. Kernels make blocks of bytes of plain X themselves.
    pub x_format: XFormat,
    /// What is made of X before the kernel starts; `None` when it reads X in place.
    pub x_prologue: Option<XPrologue>,
    /// The type to which the kernel rounds each scaled weight before it multiplies; `None` where codes are exact operands and
    /// scales act on sums.
    pub rounded_weights: Option<DType>,
    /// Whether the kernel normalizes X itself, where it is normalized: no launch of a norm comes before it.
    pub normalizes_x: bool,
    /// How near the family comes to the device's rates, 0 to 1000 per mille: (arithmetic, bandwidth).
    pub efficiency: (u32, u32),
}

impl TileConfig {
    /// The identity of the kernel, for weights of `format`.
    pub fn kernel_id(&self, format: Format) -> KernelId {
        let spec = GemmSpec {
            main_loop: Name::new(self.main_loop),
            w: format,
            x: self.x_format,
            n: self.tile_n,
            m: self.tile_m,
            k: self.tile_k,
            threads: self.threads,
            warps_n: self.warps_n,
            k_groups: self.k_groups,
            ctas: self.ctas_per_unit,
            stages: self.stages,
        };
        KernelId::new(self.family, self.variant, Spec::Gemm(spec))
    }
}

/// How the blocks of a launch share its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Every block has one tile, or one of equally many parts of its K dimension: grid (n tiles, m tiles, splits).
    Grid,
    /// Stream-K: a one-dimensional grid of as many blocks as the device runs at once, or fewer. First every block
    /// takes an equal range of the k-tiles of the tiles that are cut, then whole tiles in turn.
    StreamK,
    /// [`TileConfig::threads`] threads of a processor take tiles, or the [`TileConfig::k_groups`] parts of each, as they come. One is the thread
    /// that calls, which wakes no other.
    Threads,
}

/// What a launch with [`Schedule::StreamK`] cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamK {
    /// Tiles, first in the order of the swizzle, whose K dimension is cut.
    pub cut_tiles: u32,
    /// Blocks, the first of the grid, that take an equal range of them each.
    pub cut_ctas: u32,
    /// Steps of `tile_k` between the places of a tile where it may be cut.
    pub cut_k_tiles: u32,
    /// Order of tiles: so many tiles along N are worked through together, for all tokens, before the next ones; within
    /// them tiles along N follow one another, then those along M. Blocks at work at once then share both W and X.
    pub swizzle_group: u32,
}

/// A configuration with its launch geometry: what `qgemm-sched` decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchPlan {
    /// The chosen configuration.
    pub config: TileConfig,
    /// Tiles along N.
    pub n_tiles: u32,
    /// Tiles along M.
    pub m_tiles: u32,
    /// Steps of `tile_k` along K.
    pub k_tiles: u32,
    /// Blocks that share the K dimension of every tile; 1 with `stream_k`.
    pub splits: u32,
    /// What is cut, with [`Schedule::StreamK`].
    pub stream_k: Option<StreamK>,
    /// Grid of blocks, x fastest: (n_tiles, m_tiles, splits), or (blocks, 1, 1) with `stream_k`.
    pub grid: [u32; 3],
    /// What lies where in the workspace, whose bytes are zeroed before the first launch.
    pub workspace: WorkspaceLayout,
    /// What the cost model expects, in seconds.
    pub estimate: f64,
}

impl LaunchPlan {
    /// The grid that is launched, x fastest: a block of the plan is a cluster of CTAs, where its kernel has clusters.
    pub fn grid_of_ctas(&self) -> [u32; 3] {
        let [x, y, z] = self.grid;
        [x * self.config.cluster.max(1), y, z]
    }
}

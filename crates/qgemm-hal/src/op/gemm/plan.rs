//! Configs and plans of GEMM: what families offer and
//! what `qgemm-sched` decides.

use qgemm_formats::{DType, Format, XFormat};

use super::{GemmSpec, WorkspaceLayout};
use crate::caps::{Math, Variant};
use crate::kernel_id::{KernelId, Name, Spec};

/// A launch that converts X before the product's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum XPrologue {
    /// Writes X in the kernel's format to the workspace
    /// ([`CheckedConvert`](crate::CheckedConvert)): row-major, columns in the
    /// order of W, zero-padded to whole k-tiles, rows 16-byte aligned.
    Convert {
        /// Whether each token is scaled by a power of two, which
        /// the kernel removes from its accumulators
        /// ([`CheckedConvert::row_factors`](crate::CheckedConvert::row_factors)).
        row_factors: bool,
    },
}

/// Tile sizes and resources of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileConfig {
    /// The family's name.
    pub family: &'static str,
    /// Main loop: variant and mechanism.
    pub main_loop: Name,
    /// Generation of instructions, if the backend has several.
    pub variant: Option<Variant>,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// N tile: output features of a CTA.
    pub tile_n: u32,
    /// M tile: tokens of a CTA.
    pub tile_m: u32,
    /// K elements of a step (a k-tile). Splits of K
    /// fall on its multiples.
    pub tile_k: u32,
    /// Threads of a CTA; with [`Schedule::Threads`], threads of a launch.
    pub threads: u32,
    /// CTAs per unit (SM, core).
    pub ctas_per_unit: u32,
    /// CTAs of a cluster. A cluster shares a tile,
    /// runs on this many units at once, and counts
    /// as one CTA in the plan.
    pub cluster: u32,
    /// How CTAs share the tiles.
    pub schedule: Schedule,
    /// Maximum CTAs that share the K of one output
    /// tile; 1 means no split-K.
    pub max_splits: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Warp groups that slice K. With [`Schedule::Threads`],
    /// parts of K with separate sums.
    pub k_groups: u32,
    /// Pipeline stages.
    pub stages: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// Format in which X is multiplied. CPU and wgpu kernels quantize
    /// an unquantized X to INT8 blocks themselves.
    pub x_format: XFormat,
    /// The X prologue; `None` when the kernel reads X in place.
    pub x_prologue: Option<XPrologue>,
    /// The type to which the kernel rounds scaled weights
    /// before it multiplies. `None` when codes are exact
    /// operands and scales apply to sums.
    pub rounded_weights: Option<DType>,
    /// Whether the kernel fuses the norm of X, so that no
    /// separate norm is launched.
    pub normalizes_x: bool,
    /// Reached shares of the device's rates, per mille:
    /// (arithmetic, bandwidth).
    pub efficiency: (u32, u32),
}

impl TileConfig {
    /// Kernel identity for weights of `format`.
    pub fn kernel_id(&self, format: Format) -> KernelId {
        let spec = GemmSpec {
            main_loop: self.main_loop,
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

/// How the CTAs of a launch share its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Each CTA computes one tile, or one of equally many parts
    /// of its K: grid (n tiles, m tiles, splits).
    Grid,
    /// Stream-K: a persistent one-dimensional grid of at most as many CTAs
    /// as run concurrently. Each CTA first takes an equal range of
    /// the k-tiles of split tiles, then whole tiles in turn.
    StreamK,
    /// [`TileConfig::threads`] CPU threads take tiles, or the
    /// [`TileConfig::k_groups`] parts of each, dynamically. With one
    /// thread, only the calling thread runs.
    Threads,
}

/// Split tiles of a launch with [`Schedule::StreamK`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamK {
    /// Number of split tiles, the first in swizzle order.
    pub cut_tiles: u32,
    /// CTAs that take an equal range of the split tiles
    /// each; the first of the grid.
    pub cut_ctas: u32,
    /// K steps between the points where a tile may be split.
    pub cut_k_tiles: u32,
    /// Swizzle group: this many N tiles are processed for all tokens
    /// before the next group. Within a group N tiles come first,
    /// then M tiles. Concurrent CTAs then share both W and X.
    pub swizzle_group: u32,
}

/// A config with its launch geometry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchPlan {
    /// The chosen configuration.
    pub config: TileConfig,
    /// Tiles along N.
    pub n_tiles: u32,
    /// Tiles along M.
    pub m_tiles: u32,
    /// K steps of a tile.
    pub k_tiles: u32,
    /// CTAs that share the K of every tile; 1 with `stream_k`.
    pub splits: u32,
    /// Split tiles, with [`Schedule::StreamK`].
    pub stream_k: Option<StreamK>,
    /// Grid of CTAs, x fastest: (n_tiles, m_tiles, splits), or
    /// (CTAs, 1, 1) with `stream_k`.
    pub grid: [u32; 3],
    /// Workspace layout. The bytes are zeroed before the first launch.
    pub workspace: WorkspaceLayout,
    /// Estimated seconds.
    pub estimate: f64,
}

impl LaunchPlan {
    /// Launched grid, x fastest. In kernels with clusters, each CTA of
    /// the plan becomes a cluster of CTAs.
    pub fn grid_of_ctas(&self) -> [u32; 3] {
        let [x, y, z] = self.grid;
        [x * self.config.cluster.max(1), y, z]
    }
}

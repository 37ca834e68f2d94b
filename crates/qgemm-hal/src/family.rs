//! Kernel families: what a backend offers and the scheduler chooses from.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::DType;

use crate::buffer::{BufferMut, BufferRef};
use crate::caps::{DeviceInfo, Math};
use crate::device::{Device, Stream};
use crate::error::{HalError, Unsupported};
use crate::op::CheckedGemm;

/// One kernel algorithm of one backend. Families are data: `static`s that the device lists.
pub trait KernelFamily: Send + Sync + fmt::Debug {
    /// Name of the algorithm: `gemv`, `gemm`.
    fn name(&self) -> &'static str;

    /// Whether the family serves this operation on this device.
    ///
    /// # Errors
    /// The reason why not.
    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported>;

    /// The configurations worth considering, never empty for a supported operation.
    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig>;

    /// Makes the kernel ready: finds or compiles it and loads it on the device.
    ///
    /// # Errors
    /// [`HalError::Compile`], [`HalError::KernelUnavailable`] or a driver error.
    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError>;
}

/// A copy of X that a launch of its own makes in the workspace before the product's: row-major, in the order in which W
/// stores its columns, padded with zeros to whole steps of K, every row aligned to 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StagedX {
    /// Element type of the copy.
    pub dtype: DType,
    /// Whether each token was multiplied by a power of two so that its largest finite value lies in [2¹⁴, 2¹⁵); sums are
    /// divided by it. Tokens below 2⁻¹¹² are multiplied by 2¹²⁶.
    pub scaled: bool,
}

/// Tile sizes and resources of one kernel instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileConfig {
    /// The family's name.
    pub family: &'static str,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Output features a block computes.
    pub tile_n: u32,
    /// Tokens a block computes.
    pub tile_m: u32,
    /// Values along K that make one indivisible step (a slab); partitions of K fall on its multiples.
    pub tile_k: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that one unit (SM, core) runs at once.
    pub blocks_per_unit: u32,
    /// How blocks share the tiles.
    pub schedule: Schedule,
    /// Most blocks that may share the K dimension of one output tile; 1 = tiles are never cut.
    pub max_splits: u32,
    /// Buffers of the copy pipeline.
    pub stages: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// How activations are prepared before the kernel starts; `None` when it reads them as they lie.
    pub staged_x: Option<StagedX>,
    /// The type to which the kernel rounds each scaled weight before it multiplies; `None` where codes are exact operands and
    /// scales act on sums.
    pub rounded_weights: Option<DType>,
    /// How near the family comes to the device's rates, 0 to 1000 per mille: (arithmetic, bandwidth).
    pub efficiency: (u32, u32),
}

/// How the blocks of a launch share its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Every block has one tile, or one of equally many parts of its K dimension: grid (n tiles, m tiles, splits).
    Grid,
    /// Stream-K: a one-dimensional grid of as many blocks as the device runs at once, or fewer. First every block
    /// takes an equal range of the slabs of the tiles that are cut, then whole tiles in turn.
    StreamK,
}

/// What a launch with [`Schedule::StreamK`] cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamK {
    /// Tiles, first in raster order, whose K dimension is cut.
    pub cut_tiles: u32,
    /// Blocks, the first of the grid, that take an equal range of them each.
    pub cut_blocks: u32,
    /// Steps of `tile_k` between the places of a tile where it may be cut.
    pub cut_steps: u32,
    /// Raster order: so many tiles along N are worked through together, for all tokens, before the next ones; within
    /// them tiles along N follow one another, then those along M. Blocks at work at once then share both W and X.
    pub raster_group: u32,
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
    pub k_steps: u32,
    /// Blocks that share the K dimension of every tile; 1 with `stream_k`.
    pub splits: u32,
    /// What is cut, with [`Schedule::StreamK`].
    pub stream_k: Option<StreamK>,
    /// Grid, x fastest: (n_tiles, m_tiles, splits), or (blocks, 1, 1) with `stream_k`.
    pub grid: [u32; 3],
    /// Bytes of workspace that a launch needs (counters, partial sums, staged activations), zeroed before the first launch.
    pub workspace_bytes: usize,
    /// What the cost model expects, in seconds.
    pub estimate: f64,
}

/// The buffers of a loaded weight.
#[derive(Clone, Copy, Debug)]
pub struct WeightArgs<'a> {
    /// Codes and scales in the device's layout.
    pub data: BufferRef<'a>,
    /// N factors in f32.
    pub row_scale: Option<BufferRef<'a>>,
    /// Stored column → input feature, `u32` each, padded with `NO_COLUMN` to whole K steps.
    pub k_order: Option<BufferRef<'a>>,
}

/// Everything that a launch reads and writes.
#[derive(Debug)]
pub struct GemmArgs<'a> {
    /// Activations.
    pub x: BufferRef<'a>,
    /// The weight.
    pub w: WeightArgs<'a>,
    /// C.
    pub c: Option<BufferRef<'a>>,
    /// Bias.
    pub bias: Option<BufferRef<'a>>,
    /// Factors of the tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// Residual.
    pub residual: Option<BufferRef<'a>>,
    /// Output.
    pub d: BufferMut<'a>,
    /// Workspace, at least `workspace_bytes` long when that is not 0.
    pub workspace: Option<BufferMut<'a>>,
}

/// A kernel that is ready to launch.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// Its name: `gemm_nt_q4_k_f16`.
    fn name(&self) -> &str;

    /// Submits it to `stream`. Allocates nothing, waits for nothing, takes no lock.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError>;
}

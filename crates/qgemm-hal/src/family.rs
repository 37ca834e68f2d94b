//! Kernel families: what a backend offers and the scheduler chooses from.

use std::fmt;
use std::sync::Arc;

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
    /// Most parts that the K dimension of one output tile may be cut into between blocks; 1 = never.
    pub max_splits: u32,
    /// Buffers of the copy pipeline.
    pub stages: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// How near the family comes to the device's rates, 0 to 1000 per mille: (arithmetic, bandwidth).
    pub efficiency: (u32, u32),
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
    /// Blocks that share the K dimension of one tile.
    pub splits: u32,
    /// Grid, x fastest: (n_tiles, m_tiles, splits).
    pub grid: [u32; 3],
    /// Bytes of workspace that a launch needs (partial sums and counters), zeroed before the first launch.
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

//! Families of `gemm`, and their common parts.

mod fma;
mod int8;
mod share;

use std::sync::Arc;

use qgemm_formats::XFormat;
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_hal::{
    CheckedGemm, Dense, Device, DeviceId, DeviceInfo, Families, GemmOperand, Geometry, HalError, HostStream, Kernel,
    LaunchPlan, LaunchSequence, LaunchStep, Math, Name, Operands, Schedule, Stream, TileConfig, Unsupported,
};

use crate::job::{Job, Parts as JobParts, row_columns};
use crate::packed::Packed;
use crate::pool::Pool;
use crate::processor::{CLOCK, Processor};
use crate::simd::{BLOCK_ROWS, Quantization, Scales, Simd};
use fma::Fma;
use int8::Int8;
use share::{Parts, Share};

pub use fma::{GEMM, GemmFamily};
pub use int8::{GEMM_INT8, GemmInt8Family};

/// Families of the CPU.
pub const FAMILIES: Families<CheckedGemm> = &[&GEMM, &GEMM_INT8];

/// Checks the requirement of every family: weights packed for vectors.
///
/// # Errors
/// The refusal.
fn check_supported(op: &CheckedGemm) -> Result<(), Unsupported> {
    if op.class == FragmentLayout::Simd16 {
        return Ok(());
    }
    Err(Unsupported::new(format!(
        "reads weights packed as {:?}, and these are packed as {:?}",
        FragmentLayout::Simd16,
        op.class
    )))
}

/// Properties of a family that its configs depend on.
#[derive(Clone, Copy)]
struct Traits {
    family: &'static str,
    main_loop: Name,
    math: Math,
    x_format: XFormat,
    /// Maximum tokens of a panel.
    panels: [usize; 2],
}

/// Tokens per group of a panel, at every SIMD level. The rest of
/// a panel uses kernels for few tokens.
const TOKEN_GROUPS: usize = 12;

/// Configs of a family: several panel sizes, each for all threads
/// and for the calling thread only.
fn configs(of: Traits, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
    let parts = PackedLayout::new(op.format, op.class).map_or(1, |layout| Parts::new(op, &layout).count());
    let config = |tile_m: usize, threads: u32| TileConfig {
        family: of.family,
        main_loop: of.main_loop,
        variant: None,
        math: of.math,
        tile_n: BLOCK_ROWS as u32,
        tile_m: tile_m as u32,
        // One step, so that no plan splits K.
        tile_k: u32::try_from(op.stored_k).unwrap_or(u32::MAX),
        threads,
        ctas_per_unit: 1,
        cluster: 1,
        schedule: Schedule::Threads,
        max_splits: 1,
        warps_n: 1,
        k_groups: parts as u32,
        stages: 1,
        shared_bytes: 0,
        x_format: of.x_format,
        x_prologue: None,
        rounded_weights: None,
        normalizes_x: false,
        efficiency: (efficiency(tile_m, of.math, info), 1000),
    };
    let threads = info.units.max(1);
    let panels = panels(op.m, op.stored_rows.div_ceil(BLOCK_ROWS), threads as usize, of.panels);
    let mut counts = vec![threads, 1];
    counts.dedup();
    panels.into_iter().flat_map(|tokens| counts.iter().map(move |&threads| config(tokens, threads))).collect()
}

/// Panel sizes for `m` tokens. As many panels as with `most`
/// tokens each, of similar size. If there are fewer row blocks
/// than threads, another size makes panels for all threads.
fn panels(m: usize, blocks: usize, threads: usize, most: [usize; 2]) -> Vec<usize> {
    let even = |count: usize, most: usize| {
        let tokens = m.div_ceil(count.max(1)).max(1);
        let groups = tokens.next_multiple_of(TOKEN_GROUPS);
        if groups <= most.min(m) { groups } else { tokens }
    };
    let [large, small] = most.map(|most| even(m.div_ceil(most), most));
    let mut sizes = vec![large, small];
    if blocks < threads {
        sizes.push(even(threads.div_ceil(blocks.max(1)), most[0]).clamp(small.min(large), large));
    }
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    sizes
}

/// Share of the multiply-add rate, per mille, when each decoded
/// weight meets `tokens` tokens.
fn efficiency(tokens: usize, math: Math, info: &DeviceInfo) -> u32 {
    // Cycles for decoding a weight, and the share of the rate
    // that the SIMD kernels reach (measured on Zen 5).
    const KERNEL_SHARE: f64 = 0.6;
    let decode_cycles = if math == Math::DotI8 { 0.06 } else { 0.3 };
    let macs_per_cycle = info.rate(math).unwrap_or(1.0) / f64::from(info.units.max(1)) / CLOCK;
    let ideal = tokens as f64 / macs_per_cycle;
    (1000.0 * ideal / (decode_cycles + ideal / KERNEL_SHARE)).ceil() as u32
}

/// A family's loop made ready for one operation.
pub(super) struct CpuGemm {
    op: CheckedGemm,
    /// X as the operation describes it, if unquantized.
    x: Option<Dense>,
    layout: PackedLayout,
    scales: Scales,
    main_loop: Loop,
    share: Share,
    simd: &'static Simd,
    pool: Pool,
}

/// The main loop of either family.
#[derive(Debug)]
enum Loop {
    Fma(Fma),
    Int8(Int8),
}

impl std::fmt::Debug for CpuGemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuGemm").field("op", &self.op).field("share", &self.share).finish_non_exhaustive()
    }
}

impl CpuGemm {
    /// The sequence of this single kernel. `quantization` is how
    /// activations are quantized, if they are.
    fn prepare(
        device: &dyn Device,
        op: &CheckedGemm,
        plan: &LaunchPlan,
        quantization: Option<Quantization>,
    ) -> Result<LaunchSequence, HalError> {
        let config = &plan.config;
        let kernel = Self::new(device, op, config, quantization)?;
        let geometry = Geometry { grid: plan.grid, threads: config.threads, shared_bytes: config.shared_bytes };
        let step = LaunchStep::new::<GemmOperand>(config.kernel_id(op.format), geometry, Arc::new(kernel));
        Ok(LaunchSequence::new::<GemmOperand>(op.kernel_name(config.family), vec![step.of_operation()]))
    }

    /// The loop of `config` for `op`, or for the same
    /// operation with fewer tokens.
    fn new(
        device: &dyn Device,
        op: &CheckedGemm,
        config: &TileConfig,
        quantization: Option<Quantization>,
    ) -> Result<Self, HalError> {
        let cpu = Processor::of(device)?;
        let unavailable = |why| unavailable(device, op, config.family, why);
        let x = match quantization {
            Some(_) => op.x.dense(),
            None => Some(op.plain_x().map_err(|unsupported| unavailable(unsupported.why))?),
        };
        let layout = PackedLayout::new(op.format, op.class)
            .ok_or_else(|| unavailable(format!("the weight is packed as {:?}", op.class)))?;
        let (parts, columns, simd) = (Parts::new(op, &layout), row_columns(&layout, op.stored_k), cpu.simd());
        let share =
            Share { threads: config.threads.max(1) as usize, panel_tokens: (config.tile_m as usize).max(1), parts };
        let main_loop = match quantization {
            Some(how) => Loop::Int8(Int8 { how: simd.quantization(how), columns, k_tile: layout.k_tile, parts, simd }),
            None => Loop::Fma(Fma { columns, scales: Packed::scale_floats_of(&layout) }),
        };
        let scratch = match &main_loop {
            Loop::Fma(main_loop) => share.scratch(op, main_loop),
            Loop::Int8(main_loop) => share.scratch(op, main_loop),
        };
        cpu.pool().reserve(share.threads > 1, scratch);
        Ok(Self {
            op: op.clone(),
            x,
            scales: Scales::new(&layout),
            layout,
            main_loop,
            share,
            simd,
            pool: cpu.pool().clone(),
        })
    }

    /// The loop of `config`, of either family, for `op` or the
    /// same operation with fewer tokens.
    ///
    /// # Errors
    /// [`HalError::KernelUnavailable`] when the config is not for `op`.
    pub(super) fn of_config(device: &dyn Device, op: &CheckedGemm, config: &TileConfig) -> Result<Self, HalError> {
        let quantization = match config.math {
            Math::DotI8 => Some(int8::quantization(device, op, config)?),
            _ => None,
        };
        Self::new(device, op, config, quantization)
    }

    /// Multiplies the rows of one expert. `op` is the kernel's, with
    /// the expert's number of rows and X.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] for an operand that is too short.
    pub(super) fn multiply(&self, op: &CheckedGemm, parts: JobParts<'_>) -> Result<(), HalError> {
        self.run(&Job::of_parts(op, op.x.dense(), &self.layout, &self.scales, self.simd, parts)?);
        Ok(())
    }

    /// Packed layout of the weight.
    pub(super) fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The operation that the loop was made for.
    pub(super) fn op(&self) -> &CheckedGemm {
        &self.op
    }

    /// Calls `work` on a thread of the pool if its
    /// products use several threads, so that each product
    /// need not wake them again.
    pub(super) fn enter(&self, work: &mut (dyn FnMut() + Send)) {
        if self.share.threads > 1 { self.pool.enter(work) } else { work() }
    }

    fn run(&self, job: &Job<'_>) {
        let enter = |work: &mut (dyn FnMut() + Send)| self.pool.enter(work);
        match &self.main_loop {
            Loop::Fma(main_loop) => share::run(job, main_loop, self.share, enter),
            Loop::Int8(main_loop) => share::run(job, main_loop, self.share, enter),
        }
    }
}

/// The error of a family for an operation that
/// it does not support.
fn unavailable(device: &dyn Device, op: &CheckedGemm, family: &str, why: String) -> HalError {
    HalError::KernelUnavailable { kernel: op.kernel_name(family), target: device.info().arch.clone(), why }
}

impl Kernel for CpuGemm {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.x, &self.layout, &self.scales, self.simd, operands)?;
        self.run(&job);
        Ok(())
    }
}

//! The kernel families of the CPU, and what makes them kernels of a device.

mod gemm;
mod gemm_int8;

use std::sync::Arc;

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_hal::{
    CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, HostStream, Kernel, KernelFamily, Math, Schedule,
    Stream, TileConfig, Unsupported,
};
use rayon::ThreadPool;

use crate::arena;
use crate::device::CpuDevice;
use crate::job::{Job, row_columns};
use crate::simd::{BLOCK_ROWS, Quantization, Scales, Simd};

pub use gemm::{GEMM, GemmFamily};
pub use gemm_int8::{GEMM_INT8, GemmInt8Family};

/// What the CPU offers.
pub static FAMILIES: [&dyn KernelFamily; 2] = [&GEMM, &GEMM_INT8];

/// What every family needs: weights packed for vectors.
fn check_supported(op: &CheckedGemm) -> Result<(), Unsupported> {
    if op.class == PackClass::R {
        return Ok(());
    }
    Err(Unsupported::new(format!("reads weights packed as {:?}, and these are packed as {:?}", PackClass::R, op.class)))
}

/// The configurations of a family, one for each size of panel, in tokens; K is never cut.
fn candidates(
    family: &'static str,
    math: Math,
    panels: [usize; 2],
    op: &CheckedGemm,
    info: &DeviceInfo,
) -> Vec<TileConfig> {
    let config = |tile_m| TileConfig {
        family,
        math,
        tile_n: BLOCK_ROWS as u32,
        tile_m: tile_m as u32,
        tile_k: u32::try_from(op.stored_k).unwrap_or(u32::MAX),
        threads: 1,
        blocks_per_unit: 1,
        schedule: Schedule::Grid,
        max_splits: 1,
        stages: 1,
        shared_bytes: 0,
        staged_x: None,
        rounded_weights: None,
        efficiency: (efficiency(tile_m, math, info), 1000),
    };
    let mut panels = panels.map(|tokens| op.m.clamp(1, tokens)).to_vec();
    panels.dedup();
    panels.into_iter().map(config).collect()
}

/// Share of the multiply-add rate, in per mille, when each decoded weight meets `tokens` tokens.
fn efficiency(tokens: usize, math: Math, info: &DeviceInfo) -> u32 {
    // Cycles of decoding a weight, and the share of the rate that the vector kernels reach, as measured on Zen 5.
    const KERNEL_SHARE: f64 = 0.6;
    let decode_cycles = if math == Math::DotI8 { 0.06 } else { 0.3 };
    let macs_per_cycle = info.rate(math).unwrap_or(1.0) / f64::from(info.units.max(1)) / crate::device::CLOCK;
    let ideal = tokens as f64 / macs_per_cycle;
    (1000.0 * ideal / (decode_cycles + ideal / KERNEL_SHARE)).ceil() as u32
}

/// A family's loop made ready for one operation.
struct CpuKernel {
    name: String,
    op: CheckedGemm,
    layout: PackedLayout,
    scales: Scales,
    /// How activations are quantized, if they are.
    quantization: Option<Quantization>,
    /// Tokens that are worked on together.
    panel_tokens: usize,
    simd: &'static Simd,
    pool: Option<Arc<ThreadPool>>,
}

impl std::fmt::Debug for CpuKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuKernel")
            .field("name", &self.name)
            .field("panel_tokens", &self.panel_tokens)
            .finish_non_exhaustive()
    }
}

impl CpuKernel {
    fn prepare(
        device: &dyn Device,
        op: &CheckedGemm,
        config: &TileConfig,
        quantization: Option<Quantization>,
    ) -> Result<Arc<dyn Kernel>, HalError> {
        let cpu = device
            .as_any()
            .downcast_ref::<CpuDevice>()
            .ok_or(HalError::WrongDevice { device: device.info().id, what: "a kernel family of the CPU" })?;
        let layout = PackedLayout::new(op.format, op.class).ok_or_else(|| HalError::KernelUnavailable {
            kernel: op.kernel_name(config.family),
            target: device.info().arch.clone(),
            why: format!("the weight is packed as {:?}", op.class),
        })?;
        let panel_tokens = config.tile_m as usize;
        let quantization = quantization.map(|how| cpu.simd().quantization(how));
        let columns = row_columns(&layout, op.stored_k);
        arena::reserve_activations(panel_tokens.min(op.m) * quantization.map_or(columns, |how| how.row(columns).words));
        Ok(Arc::new(Self {
            name: op.kernel_name(config.family),
            op: op.clone(),
            scales: Scales::new(&layout),
            layout,
            quantization,
            panel_tokens,
            simd: cpu.simd(),
            pool: cpu.pool().cloned(),
        }))
    }

    fn run(&self, job: &Job<'_>) {
        match &self.quantization {
            Some(how) => gemm_int8::run(job, how, self.panel_tokens),
            None => gemm::run(job, self.panel_tokens),
        }
    }
}

impl Kernel for CpuKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, &self.layout, &self.scales, self.simd, args)?;
        match &self.pool {
            Some(pool) => pool.install(|| self.run(&job)),
            None => self.run(&job),
        }
        Ok(())
    }
}

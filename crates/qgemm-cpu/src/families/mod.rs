//! The kernel family of the CPU, and what makes it a kernel of a device.

mod gemm;

use std::sync::Arc;

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_hal::{
    CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, HostStream, Kernel, Math, Schedule, Stream,
    TileConfig, Unsupported,
};
use rayon::ThreadPool;

use crate::arena;
use crate::device::CpuDevice;
use crate::job::{Job, row_floats};
use crate::simd::Simd;

pub use gemm::{GEMM, GemmFamily};

/// What the family needs: weights packed for vectors.
fn check_supported(op: &CheckedGemm) -> Result<(), Unsupported> {
    if op.class == PackClass::R {
        return Ok(());
    }
    Err(Unsupported::new(format!("reads weights packed as {:?}, and these are packed as {:?}", PackClass::R, op.class)))
}

/// A configuration whose tiles have `tile_n` rows and `tile_m` tokens and whose K is never cut.
fn config(family: &'static str, op: &CheckedGemm, info: &DeviceInfo, [tile_n, tile_m]: [usize; 2]) -> TileConfig {
    TileConfig {
        family,
        math: Math::FmaF32,
        tile_n: tile_n as u32,
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
        efficiency: (efficiency(tile_m, info), 1000),
    }
}

/// Share of the multiply-add rate, in per mille, when each decoded weight meets `tokens` tokens.
fn efficiency(tokens: usize, info: &DeviceInfo) -> u32 {
    // Per weight: cycles of decoding, and of multiply-adds at the rate that the vector kernels reach.
    const DECODE_CYCLES: f64 = 1.5;
    const KERNEL_SHARE: f64 = 0.6;
    let macs_per_cycle = info.rate(Math::FmaF32).unwrap_or(1.0) / f64::from(info.units.max(1)) / crate::device::CLOCK;
    let ideal = tokens as f64 / macs_per_cycle;
    (1000.0 * ideal / (DECODE_CYCLES + ideal / KERNEL_SHARE)).ceil() as u32
}

/// The family's loop made ready for one operation.
struct CpuKernel {
    name: String,
    op: CheckedGemm,
    layout: PackedLayout,
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
    fn prepare(device: &dyn Device, op: &CheckedGemm, config: &TileConfig) -> Result<Arc<dyn Kernel>, HalError> {
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
        arena::reserve_activations(panel_tokens.min(op.m) * row_floats(&layout, op.stored_k));
        Ok(Arc::new(Self {
            name: op.kernel_name(config.family),
            op: op.clone(),
            layout,
            panel_tokens,
            simd: cpu.simd(),
            pool: cpu.pool().cloned(),
        }))
    }
}

impl Kernel for CpuKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, &self.layout, self.simd, args)?;
        match &self.pool {
            Some(pool) => pool.install(|| gemm::run(&job, self.panel_tokens)),
            None => gemm::run(&job, self.panel_tokens),
        }
        Ok(())
    }
}

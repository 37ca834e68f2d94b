//! Families of `matmul`: a single one. Sixteen columns of D are
//! the lanes of a vector. Operands are converted to f32 and
//! reordered a panel at a time, for any type and layout.
//!
//! Work is distributed by rows of D if they are many,
//! by columns if rows are few, and by K if D
//! is small. An accumulator is one chain over K, or with
//! split-K one chain per part; parts are added in a tree.
//! Both depend on the shape only.

mod cut;
mod factor;
mod job;
mod slope;

use std::sync::Arc;

use qgemm_hal::{
    CheckedMatmul, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostStream, Kernel, KernelId,
    LaunchSequence, LaunchStep, Math, MatmulConfig, MatmulOperand, MatmulPlan, MatmulSpec, Name, Operands, Spec,
    Stream, Unsupported,
};

use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::{BLOCK_ROWS, Simd};
use crate::source_hash::SOURCE_HASH;
use cut::{Cut, PANEL_ROWS};
use job::{Job, STEP};

/// Families of the CPU.
pub const FAMILIES: Families<CheckedMatmul> = &[&MATMUL];

/// The family `matmul`.
pub static MATMUL: MatmulFamily = MatmulFamily;

/// Products of two matrices, in f32.
#[derive(Debug)]
pub struct MatmulFamily;

impl Family<CheckedMatmul> for MatmulFamily {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn configs(&self, op: &CheckedMatmul, _: &DeviceInfo) -> Result<Vec<MatmulConfig>, Unsupported> {
        let (m, n, k) = (PANEL_ROWS as u32, BLOCK_ROWS as u32, STEP as u32);
        let main_loop = Name::new("simd16_fma");
        let spec = MatmulSpec { main_loop, a: op.a.dtype, b: op.b.dtype, layout: op.layout(), m, n, k };
        Ok(vec![MatmulConfig {
            kernel: KernelId::new(self.name(), None, Spec::Matmul(spec)),
            math: Math::FmaF32,
            tile_m: m,
            tile_n: n,
            tile_k: k,
            ctas_per_unit: 1,
            // The launch itself adds the parts of K.
            max_splits: 1,
            efficiency: 600,
            factor_bytes: 0,
        }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedMatmul, plan: &MatmulPlan) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let cut = Cut::new(op, device.info().units.max(1) as usize);
        let grid = [u32::try_from(cut.tasks()).unwrap_or(u32::MAX), 1, 1];
        let kernel = CpuMatmul { op: op.clone(), cut, simd: cpu.simd(), pool: cpu.pool().clone() };
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<MatmulOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<MatmulOperand>(op.kernel_name(self.name()), vec![step]))
    }

    fn source_hash(&self, _: &CheckedMatmul, _: &MatmulConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuMatmul {
    op: CheckedMatmul,
    cut: Cut,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuMatmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuMatmul").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuMatmul {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, &self.cut, self.simd, operands)?;
        match job.is_small() {
            true => job.run(),
            false => self.pool.enter(|| job.run()),
        }
        Ok(())
    }
}

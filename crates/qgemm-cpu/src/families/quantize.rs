//! Families of `quantize`: a single one. Rows are read as products
//! read X and quantized as the formats define.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    CheckedQuantize, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostStream, Kernel, KernelId,
    LaunchSequence, LaunchStep, Operand, Operands, Operation, QuantizeConfig, QuantizeOperand, QuantizePlan,
    QuantizeSpec, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Input, absent, host_bytes};
use crate::ordered::Ordered;
use crate::planes::{PlaneNames, PlaneViews, Planes};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 14;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedQuantize> = &[&QUANTIZE];

/// The family `quantize`.
pub static QUANTIZE: QuantizeFamily = QuantizeFamily;

/// Quantization of activations (INT8, FP8, FP4).
#[derive(Debug)]
pub struct QuantizeFamily;

impl Family<CheckedQuantize> for QuantizeFamily {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn configs(&self, op: &CheckedQuantize, _: &DeviceInfo) -> Result<Vec<QuantizeConfig>, Unsupported> {
        let kernel = KernelId::new(self.name(), None, Spec::Quantize(QuantizeSpec::of(op)));
        Ok(vec![QuantizeConfig { kernel, efficiency: 300 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedQuantize,
        plan: &QuantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuQuantize { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let tasks = op.rows.div_ceil(Ordered::rows_at_once(&op.x));
        let grid = [u32::try_from(tasks).unwrap_or(u32::MAX), 1, 1];
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<QuantizeOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        let name = format!("quantize_{}_{}", op.x.dtype, op.format);
        Ok(LaunchSequence::new::<QuantizeOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedQuantize, _: &QuantizeConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loop, prepared for one operation.
struct CpuQuantize {
    op: CheckedQuantize,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuQuantize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuQuantize").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuQuantize {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let op = CheckedQuantize { rows: operands.rows(self.op.rows), ..self.op };
        let job = Job::new(&op, self.simd, operands)?;
        self.pool.share(op.rows.saturating_mul(op.columns) >= SERIAL_ELEMENTS, |threads| job.run(threads));
        Ok(())
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedQuantize,
    simd: &'static Simd,
    x: Ordered<'a>,
    planes: Planes<'a>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedQuantize, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use QuantizeOperand as O;
        let shape = [op.rows, op.columns];
        let x = host_bytes(operands.take(O::X).ok_or(absent(O::X.name(), 1))?, O::X.name())?;
        let x = Input::new(x, op.x, shape, O::X.name())?;
        let names = PlaneNames {
            codes: O::Codes.name(),
            scales: O::Scales.name(),
            token_factors: O::TokenFactors.name(),
            sums: O::Sums.name(),
        };
        let factor = operands.take(O::Factor);
        let views = PlaneViews {
            codes: operands.take_mut(O::Codes),
            scales: operands.take_mut(O::Scales),
            token_factors: operands.take_mut(O::TokenFactors),
            sums: operands.take_mut(O::Sums),
        };
        let planes = Planes::new(&op.parts, shape, [op.codes_row, op.scales_row, op.sums_row], views, names)?;
        Ok(Self { op, simd, x: Ordered::new(x, None), planes: planes.with_factor(factor, O::Factor.name())? })
    }

    fn run(&self, threads: usize) {
        let rows = self.op.rows;
        let each = Ordered::rows_at_once(&self.op.x);
        let task = |task: usize| self.rows(task * each..rows.min((task + 1) * each));
        let tasks = 0..rows.div_ceil(each);
        match threads {
            1 => tasks.for_each(task),
            _ => tasks.into_par_iter().for_each(task),
        }
    }

    /// Quantizes rows of a task.
    fn rows(&self, rows: Range<usize>) {
        let k = self.op.columns;
        arena::with_tile(rows.len() * k, |tile| {
            self.x.load(self.simd, rows.clone(), 0, tile);
            for (row, values) in rows.zip(tile.chunks_exact(k)) {
                // SAFETY: every row is used once, in this task.
                unsafe { self.planes.quantize(row, values) };
            }
        });
    }
}

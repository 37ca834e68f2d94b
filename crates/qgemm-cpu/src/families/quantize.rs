//! Families of `quantize`: one, which serves every matrix. Rows are read as products read X and quantized as the formats say.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::{XFactor, XRow};
use qgemm_hal::{
    CheckedQuantize, Device, DeviceId, DeviceInfo, Family, Geometry, HalError, HostMemory, HostStream, Kernel,
    KernelId, LaunchSequence, LaunchStep, Operand, Operands, Operation, QuantizeConfig, QuantizeFamilies,
    QuantizeOperand, QuantizePlan, QuantizeSpec, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::device::CpuDevice;
use crate::operand::{Input, absent, host_bytes};
use crate::ordered::Ordered;
use crate::pool::Pool;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

/// Elements below which the calling thread works alone: waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 14;

/// What the CPU offers.
pub static FAMILIES: QuantizeFamilies = &[&QUANTIZE];

/// The family `quantize`.
pub static QUANTIZE: QuantizeFamily = QuantizeFamily;

/// Activations in codes and scales.
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
        let cpu = CpuDevice::of(device)?;
        let kernel = CpuQuantize { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let tasks = op.rows.div_ceil(Ordered::rows_at_once(&op.x));
        let grid = [u32::try_from(tasks).unwrap_or(u32::MAX), 1, 1];
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<QuantizeOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = op.operands().into_iter().fold(step, |step, operand| step.bind(operand, operand));
        let name = format!("quantize_{}_{}", op.x.dtype, op.format);
        Ok(LaunchSequence::new::<QuantizeOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedQuantize, _: &QuantizeConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loop made ready for one operation.
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
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.enter(|| job.run());
        Ok(())
    }
}

/// Rows of bytes to write, shared by the threads of a launch.
struct Plane<'a> {
    start: *mut u8,
    rows: usize,
    row_stride: usize,
    row_bytes: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Plane` is a `&mut [u8]` whose only access is `row`, an unsafe method that obliges its callers to use no row in two
// threads.
unsafe impl Sync for Plane<'_> {}

impl<'a> Plane<'a> {
    /// `rows` rows of `row_bytes` bytes each, `row_stride` apart.
    fn new(
        bytes: &'a mut [u8],
        rows: usize,
        row_stride: u64,
        row_bytes: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let (len, row_stride) = (bytes.len(), usize::try_from(row_stride).unwrap_or(usize::MAX));
        let end = (rows - 1).checked_mul(row_stride).and_then(|last| last.checked_add(row_bytes)).unwrap_or(usize::MAX);
        if end > len || (rows > 1 && row_stride < row_bytes) {
            return Err(HalError::OutOfBounds { what, start: 0, end, len });
        }
        Ok(Self { start: bytes.as_mut_ptr(), rows, row_stride, row_bytes, bytes: PhantomData })
    }

    /// # Safety
    /// Nobody else may use the row meanwhile.
    ///
    /// # Panics
    /// When there is no such row.
    #[expect(clippy::mut_from_ref, reason = "rows are disjoint, and callers use each once")]
    unsafe fn row(&self, row: usize) -> &mut [u8] {
        assert!(row < self.rows, "a row of the matrix");
        // SAFETY: `new` checked that the last row, and so every row, lies in the bytes that `self` borrows mutably, and that rows do
        // not overlap. That nobody else uses this one is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.row_bytes) }
    }
}

/// An operation with its operands.
struct Job<'a> {
    op: &'a CheckedQuantize,
    simd: &'static Simd,
    x: Ordered<'a>,
    given: Option<f32>,
    codes: Plane<'a>,
    /// Rows of no bytes where the format has no such plane.
    scales: Plane<'a>,
    token_factors: Plane<'a>,
    sums: Plane<'a>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedQuantize, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use QuantizeOperand as O;
        let (parts, k) = (&op.parts, op.columns);
        let x = host_bytes(operands.take(O::X).ok_or(absent(O::X.name(), 1))?, O::X.name())?;
        let x = Input::new(x, op.x, [op.rows, k], O::X.name())?;
        let given = match parts.factor {
            XFactor::Given => {
                let what = O::Factor.name();
                let bytes = host_bytes(operands.take(O::Factor).ok_or(absent(what, 4))?, what)?;
                let len = bytes.len();
                let word = bytes.first_chunk().ok_or(HalError::OutOfBounds { what, start: 0, end: 4, len })?;
                Some(f32::from_le_bytes(*word))
            }
            XFactor::None | XFactor::PerToken => None,
        };
        let mut plane = |operand: O, row_stride: u64, row_bytes: usize| {
            let what = operand.name();
            let view = operands.take_mut(operand).ok_or(absent(what, row_bytes))?;
            Plane::new(HostMemory::of_device_mut(DeviceId::CPU, view, what)?, op.rows, row_stride, row_bytes, what)
        };
        let codes = plane(O::Codes, op.codes_row, parts.code_bytes(k))?;
        let mut optional = |is_there: bool, operand: O, row_stride: u64, row_bytes: usize| {
            if is_there {
                plane(operand, row_stride, row_bytes)
            } else {
                Plane::new(&mut [], op.rows, 0, 0, operand.name())
            }
        };
        Ok(Self {
            op,
            simd,
            x: Ordered::new(x, None),
            given,
            codes,
            scales: optional(parts.scale.is_some(), O::Scales, op.scales_row, parts.scale_bytes(k))?,
            token_factors: optional(parts.factor == XFactor::PerToken, O::TokenFactors, 4, 4)?,
            sums: optional(parts.sum_span.is_some(), O::Sums, op.sums_row, parts.sums(k) * 4)?,
        })
    }

    fn run(&self) {
        let CheckedQuantize { rows, columns, .. } = *self.op;
        let each = Ordered::rows_at_once(&self.op.x);
        let task = |task: usize| self.rows(task * each..rows.min((task + 1) * each));
        let tasks = 0..rows.div_ceil(each);
        if rows.saturating_mul(columns) < SERIAL_ELEMENTS {
            tasks.for_each(task);
        } else {
            tasks.into_par_iter().for_each(task);
        }
    }

    /// Quantizes rows, which tasks share out.
    fn rows(&self, rows: Range<usize>) {
        let k = self.op.columns;
        arena::with_tile(rows.len() * k, |tile| {
            self.x.load(self.simd, rows.clone(), 0, tile);
            for (row, values) in rows.zip(tile.chunks_exact(k)) {
                // SAFETY: every row of each plane is used once, in this task.
                let (planes, to_factor) = unsafe {
                    let planes =
                        XRow { codes: self.codes.row(row), scales: self.scales.row(row), sums: self.sums.row(row) };
                    (planes, self.token_factors.row(row))
                };
                if let Some(factor) = self.op.parts.quantize_row(values, self.given, planes) {
                    to_factor.copy_from_slice(&factor.to_le_bytes());
                }
            }
        });
    }
}

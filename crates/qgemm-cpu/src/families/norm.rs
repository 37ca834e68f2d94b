//! Families of `norm`: a single one. A thread processes whole rows.
//! A row that is not too long is cached as f32
//! between statistics and result; longer rows are read again.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    BufferRef, CheckedNorm, Dense, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory,
    HostStream, Kernel, KernelId, LaunchSequence, LaunchStep, NormConfig, NormFunction, NormGate, NormKind, NormLaunch,
    NormOperand, NormQuantizeSpec, NormSpec, Operand, Operands, Operation, QuantizedD, Spec, Stream, Unsupported,
    XPlanes,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Input, Output, absent, host_bytes};
use crate::planes::{PlaneNames, PlaneViews, Planes};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::{Normalization, Simd};
use crate::source_hash::SOURCE_HASH;

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 15;
/// Columns that are loaded and summed together. Partial sums are added
/// in order, whoever computes them.
const PART: usize = 4096;
/// Maximum columns of a cached row: 256 KiB fit
/// in a core's L2 cache.
const KEPT: usize = 16 * PART;
/// Squares whose sum is in this range neither overflow nor
/// underflow f32. With an eps above the lower limit,
/// underflow does not matter.
const MOST_SQUARES: f32 = f32::from_bits((127 + 120) << 23);
const LEAST_SQUARES: f32 = f32::from_bits((127 - 60) << 23);

/// Families of the CPU.
pub const FAMILIES: Families<CheckedNorm> = &[&NORM];

/// The family `norm`.
pub static NORM: NormFamily = NormFamily;

/// RMSNorm and LayerNorm, bound by memory.
#[derive(Debug)]
pub struct NormFamily;

impl Family<CheckedNorm> for NormFamily {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn configs(&self, op: &CheckedNorm, _: &DeviceInfo) -> Result<Vec<NormConfig>, Unsupported> {
        check(op)?;
        Ok(vec![NormConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedNorm, _: &NormLaunch) -> Result<LaunchSequence, HalError> {
        let step = step(device, op)?;
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<NormOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedNorm, _: &NormConfig) -> u64 {
        SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedNorm) -> KernelId {
    let plain = Spec::Norm(NormSpec::any(0));
    let of_codes = op.quantized.map(|quantized| Spec::NormQuantize(NormQuantizeSpec::new(0, &quantized)));
    KernelId::new("norm", None, of_codes.unwrap_or(plain))
}

/// Checks that the kernel supports `op`.
fn check(op: &CheckedNorm) -> Result<(), Unsupported> {
    if op.groups > 1 && op.quantized.is_some() {
        return Err(Unsupported::new("quantizes rows without groups of features"));
    }
    let added = op.added.is_none_or(|added| added.residual.col_stride == 1 && added.sum.col_stride == 1);
    match op.x.col_stride == 1 && op.d.col_stride == 1 && added && !op.gathers {
        true => Ok(()),
        false => Err(Unsupported::new("reads and writes row-major matrices, whose columns keep their order")),
    }
}

/// The kernel of `op` as a step without bound operands.
pub fn step(device: &dyn Device, op: &CheckedNorm) -> Result<LaunchStep, HalError> {
    let cpu = Processor::of(device)?;
    check(op).map_err(|reason| HalError::Unsupported {
        device: DeviceId::CPU,
        what: "norm".into(),
        why: reason.why,
    })?;
    let kernel = CpuNorm { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
    let geometry = Geometry { grid: [u32::try_from(op.rows).unwrap_or(u32::MAX), 1, 1], threads: 1, shared_bytes: 0 };
    Ok(LaunchStep::new::<NormOperand>(kernel_id(op), geometry, Arc::new(kernel)))
}

/// The family's loop, prepared for one operation.
struct CpuNorm {
    op: CheckedNorm,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuNorm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuNorm").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuNorm {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(self.op.rows * self.op.columns >= SERIAL_ELEMENTS, |threads| job.run(threads));
        Ok(())
    }
}

/// Source of the input rows.
enum Rows<'a> {
    /// A read-only matrix.
    Read(Input<'a>),
    /// The result, which overwrites them.
    OfD,
    /// The sum, which overwrites them.
    OfSum,
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedNorm,
    simd: &'static Simd,
    x: Rows<'a>,
    residual: Option<Rows<'a>>,
    gamma: Option<Input<'a>>,
    beta: Option<Input<'a>>,
    /// z of the gate.
    gate: Option<(NormGate, Input<'a>)>,
    sum: Option<Output<'a>>,
    d: Normalized<'a>,
}

/// Output of the normalized rows.
enum Normalized<'a> {
    /// Unquantized values.
    Plain(Output<'a>),
    /// Quantized values.
    Quantized(Planes<'a>),
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedNorm, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use NormOperand as O;
        let shape = [op.rows, op.columns];
        let input = |view: Option<BufferRef<'a>>, operand: O, layout: Dense, shape: [usize; 2]| {
            let view = view.ok_or(absent(operand.name(), 1))?;
            Input::new(host_bytes(view, operand.name())?, layout, shape, operand.name())
        };
        let of_columns = |view: Option<BufferRef<'a>>, operand: O, dtype: Option<DType>| match dtype {
            Some(dtype) => input(view, operand, Dense::rows_of(dtype, op.columns), [1, op.columns]).map(Some),
            None => Ok(None),
        };
        let gamma = of_columns(operands.take(O::Gamma), O::Gamma, op.function.gamma)?;
        let beta = of_columns(operands.take(O::Beta), O::Beta, op.function.beta)?;
        let gate = match op.gate {
            Some(gate) => Some((gate, input(operands.take(O::Gate), O::Gate, gate.z, shape)?)),
            None => None,
        };
        let x = match op.x_operand() {
            O::XAndD => Rows::OfD,
            O::XAndSum => Rows::OfSum,
            _ => Rows::Read(input(operands.take(O::X), O::X, op.x, shape)?),
        };
        let residual = match (op.residual_operand(), op.added) {
            (Some(O::ResidualAndSum), _) => Some(Rows::OfSum),
            (Some(_), Some(added)) => {
                Some(Rows::Read(input(operands.take(O::Residual), O::Residual, added.residual, shape)?))
            }
            _ => None,
        };
        let mut written = |operand: O, layout: Dense, columns: usize| {
            let view = operands.take_mut(operand).ok_or(absent(operand.name(), 1))?;
            let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, operand.name())?;
            Output::new(bytes, layout, [op.rows, columns], operand.name())
        };
        let d = match op.quantized {
            None => Some(written(op.d_operand(), op.d, op.d_columns)?),
            Some(_) => None,
        };
        let sum = match (op.sum_operand(), op.added) {
            (Some(operand), Some(added)) => Some(written(operand, added.sum, op.columns)?),
            _ => None,
        };
        let d = match (d, op.quantized) {
            (Some(d), _) => Normalized::Plain(d),
            (None, Some(quantized)) => Normalized::Quantized(planes(op, &quantized, &mut operands)?),
            (None, None) => return Err(absent(O::D.name(), 1)),
        };
        Ok(Self { op, simd, x, residual, gamma, beta, gate, sum, d })
    }

    fn run(&self, threads: usize) {
        // Several rows per task, so that a task is worth starting.
        let rows_of_task = SERIAL_ELEMENTS.div_ceil(4 * self.op.columns).max(1);
        let tasks = 0..self.op.rows.div_ceil(rows_of_task);
        let work = |task: usize| {
            let first = task * rows_of_task;
            // Of a row that is not cached, a part and its gate.
            let scratch = if self.keeps() { self.columns().next_multiple_of(PART) } else { 2 * PART };
            // Parts of gamma (or the residual) and of beta,
            // beside the cached row.
            arena::with_tile(scratch + 2 * PART, |tile| {
                let (kept, part) = tile.split_at_mut(scratch);
                for row in first..self.op.rows.min(first + rows_of_task) {
                    (0..self.op.groups).for_each(|group| self.group(row, group * self.columns(), kept, part));
                    self.pad(row, part);
                }
            });
        };
        match threads {
            1 => tasks.for_each(work),
            _ => tasks.into_par_iter().for_each(work),
        }
    }

    /// Columns over which the means are taken.
    fn columns(&self) -> usize {
        self.op.columns / self.op.groups
    }

    /// Whether rows are cached between statistics and result.
    /// Quantized rows always are.
    fn keeps(&self) -> bool {
        self.columns() <= KEPT || matches!(self.d, Normalized::Quantized(_))
    }

    /// Normalizes the group of a row that begins at column `start`.
    /// `kept` has room for all of it, or for a part and its gate.
    fn group(&self, row: usize, start: usize, kept: &mut [f32], part: &mut [f32]) {
        let columns = self.columns();
        let is_kept = self.keeps();
        // Without a residual, an uncached row need not be read now.
        if is_kept || self.residual.is_some() {
            for first in (0..columns).step_by(PART) {
                let width = PART.min(columns - first);
                let place = if is_kept { first } else { 0 };
                let values = &mut kept[place..place + width];
                self.load(&self.x, row, start + first, values);
                self.add_residual(row, start + first, values, &mut part[..width]);
                if is_kept {
                    self.multiply(true, row, start + first, values, &mut part[..width]);
                }
            }
        }
        let how = statistics(self.simd, &self.op.function, columns, |visit| self.parts(row, start, kept, visit));
        self.parts(row, start, kept, &mut |first, values| {
            let (gamma, beta) = part.split_at_mut(PART);
            let of_columns = |input: &Option<Input<'_>>, out: &mut [f32]| match input {
                Some(input) => {
                    input.part(self.simd, 0, start + first, &mut out[..values.len()]);
                    values.len()
                }
                None => 0,
            };
            let lengths = [of_columns(&self.gamma, gamma), of_columns(&self.beta, beta)];
            self.simd.normalize(&how, &gamma[..lengths[0]], &beta[..lengths[1]], values);
            self.multiply(false, row, start + first, values, &mut gamma[..values.len()]);
            if let Normalized::Plain(d) = &self.d {
                // SAFETY: the row belongs to this thread.
                unsafe { d.store_part(row, start + first, values) };
            }
        });
        if let Normalized::Quantized(planes) = &self.d {
            // SAFETY: as above.
            unsafe { planes.quantize(row, &kept[..columns]) };
        }
    }

    /// Multiplies values by their gate, if there is one at this place.
    fn multiply(&self, before: bool, row: usize, first: usize, values: &mut [f32], z: &mut [f32]) {
        let Some((gate, input)) = self.gate.as_ref().filter(|(gate, _)| gate.before == before) else { return };
        input.part(self.simd, row, first, z);
        self.simd.gate(gate.function, z, values);
    }

    /// Stores the columns of zeros behind those of X.
    fn pad(&self, row: usize, part: &mut [f32]) {
        let Normalized::Plain(d) = &self.d else { return };
        let columns = self.op.columns;
        if columns < self.op.d_columns {
            part.fill(0.0);
        }
        for first in (columns..self.op.d_columns).step_by(PART) {
            let width = PART.min(self.op.d_columns - first);
            // SAFETY: the row belongs to this thread.
            unsafe { d.store_part(row, first, &part[..width]) };
        }
    }

    /// Writes the sum of `values` and the residual, and returns
    /// the rounded sum in `values`.
    fn add_residual(&self, row: usize, first: usize, values: &mut [f32], part: &mut [f32]) {
        let (Some(residual), Some(sum)) = (&self.residual, &self.sum) else { return };
        self.load(residual, row, first, part);
        self.simd.add(part, values);
        // SAFETY: the row belongs to this thread.
        unsafe {
            sum.store_part(row, first, values);
            sum.load_part(self.simd, row, first, values);
        }
    }

    fn load(&self, rows: &Rows<'_>, row: usize, first: usize, out: &mut [f32]) {
        let written = match (rows, &self.d) {
            (Rows::Read(input), _) => return input.part(self.simd, row, first, out),
            (Rows::OfD, Normalized::Plain(d)) => Some(d),
            _ => self.sum.as_ref(),
        };
        let written = written.unwrap_or_else(|| unreachable!("what takes a place is written"));
        // SAFETY: the row belongs to this thread.
        unsafe { written.load_part(self.simd, row, first, out) };
    }

    /// Calls `visit` with the first column in the group and the values
    /// of each part of the norm's input.
    fn parts(&self, row: usize, start: usize, kept: &mut [f32], visit: &mut dyn FnMut(usize, &mut [f32])) {
        let columns = self.columns();
        if self.keeps() {
            let parts = kept[..columns].chunks_mut(PART);
            parts.enumerate().for_each(|(i, values)| visit(i * PART, values));
            return;
        }
        for first in (0..columns).step_by(PART) {
            let width = PART.min(columns - first);
            let (values, z) = kept.split_at_mut(PART);
            let values = &mut values[..width];
            self.load(if self.residual.is_some() { &Rows::OfSum } else { &self.x }, row, start + first, values);
            self.multiply(true, row, start + first, values, &mut z[..width]);
            visit(first, values);
        }
    }
}

/// Planes of a quantized result.
fn planes<'a>(op: &CheckedNorm, to: &QuantizedD, operands: &mut Operands<'a>) -> Result<Planes<'a>, HalError> {
    use NormOperand as O;
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
    let XPlanes { parts, codes_row, scales_row, sums_row } = &to.planes;
    let planes = Planes::new(parts, [op.rows, op.columns], [*codes_row, *scales_row, *sums_row], views, names)?;
    planes.with_factor(factor, O::Factor.name())
}

/// Statistics of a row whose parts `each` provides.
fn statistics(
    simd: &Simd,
    function: &NormFunction,
    columns: usize,
    mut each: impl FnMut(&mut dyn FnMut(usize, &mut [f32])),
) -> Normalization {
    let (unscaled, squares) = scaled(simd, 1.0, function, columns, &mut each);
    let is_small = squares < LEAST_SQUARES && function.eps < LEAST_SQUARES;
    if squares <= MOST_SQUARES && !is_small {
        return unscaled;
    }
    let mut largest = function.eps.sqrt().to_bits();
    each(&mut |_, values| {
        // Infinity and NaN are unchanged by any factor.
        let magnitudes = values.iter().map(|value| value.to_bits() & 0x7fff_ffff);
        largest = magnitudes.filter(|&bits| bits < f32::INFINITY.to_bits()).fold(largest, u32::max);
    });
    // Scaled values are below 4. The factor and its
    // inverse are normal numbers.
    let scale = f32::from_bits((254 - (largest >> 23).clamp(1, 253)) << 23);
    scaled(simd, scale, function, columns, &mut each).0
}

/// Statistics of the values times `scale`, and the sum of
/// the squares. `scale` is a power of two: 1 unless squares
/// would overflow or underflow f32.
fn scaled(
    simd: &Simd,
    scale: f32,
    function: &NormFunction,
    columns: usize,
    each: &mut impl FnMut(&mut dyn FnMut(usize, &mut [f32])),
) -> (Normalization, f32) {
    let (is_centered, count) = (function.kind == NormKind::Layer, columns as f32);
    let mut mean = 0.0;
    if is_centered {
        let mut sum = 0.0;
        each(&mut |_, values| sum += simd.moments(values, scale, 0.0)[0]);
        mean = sum / count;
    }
    let (mut beside, mut squares) = (0.0, 0.0);
    each(&mut |_, values| {
        let [sum, of_squares] = simd.moments(values, scale, mean);
        beside += sum;
        squares += of_squares;
    });
    let correction = if is_centered { beside / count } else { 0.0 };
    // NaN stays NaN.
    let variance = squares / count - correction * correction;
    let variance = if variance < 0.0 { 0.0 } else { variance };
    let inverse = 1.0 / (variance + function.eps * scale * scale).sqrt();
    (Normalization { scale, mean, correction, inverse }, squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_of_every_value() {
        let simd = Simd::best();
        for len in [0, 1, 15, 16, 17, 31, 33, 100, PART] {
            let values: Vec<f32> = (0..len).map(|i| (i % 7) as f32).collect();
            let expected = [values.iter().sum(), values.iter().map(|value| value * value).sum::<f32>()];
            assert_eq!(simd.moments(&values, 1.0, 0.0), expected, "{len}");
        }
    }

    #[test]
    fn squares_beyond_the_range_are_scaled() {
        let inverse = |row: &mut [f32], eps| {
            let (function, columns) = (NormFunction::rms(eps), row.len());
            let how = statistics(Simd::best(), &function, columns, |visit| visit(0, row));
            Simd::best().normalize(&how, &[], &[], row);
            row[0]
        };
        assert_eq!(inverse(&mut [1e30; 64], 1e-6), 1.0);
        assert_eq!(inverse(&mut [f32::MAX; 64], 1e-6), 1.0);
        assert!((inverse(&mut [1e-35; 64], 0.0) - 1.0).abs() < 1e-6);
        assert!((inverse(&mut [1e-30; 64], 1e-6) - 1e-27).abs() < 1e-33);
    }
}

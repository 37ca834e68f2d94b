//! Families of `convert`: a single one. It reads
//! matrices as products read X.

use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    CheckedConvert, ConvertConfig, ConvertOperand, ConvertPlan, ConvertSpec, Dense, Device, DeviceId, DeviceInfo,
    Families, Family, Geometry, HalError, HostMemory, HostStream, Kernel, KernelId, LaunchSequence, LaunchStep,
    Operand, Operands, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Input, Output, absent, host_bytes, is_transposed};
use crate::ordered::Ordered;
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 15;
/// Elements that are loaded before they are written:
/// they stay in the L1 cache.
const TILE: usize = 4096;
/// Columns of a task when there are no row factors.
const TASK_COLUMNS: usize = 4 * TILE;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedConvert> = &[&CONVERT];

/// The family `convert`.
pub static CONVERT: ConvertFamily = ConvertFamily;

/// Type and layout conversion, bound by memory.
#[derive(Debug)]
pub struct ConvertFamily;

impl Family<CheckedConvert> for ConvertFamily {
    fn name(&self) -> &'static str {
        "convert"
    }

    fn configs(&self, op: &CheckedConvert, _: &DeviceInfo) -> Result<Vec<ConvertConfig>, Unsupported> {
        let transposed = is_transposed(&op.x);
        let spec = ConvertSpec { transposed, row_factors: false, whole_groups: false, ..ConvertSpec::of(op) };
        let efficiency = if transposed || op.gathers { 300 } else { 700 };
        Ok(vec![ConvertConfig { kernel: KernelId::new(self.name(), None, Spec::Convert(spec)), efficiency }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedConvert,
        plan: &ConvertPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        cpu.pool().reserve(!is_small(op), Scratch { tile: TILE, ..Scratch::default() });
        let kernel = CpuConvert { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let grid = Tasks::new(op).grid().map(|tasks| u32::try_from(tasks).unwrap_or(u32::MAX));
        let geometry = Geometry { grid: [grid[0], grid[1], 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<ConvertOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        let name = format!("convert_{}_{}", op.x.dtype, op.d.dtype);
        Ok(LaunchSequence::new::<ConvertOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedConvert, _: &ConvertConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Split of D into tasks.
#[derive(Clone, Copy)]
struct Tasks {
    shape: [usize; 2],
    /// Rows and columns of a task.
    each: [usize; 2],
}

impl Tasks {
    fn new(op: &CheckedConvert) -> Self {
        let columns = if op.row_factors { op.d_columns } else { TASK_COLUMNS };
        Self { shape: [op.rows, op.d_columns], each: [Ordered::rows_at_once(&op.x), columns] }
    }

    /// Tasks along rows and along columns.
    fn grid(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.shape[axis].div_ceil(self.each[axis]))
    }

    /// Rows and columns of a task.
    fn at(&self, task: usize) -> [Range<usize>; 2] {
        let along_columns = self.grid()[1];
        let place = [task / along_columns, task % along_columns];
        [0, 1].map(|axis| {
            let first = place[axis] * self.each[axis];
            first..self.shape[axis].min(first + self.each[axis])
        })
    }
}

/// Whether the calling thread works alone.
fn is_small(op: &CheckedConvert) -> bool {
    op.rows * op.d_columns < SERIAL_ELEMENTS
}

/// The family's loop, prepared for one operation.
struct CpuConvert {
    op: CheckedConvert,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuConvert {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuConvert").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuConvert {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        job.run(&self.pool);
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedConvert,
    simd: &'static Simd,
    x: Ordered<'a>,
    d: Output<'a>,
    row_factors: Option<Output<'a>>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedConvert, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use ConvertOperand as O;
        let mut read = |operand: O| match operands.take(operand) {
            Some(view) => host_bytes(view, operand.name()),
            None => Err(absent(operand.name(), 1)),
        };
        let x = Input::new(read(O::X)?, op.x, [op.rows, op.columns], O::X.name())?;
        let order = match op.gathers {
            true => {
                let (bytes, end, what) = (read(O::Order)?, op.d_columns * 4, O::Order.name());
                Some(bytes.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len: bytes.len() })?)
            }
            false => None,
        };
        let mut written = |operand: O, layout: Dense, columns: usize| {
            let view = operands.take_mut(operand).ok_or(absent(operand.name(), 1))?;
            let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, operand.name())?;
            Output::new(bytes, layout, [op.rows, columns], operand.name())
        };
        let d = written(O::D, op.d, op.d_columns)?;
        let row_factors = match op.row_factors {
            true => Some(written(O::RowFactors, Dense::rows_of(DType::F32, 1), 1)?),
            false => None,
        };
        Ok(Self { op, simd, x: Ordered::new(x, order), d, row_factors })
    }

    fn run(&self, pool: &Pool) {
        let tasks = Tasks::new(self.op);
        let [along_rows, along_columns] = tasks.grid();
        let work = |task| {
            let [rows, columns] = tasks.at(task);
            self.task(rows, columns);
        };
        let all = 0..along_rows * along_columns;
        if is_small(self.op) {
            all.for_each(work);
        } else {
            pool.enter(|| all.clone().into_par_iter().for_each(work));
        }
    }

    /// Writes `columns` of `rows`; all columns when rows have factors.
    fn task(&self, rows: Range<usize>, columns: Range<usize>) {
        arena::with_tile(TILE, |tile| {
            let mut factors = [1.0; Ordered::MOST_ROWS];
            if let Some(inverses) = &self.row_factors {
                let factors = &mut factors[..rows.len()];
                self.find_factors(rows.clone(), tile, factors);
                for (row, factor) in rows.clone().zip(factors) {
                    // SAFETY: tasks share no rows where these have factors.
                    unsafe { inverses.store_part(row, 0, &[1.0 / *factor]) };
                }
            }
            let saturates = self.op.d.dtype == DType::BF16 && self.op.x.dtype == DType::F32;
            self.tiles(&self.x, rows, columns, tile, |i, row, first, values| {
                if self.row_factors.is_some() {
                    values.iter_mut().for_each(|value| *value *= factors[i]);
                }
                if saturates {
                    values.iter_mut().for_each(|value| *value = within_bf16(*value));
                }
                // SAFETY: tasks share no elements.
                unsafe { self.d.store_part(row, first, values) };
            });
        });
    }

    /// Computes the power-of-two factors of `rows` into `factors`.
    fn find_factors(&self, rows: Range<usize>, tile: &mut [f32], factors: &mut [f32]) {
        let mut largest = [0; Ordered::MOST_ROWS];
        let all = 0..self.op.columns;
        self.tiles(&self.x.natural(), rows, all, tile, |i, _, _, values| {
            largest[i] = values.iter().fold(largest[i], |largest, value| larger_magnitude(largest, *value));
        });
        factors.iter_mut().zip(largest).for_each(|(factor, largest)| *factor = row_factor(largest));
    }

    /// Calls `work` with tiles of `columns` of each of `rows` in
    /// `x`: index of the row, row, first column, values.
    fn tiles(
        &self,
        x: &Ordered<'_>,
        rows: Range<usize>,
        columns: Range<usize>,
        tile: &mut [f32],
        mut work: impl FnMut(usize, usize, usize, &mut [f32]),
    ) {
        let most = tile.len() / rows.len();
        for first in columns.clone().step_by(most) {
            let width = most.min(columns.end - first);
            let tile = &mut tile[..rows.len() * width];
            x.load(self.simd, rows.clone(), first, tile);
            for (i, (row, values)) in rows.clone().zip(tile.chunks_exact_mut(width)).enumerate() {
                work(i, row, first, values);
            }
        }
    }
}

/// Bits of the larger magnitude, because bits are in the order
/// of the values. Infinity and NaN are ignored.
fn larger_magnitude(largest: u32, value: f32) -> u32 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    largest.max(if magnitude < f32::INFINITY.to_bits() { magnitude } else { 0 })
}

/// The power of two that scales the magnitude with
/// these bits to [2¹⁴, 2¹⁵). It and its inverse are
/// normal numbers, at most 2¹²⁶.
fn row_factor(largest: u32) -> f32 {
    let exponent = (largest >> 23).max(15);
    f32::from_bits((127 + 141 - exponent) << 23)
}

/// Clamps finite values that would round to infinity in bf16 to
/// the largest bf16, which is as close.
fn within_bf16(value: f32) -> f32 {
    const LARGEST: u32 = 0x7f7f_0000;
    let (bits, sign) = (value.to_bits() & 0x7fff_ffff, value.to_bits() & 0x8000_0000);
    f32::from_bits(sign | if bits < f32::INFINITY.to_bits() { bits.min(LARGEST) } else { bits })
}

//! Families of `unpack`: a single one. Sixteen rows of W are
//! a vector register, so decoded columns are rows of D.

use std::sync::Arc;

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, PAIR_ROWS};
use qgemm_hal::{
    CheckedUnpack, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory, HostStream, Kernel,
    KernelId, LaunchSequence, LaunchStep, Name, Operand, Operands, Operation, Spec, Stream, UnpackConfig,
    UnpackOperand, UnpackPlan, UnpackSpec, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Output, absent, host_bytes};
use crate::packed::Packed;
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::{BLOCK_ROWS, LANES, Scales, Simd, TILES};
use crate::source_hash::SOURCE_HASH;

/// Values below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_VALUES: usize = 1 << 15;
/// Columns that are decoded at a time. K-tiles
/// are multiples of it.
const STEP: usize = 64;
/// Values of a step: of one tile, and of
/// a block of tiles.
const TILE_STEP: usize = STEP * LANES;
const BLOCK_STEP: usize = STEP * BLOCK_ROWS;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedUnpack> = &[&UNPACK];

/// The family `unpack`.
pub static UNPACK: UnpackFamily = UnpackFamily;

/// Transposed rows of a packed weight, dequantized, bound by memory.
#[derive(Debug)]
pub struct UnpackFamily;

impl Family<CheckedUnpack> for UnpackFamily {
    fn name(&self) -> &'static str {
        "unpack"
    }

    fn configs(&self, op: &CheckedUnpack, _: &DeviceInfo) -> Result<Vec<UnpackConfig>, Unsupported> {
        let kernel = kernel_id(op);
        layout(op).map(|_| vec![UnpackConfig { kernel, efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedUnpack, plan: &UnpackPlan) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let layout = layout(op).map_err(|reason| HalError::Unsupported {
            device: DeviceId::CPU,
            what: op.kernel_name("unpack"),
            why: reason.why,
        })?;
        let kernel =
            CpuUnpack { op: *op, scales: Scales::new(&layout), layout, simd: cpu.simd(), pool: cpu.pool().clone() };
        let scratch = Scratch { tile: kernel.tile_floats(), ..Scratch::default() };
        cpu.pool().reserve(!is_small(op), scratch);
        let blocks = u32::try_from(op.stored_rows().div_ceil(BLOCK_ROWS)).unwrap_or(u32::MAX);
        let geometry = Geometry { grid: [blocks, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<UnpackOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<UnpackOperand>(op.kernel_name("unpack"), vec![step]))
    }

    fn source_hash(&self, _: &CheckedUnpack, _: &UnpackConfig) -> u64 {
        SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedUnpack) -> KernelId {
    let spec = UnpackSpec { main_loop: Name::new("simd16"), w: op.format, n: BLOCK_ROWS as u32 };
    KernelId::new("unpack", None, Spec::Unpack(spec))
}

/// Packed layout of the weight.
fn layout(op: &CheckedUnpack) -> Result<PackedLayout, Unsupported> {
    let expected = FragmentLayout::Simd16;
    let found = PackedLayout::new(op.format, op.class).filter(|_| op.class == expected);
    found.ok_or_else(|| {
        Unsupported::new(format!("reads weights packed as {expected:?}, and these are packed as {:?}", op.class))
    })
}

/// Whether the calling thread works alone.
fn is_small(op: &CheckedUnpack) -> bool {
    op.columns().saturating_mul(op.features) < SERIAL_VALUES
}

/// The family's loop, prepared for one operation.
struct CpuUnpack {
    op: CheckedUnpack,
    layout: PackedLayout,
    scales: Scales,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuUnpack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuUnpack").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuUnpack {
    /// Scratch floats of a thread: a step of one
    /// tile, a step of a block, row scales of a
    /// block, scales of a k-tile.
    fn tile_floats(&self) -> usize {
        TILE_STEP + BLOCK_STEP + BLOCK_ROWS + Packed::scale_floats_of(&self.layout)
    }
}

impl Kernel for CpuUnpack {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(self, operands)?;
        let columns = self.op.stored_columns();
        let k_tiles = columns.start / self.layout.k_tile..columns.end.div_ceil(self.layout.k_tile);
        let blocks = self.op.stored_rows().div_ceil(BLOCK_ROWS);
        let all = 0..blocks * k_tiles.len();
        let work = |task: usize| job.task(task % blocks * BLOCK_ROWS, k_tiles.start + task / blocks);
        if is_small(&self.op) {
            all.for_each(work);
        } else {
            self.pool.enter(|| all.clone().into_par_iter().for_each(work));
        }
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    kernel: &'a CpuUnpack,
    weight: Packed<'a>,
    row_scale: Option<&'a [u8]>,
    k_order: Option<&'a [u8]>,
    d: Output<'a>,
}

impl<'a> Job<'a> {
    fn new(kernel: &'a CpuUnpack, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use UnpackOperand as O;
        let CpuUnpack { op, layout, scales, .. } = kernel;
        let d = operands.take_mut(O::D).ok_or(absent(O::D.name(), 1))?;
        let mut read = |operand: O, len: usize| {
            let what = operand.name();
            let bytes = host_bytes(operands.take(operand).ok_or(absent(what, len))?, what)?;
            bytes.get(..len).ok_or(HalError::OutOfBounds { what, start: 0, end: len, len: bytes.len() })
        };
        let w = read(O::W, layout.bytes(op.stored_rows(), op.stored_k))?;
        let row_scale = op.row_scale.then(|| read(O::RowScale, op.stored_rows() * 4)).transpose()?;
        let k_order = op.k_order.then(|| read(O::KOrder, op.stored_k * 4)).transpose()?;
        let d = HostMemory::of_device_mut(DeviceId::CPU, d, O::D.name())?;
        Ok(Self {
            kernel,
            weight: Packed::new(layout, scales, w, layout.k_tiles(op.stored_k)),
            row_scale,
            k_order,
            d: Output::new(d, op.d, [op.features, op.columns()], O::D.name())?,
        })
    }

    /// Decodes a k-tile of a block of rows.
    fn task(&self, first_row: usize, k_tile: usize) {
        let CpuUnpack { op, layout, simd, .. } = self.kernel;
        let rows = BLOCK_ROWS.min(op.stored_rows() - first_row);
        arena::with_tile(self.kernel.tile_floats(), |scratch| {
            let (of_tile, scratch) = scratch.split_at_mut(TILE_STEP);
            let (of_block, scratch) = scratch.split_at_mut(BLOCK_STEP);
            let (factors, scratch) = scratch.split_at_mut(BLOCK_ROWS);
            let (scales, mins) = scratch.split_at_mut(scratch.len() / 2);
            match self.row_scale {
                Some(bytes) => simd.to_f32(DType::F32, &bytes[4 * first_row..], &mut factors[..rows]),
                None => factors.fill(1.0),
            }
            for first in (0..layout.k_tile).step_by(STEP) {
                for tile in 0..rows.div_ceil(LANES).min(TILES) {
                    let codes = self.weight.k_tile(simd, first_row / LANES + tile, k_tile, scales, mins);
                    simd.decode(&codes, first, STEP, of_tile);
                    let columns = of_tile.chunks_exact(LANES).zip(of_block.chunks_exact_mut(BLOCK_ROWS));
                    columns.for_each(|(from, to)| to[tile * LANES..][..LANES].copy_from_slice(from));
                }
                for (column, values) in of_block.chunks_exact_mut(BLOCK_ROWS).enumerate() {
                    let Some(d_row) = self.d_row(k_tile * layout.k_tile + first + column) else { continue };
                    if self.row_scale.is_some() {
                        values.iter_mut().zip(&*factors).for_each(|(value, factor)| *value *= factor);
                    }
                    self.store(d_row, first_row, &values[..rows]);
                }
            }
        });
    }

    /// Stores a column's values for a block of rows. No
    /// other task stores them.
    fn store(&self, d_row: usize, first_row: usize, values: &[f32]) {
        let CheckedUnpack { gated, out_features, .. } = self.kernel.op;
        if !gated {
            // SAFETY: tasks share no rows of W or no columns, and
            // an input feature has one column.
            return unsafe { self.d.store_part(d_row, first_row, values) };
        }
        for (i, eight) in values.chunks(PAIR_ROWS).enumerate() {
            let group = first_row / PAIR_ROWS + i;
            let feature = group / 2 * PAIR_ROWS;
            let count = eight.len().min(out_features.saturating_sub(feature));
            let column = feature + if group.is_multiple_of(2) { 0 } else { out_features };
            if count > 0 {
                // SAFETY: as above; each row of W has
                // one column of D.
                unsafe { self.d.store_part(d_row, column, &eight[..count]) };
            }
        }
    }

    /// Row of D for a stored column, if any.
    fn d_row(&self, stored: usize) -> Option<usize> {
        let CheckedUnpack { first, features, stored_k, .. } = self.kernel.op;
        let feature = match self.k_order {
            Some(_) if stored >= stored_k => return None,
            Some(order) => u32::from_le_bytes(*order[stored * 4..].first_chunk()?) as usize,
            None => stored,
        };
        feature.checked_sub(first).filter(|&row| row < features)
    }
}

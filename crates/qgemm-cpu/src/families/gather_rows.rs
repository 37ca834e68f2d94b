//! Families of `gather_rows`: a single one. A row is a lane of its
//! tile, which is decoded as a whole.

use std::sync::Arc;

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_hal::op::gather_rows::{STATUS_BAD_ID, STATUS_WORDS};
use qgemm_hal::{
    CheckedGatherRows, Device, DeviceId, DeviceInfo, Families, Family, GatherRowsConfig, GatherRowsOperand,
    GatherRowsPlan, GatherRowsSpec, Geometry, HalError, HostMemory, HostStream, Kernel, KernelId, LaunchSequence,
    LaunchStep, Name, Operand, Operands, Operation, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Output, absent, host_bytes};
use crate::packed::Packed;
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::{LANES, Scales, Simd};
use crate::source_hash::SOURCE_HASH;

/// Values below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_VALUES: usize = 1 << 14;
/// Columns that are decoded at a time. K-tiles
/// are multiples of it.
const STEP: usize = 64;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedGatherRows> = &[&GatherRowsFamily];

/// Rows of a packed weight by index, bound by memory.
#[derive(Debug)]
struct GatherRowsFamily;

impl Family<CheckedGatherRows> for GatherRowsFamily {
    fn name(&self) -> &'static str {
        "gather_rows"
    }

    fn configs(&self, op: &CheckedGatherRows, _: &DeviceInfo) -> Result<Vec<GatherRowsConfig>, Unsupported> {
        let spec = GatherRowsSpec { main_loop: Name::new("simd16"), w: op.format };
        let kernel = KernelId::new("gather_rows", None, Spec::GatherRows(spec));
        layout(op).map(|_| vec![GatherRowsConfig { kernel, launches: 1, efficiency: 100 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedGatherRows,
        plan: &GatherRowsPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let layout = layout(op).map_err(|reason| HalError::Unsupported {
            device: DeviceId::CPU,
            what: op.kernel_name(),
            why: reason.why,
        })?;
        let kernel =
            CpuGatherRows { op: *op, scales: Scales::new(&layout), layout, simd: cpu.simd(), pool: cpu.pool().clone() };
        let scratch = Scratch { tile: kernel.tile_floats(), ..Scratch::default() };
        cpu.pool().reserve(!kernel.is_small(), scratch);
        let geometry =
            Geometry { grid: [u32::try_from(op.rows).unwrap_or(u32::MAX), 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<GatherRowsOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<GatherRowsOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedGatherRows, _: &GatherRowsConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Packed layout of the weight.
fn layout(op: &CheckedGatherRows) -> Result<PackedLayout, Unsupported> {
    let expected = FragmentLayout::Simd16;
    let found = PackedLayout::new(op.format, op.class).filter(|_| op.class == expected);
    found.ok_or_else(|| {
        Unsupported::new(format!("reads weights packed as {expected:?}, and these are packed as {:?}", op.class))
    })
}

/// The family's loop, prepared for one operation.
struct CpuGatherRows {
    op: CheckedGatherRows,
    layout: PackedLayout,
    scales: Scales,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuGatherRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuGatherRows").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuGatherRows {
    /// Scratch floats of a thread: a step of a tile, a step of
    /// a row, scales of a k-tile.
    fn tile_floats(&self) -> usize {
        STEP * LANES + STEP + Packed::scale_floats_of(&self.layout)
    }

    /// Whether the calling thread works alone.
    fn is_small(&self) -> bool {
        self.op.rows.saturating_mul(self.op.k) < SERIAL_VALUES
    }
}

impl Kernel for CpuGatherRows {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(self, operands)?;
        let work = |row: usize| job.row(row);
        if self.is_small() {
            (0..self.op.rows).for_each(work);
        } else {
            self.pool.enter(|| (0..self.op.rows).into_par_iter().for_each(work));
        }
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    kernel: &'a CpuGatherRows,
    weight: Packed<'a>,
    row_scale: Option<&'a [u8]>,
    k_order: Option<&'a [u8]>,
    ids: &'a [u8],
    d: Output<'a>,
}

/// Little-endian word `index` of `bytes`.
fn word(bytes: &[u8], index: usize) -> u32 {
    bytes[index * 4..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

impl<'a> Job<'a> {
    /// Binds the operands and writes the status.
    fn new(kernel: &'a CpuGatherRows, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use GatherRowsOperand as O;
        let CpuGatherRows { op, layout, scales, .. } = kernel;
        let d = operands.take_mut(O::D).ok_or(absent(O::D.name(), 1))?;
        let status = operands.take_mut(O::Status).ok_or(absent(O::Status.name(), 1))?;
        let mut read = |operand: O, len: usize| {
            let what = operand.name();
            let bytes = host_bytes(operands.take(operand).ok_or(absent(what, len))?, what)?;
            bytes.get(..len).ok_or(HalError::OutOfBounds { what, start: 0, end: len, len: bytes.len() })
        };
        let w = read(O::W, layout.bytes(op.table_rows, op.stored_k))?;
        let row_scale = op.row_scale.then(|| read(O::RowScale, op.table_rows * 4)).transpose()?;
        let k_order = op.k_order.then(|| read(O::KOrder, op.stored_k * 4)).transpose()?;
        let ids = read(O::Ids, op.rows * 4)?;
        let status = HostMemory::of_device_mut(DeviceId::CPU, status, O::Status.name())?;
        let fault = (0..op.rows).find(|&row| word(ids, row) as usize >= op.table_rows);
        let words = fault.map_or([0; STATUS_WORDS], |row| [STATUS_BAD_ID, row as u32, 0, word(ids, row)]);
        for (to, word) in status.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let d = HostMemory::of_device_mut(DeviceId::CPU, d, O::D.name())?;
        Ok(Self {
            kernel,
            weight: Packed::new(layout, scales, w, layout.k_tiles(op.stored_k)),
            row_scale,
            k_order,
            ids,
            d: Output::new(d, op.d, [op.rows, op.k], O::D.name())?,
        })
    }

    /// Gathers one row of D.
    fn row(&self, row: usize) {
        let CpuGatherRows { op, layout, simd, .. } = self.kernel;
        let id = word(self.ids, row) as usize;
        if id >= op.table_rows {
            for first in (0..op.k).step_by(STEP) {
                self.store(row, first, &[0.0; STEP][..STEP.min(op.k - first)]);
            }
            return;
        }
        let factor = self.row_scale.map_or(1.0, |scales| f32::from_bits(word(scales, id))) * op.scale;
        arena::with_tile(self.kernel.tile_floats(), |scratch| {
            let (of_tile, scratch) = scratch.split_at_mut(STEP * LANES);
            let (of_row, scratch) = scratch.split_at_mut(STEP);
            let (scales, mins) = scratch.split_at_mut(scratch.len() / 2);
            for k_tile in 0..layout.k_tiles(op.stored_k) {
                let codes = self.weight.k_tile(simd, id / LANES, k_tile, scales, mins);
                for first in (0..layout.k_tile).step_by(STEP) {
                    simd.decode(&codes, first, STEP, of_tile);
                    let values = of_tile.chunks_exact(LANES).map(|lanes| lanes[id % LANES]);
                    for (to, value) in of_row.iter_mut().zip(values) {
                        *to = value * factor;
                    }
                    self.store_stored(row, k_tile * layout.k_tile + first, of_row);
                }
            }
        });
    }

    /// Stores a step of stored columns. Padding columns are no
    /// columns of D.
    fn store_stored(&self, row: usize, first: usize, values: &[f32]) {
        let CheckedGatherRows { k, stored_k, .. } = self.kernel.op;
        let count = values.len().min(stored_k.saturating_sub(first));
        let Some(order) = self.k_order else {
            return self.store(row, first, &values[..count.min(k.saturating_sub(first))]);
        };
        for (i, value) in values[..count].iter().enumerate() {
            let column = word(order, first + i) as usize;
            if column < k {
                self.store(row, column, std::slice::from_ref(value));
            }
        }
    }

    fn store(&self, row: usize, first: usize, values: &[f32]) {
        if !values.is_empty() {
            // SAFETY: a row of D is one task's, and each column of W
            // is one column of D.
            unsafe { self.d.store_part(row, first, values) };
        }
    }
}

//! Families of `short_conv`: a single one. A thread convolves a block
//! of channels, for the tokens of all sequences.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::op::short_conv::{ConvState, MOST_WIDTH, ShortConvStep};
use qgemm_hal::{
    BufferRef, CheckedShortConv, Dense, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory,
    HostStream, Kernel, LaunchSequence, LaunchStep, Operand, Operands, Operation, QueryLengths, ShortConvConfig,
    ShortConvLaunch, ShortConvOperand, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::convert;
use crate::operand::{Input, Output, OutputBatch, absent, host_bytes, read};
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::{LANES, Simd, Taps};
use crate::source_hash::SOURCE_HASH;

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 15;
/// Channels of a block: whole cache lines, and rows that stay in
/// the L1 cache.
const LEAST_BLOCK: usize = 4 * LANES;
const MOST_BLOCK: usize = 512;
/// Tokens whose inputs are converted together.
const TILE: usize = 16;
/// Rows of scratch of a block: inputs, weights, bias, gate, result.
const SCRATCH_ROWS: usize = TILE + 2 * MOST_WIDTH + 3;
/// Elements that are rounded together.
const PART: usize = 64;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedShortConv> = &[&ShortConvFamily];

/// Family name.
const NAME: &str = "short_conv";

/// Convolutions bound by memory.
#[derive(Debug)]
struct ShortConvFamily;

impl Family<CheckedShortConv> for ShortConvFamily {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedShortConv, _: &DeviceInfo) -> Result<Vec<ShortConvConfig>, Unsupported> {
        let kernel = op.kernel_of(NAME, None, ShortConvStep::All);
        Ok(vec![ShortConvConfig { kernel, launches: 1, efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedShortConv,
        plan: &ShortConvLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuShortConv { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        cpu.pool().reserve(!kernel.is_small(), Scratch { tile: SCRATCH_ROWS * MOST_BLOCK, ..Scratch::default() });
        let blocks = op.channels.div_ceil(LEAST_BLOCK);
        let geometry =
            Geometry { grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<ShortConvOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<ShortConvOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedShortConv, _: &ShortConvConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loop, prepared for one operation.
struct CpuShortConv {
    op: CheckedShortConv,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuShortConv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuShortConv").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuShortConv {
    /// Whether the calling thread works alone.
    fn is_small(&self) -> bool {
        self.op.tokens.saturating_mul(self.op.channels) < SERIAL_ELEMENTS
    }
}

impl Kernel for CpuShortConv {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(!self.is_small(), |threads| job.run(threads));
        Ok(())
    }
}

/// State of all sequences.
struct State<'a> {
    slots: &'a [i32],
    advance: Option<&'a [u32]>,
    /// A matrix of inputs for each slot.
    rows: OutputBatch<'a>,
    how: ConvState,
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedShortConv,
    simd: &'static Simd,
    x: Input<'a>,
    input_gate: Option<Input<'a>>,
    output_gate: Option<Input<'a>>,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    offsets: Option<&'a [u32]>,
    state: Option<State<'a>>,
    d: Output<'a>,
}

/// A block of channels, and the scratch of its thread.
struct Block<'s> {
    first: usize,
    count: usize,
    /// Inputs of a tile, behind those before it.
    rows: &'s mut [f32],
    gate: &'s mut [f32],
    sums: &'s mut [f32],
}

/// Floats between rows of scratch.
fn pitch(count: usize) -> usize {
    count.next_multiple_of(LANES)
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedShortConv, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use ShortConvOperand as O;
        let shape = [op.tokens, op.channels];
        let input = |view: Option<BufferRef<'a>>, operand: O, layout: Dense| {
            let view = view.ok_or(absent(operand.name(), 1))?;
            Input::new(host_bytes(view, operand.name())?, layout, shape, operand.name())
        };
        let x = input(operands.take(O::X), O::X, op.x)?;
        let input_gate = match op.input_gate {
            Some(layout) => Some(input(operands.take(O::InputGate), O::InputGate, layout)?),
            None => None,
        };
        let output_gate = match op.output_gate {
            Some(layout) => Some(input(operands.take(O::OutputGate), O::OutputGate, layout)?),
            None => None,
        };
        let weight = read(&mut operands, O::Weight, op.channels * op.width)?;
        let bias = if op.bias { Some(read(&mut operands, O::Bias, op.channels)?) } else { None };
        let offsets = match op.queries {
            QueryLengths::Offsets { .. } => Some(read(&mut operands, O::QOffsets, op.sequences + 1)?),
            QueryLengths::Each(_) => None,
        };
        let state = match op.state {
            Some(how) => Some(State::new(op, how, &mut operands)?),
            None => None,
        };
        let d = operands.take_mut(O::D).ok_or(absent(O::D.name(), 1))?;
        let d = Output::new(HostMemory::of_device_mut(DeviceId::CPU, d, O::D.name())?, op.d, shape, O::D.name())?;
        Ok(Self { op, simd, x, input_gate, output_gate, weight, bias, offsets, state, d })
    }

    /// Channels are shared among threads: whatever slots and offsets
    /// say, no element is written by two.
    fn run(&self, threads: usize) {
        let channels = self.op.channels;
        let of_thread = channels.div_ceil(2 * threads).next_multiple_of(LEAST_BLOCK);
        let of_block = of_thread.min(MOST_BLOCK);
        let blocks = 0..channels.div_ceil(of_block);
        let work = |block: usize| {
            let first = block * of_block;
            let count = of_block.min(channels - first);
            arena::with_tile(SCRATCH_ROWS * pitch(count), |scratch| self.block(first, count, scratch));
        };
        match threads {
            1 => blocks.for_each(work),
            _ => blocks.into_par_iter().with_max_len(1).for_each(work),
        }
    }

    fn block(&self, first: usize, count: usize, scratch: &mut [f32]) {
        let (op, pitch) = (self.op, pitch(count));
        let (weights, rest) = scratch.split_at_mut(op.width * pitch);
        let (bias, rest) = rest.split_at_mut(pitch);
        let (gate, rest) = rest.split_at_mut(pitch);
        let (sums, rows) = rest.split_at_mut(pitch);
        bias.fill(0.0);
        if let Some(given) = self.bias {
            bias[..count].copy_from_slice(&given[first..first + count]);
        }
        weights.fill(0.0);
        for (channel, of_channel) in self.weight[first * op.width..].chunks_exact(op.width).take(count).enumerate() {
            for (tap, &weight) in of_channel.iter().enumerate() {
                weights[tap * pitch + channel] = weight;
            }
        }
        // Lanes behind the last channel are not stored.
        rows.fill(0.0);
        let taps = Taps { weights, bias, width: op.width, pitch, silu: op.silu };
        let mut block = Block { first, count, rows, gate, sums };
        (0..op.sequences).for_each(|sequence| self.sequence(sequence, &taps, &mut block));
    }

    /// Convolves the channels of a block for one sequence.
    fn sequence(&self, sequence: usize, taps: &Taps<'_>, block: &mut Block<'_>) {
        let (token, count) = self.op.span(self.offsets, sequence);
        if count == 0 {
            return;
        }
        let (window, pitch) = (self.op.window(), taps.pitch);
        let slot = self.state.as_ref().and_then(|state| Some((state, state.slot(sequence)?)));
        for row in 0..window {
            let to = &mut block.rows[row * pitch..][..block.count];
            match &slot {
                // SAFETY: the channels of all slots belong to this thread.
                Some((state, slot)) => unsafe { state.load(self.simd, slot, row, block.first, to) },
                None => to.fill(0.0),
            }
        }
        for first in (0..count).step_by(TILE) {
            let tokens = TILE.min(count - first);
            for i in 0..tokens {
                self.input(token + first + i, block, window + i, pitch);
            }
            for i in 0..tokens {
                self.result(token + first + i, taps, block, i);
            }
            block.rows.copy_within(tokens * pitch..(tokens + window) * pitch, 0);
        }
        let Some((state, slot)) = slot else { return };
        let entering = state.advance.map_or(count, |advance| count.min(advance[sequence] as usize));
        // A row is read before it is overwritten.
        for row in 0..window {
            if row + entering < window {
                // SAFETY: as above.
                unsafe { state.load(self.simd, &slot, row + entering, block.first, &mut block.sums[..block.count]) };
            } else {
                self.input(token + entering + row - window, block, 0, pitch);
                block.sums[..block.count].copy_from_slice(&block.rows[..block.count]);
            }
            // SAFETY: as above.
            unsafe { slot.store_part(row, block.first, &block.sums[..block.count]) };
        }
    }

    /// Loads an input, with its gate, to a row of the block.
    fn input(&self, token: usize, block: &mut Block<'_>, row: usize, pitch: usize) {
        let values = &mut block.rows[row * pitch..][..block.count];
        self.x.part(self.simd, token, block.first, values);
        if let Some(gate) = &self.input_gate {
            gate.part(self.simd, token, block.first, &mut block.gate[..block.count]);
            values.iter_mut().zip(&*block.gate).for_each(|(value, gate)| *value *= gate);
            round(self.simd, self.op.x.dtype, values);
        }
    }

    /// Computes the result of a token, whose window begins at a
    /// row of the block.
    fn result(&self, token: usize, taps: &Taps<'_>, block: &mut Block<'_>, row: usize) {
        self.simd.convolve(taps, &block.rows[row * taps.pitch..], block.sums);
        let sums = &mut block.sums[..block.count];
        if let Some(gate) = &self.output_gate {
            gate.part(self.simd, token, block.first, &mut block.gate[..block.count]);
            sums.iter_mut().zip(&*block.gate).for_each(|(sum, gate)| *sum *= gate);
        }
        // SAFETY: the channels of all tokens belong to this thread.
        unsafe { self.d.store_part(token, block.first, sums) };
    }
}

impl<'a> State<'a> {
    fn new(op: &CheckedShortConv, how: ConvState, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        use ShortConvOperand as O;
        let slots = read(operands, O::Slots, op.sequences)?;
        let advance = if how.advance { Some(read(operands, O::Advance, op.sequences)?) } else { None };
        let what = O::State.name();
        let view = operands.take_mut(O::State).ok_or(absent(what, 1))?;
        let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, what)?;
        let layout = Dense::rows_of(op.x.dtype, op.channels);
        let rows = OutputBatch::new(bytes, layout, [op.window(), op.channels], how.slots, how.slot_stride, what)?;
        Ok(Self { slots, advance, rows, how })
    }

    /// The slot of a sequence, if it has one.
    fn slot(&self, sequence: usize) -> Option<Output<'_>> {
        let index = usize::try_from(self.slots[sequence]).ok().filter(|&index| index < self.how.slots)?;
        Some(self.rows.of(index))
    }

    /// Loads a row of the old state.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    unsafe fn load(&self, simd: &Simd, slot: &Output<'_>, row: usize, first: usize, to: &mut [f32]) {
        match self.how.from_zeros {
            true => to.fill(0.0),
            // SAFETY: guaranteed by the caller.
            false => unsafe { slot.load_part(simd, row, first, to) },
        }
    }
}

/// Rounds values to `dtype`.
fn round(simd: &Simd, dtype: DType, values: &mut [f32]) {
    if dtype == DType::F32 {
        return;
    }
    let mut held = [0u32; PART];
    for part in values.chunks_mut(PART) {
        let held: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut held)[..part.len() * dtype.bytes()];
        convert::from_f32(dtype, part, held);
        simd.to_f32(dtype, held, part);
    }
}

//! `short_conv`: short causal depthwise convolution. The result and
//! the state are two launches: kernels bind fewer buffers than there are
//! operands, and no result is read from an overwritten state.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_ADVANCE, FLAG_BIAS, FLAG_FROM_ZEROS, FLAG_INPUT_GATE, FLAG_OUTPUT_GATE, FLAG_Q_OFFSETS, FLAG_SILU,
    ShortConvShape, dtype_code,
};
use qgemm_hal::op::short_conv::ShortConvStep;
use qgemm_hal::{
    CheckedShortConv, Dense, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, LaunchSequence,
    LaunchStep, Operand, Operands, Operation, QueryLengths, ShortConvConfig, ShortConvLaunch, ShortConvOperand, Stream,
    Unsupported,
};

use super::dispatch::{Dispatch, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{self, Shader};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `short_conv`.
pub(super) const FAMILIES: Families<CheckedShortConv> = &[&ShortConv];

/// Kernel interface: the operands of `shaders/short_conv.wgsl`.
pub(crate) const RESULT_INTERFACE: Interface =
    Interface { name: "short_conv", bindings: "rrrrrrrrw", params_bytes: size_of::<ResultParams>() as u32 };

/// Kernel interface: the operands of `shaders/short_conv_state.wgsl`.
pub(crate) const STATE_INTERFACE: Interface =
    Interface { name: "short_conv_state", bindings: "rrrrrw", params_bytes: size_of::<StateParams>() as u32 };

/// Family name.
const NAME: &str = "short_conv";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Channels of a workgroup.
const GROUP_CHANNELS: usize = 2 * THREADS as usize;

const NUMBERS: [&str; 3] = [
    include_str!("../../shaders/generated/abi.wgsl"),
    include_str!("../../shaders/numbers.wgsl"),
    include_str!("../../shaders/half_of.wgsl"),
];
const WRITTEN: &str = include_str!("../../shaders/norm_written.wgsl");
const COMMON: &str = include_str!("../../shaders/short_conv_common.wgsl");
const RESULT: &str = include_str!("../../shaders/short_conv.wgsl");
const STATE: &str = include_str!("../../shaders/short_conv_state.wgsl");

static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| hash_of([NUMBERS[0], NUMBERS[1], NUMBERS[2], WRITTEN, COMMON, RESULT, STATE]));

/// `Params` of `shaders/short_conv.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct ResultParams {
    shape: ShortConvShape,
    first: u32,
    end: u32,
    x_row: u32,
    input_gate_row: u32,
    output_gate_row: u32,
    d_row: u32,
    slot_stride: u32,
    x_base: u32,
    weight_base: u32,
    bias_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    input_gate_base: u32,
    output_gate_base: u32,
    state_base: u32,
    d_base: u32,
}

/// `Params` of `shaders/short_conv_state.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct StateParams {
    shape: ShortConvShape,
    first: u32,
    end: u32,
    x_row: u32,
    input_gate_row: u32,
    slot_stride: u32,
    x_base: u32,
    input_gate_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    advance_base: u32,
    state_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct ShortConv;

impl Family<CheckedShortConv> for ShortConv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedShortConv, info: &DeviceInfo) -> Result<Vec<ShortConvConfig>, Unsupported> {
        part_tokens(op, info.max_buffer_bytes)?;
        let kernel = op.kernel_of(NAME, None, ShortConvStep::Result);
        let launches = if op.state.is_some() { 2 } else { 1 };
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![ShortConvConfig { kernel, launches, efficiency: 400 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedShortConv,
        _: &ShortConvLaunch,
    ) -> Result<LaunchSequence, HalError> {
        use ShortConvOperand as O;
        let shared = shared_of(device, "a convolution of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let part_tokens = part_tokens(op, device.info().max_buffer_bytes).map_err(refused)?;
        let step = |step: ShortConvStep, items: usize, operands: Vec<O>| {
            let interface = interface_of(step);
            let compiled = Compiled::new(shared, interface, interface.name.to_owned(), compose(step))?;
            let kernel = ConvKernel { compiled, shared: shared.clone(), op: *op, step, part_tokens };
            let geometry = Geometry { grid: grid(op, items), threads: THREADS, shared_bytes: 0 };
            let step = LaunchStep::new::<O>(op.kernel_of(NAME, None, step), geometry, Arc::new(kernel));
            Ok(step.bind_all(operands))
        };
        let without = |left_out: &[O]| op.operands().into_iter().filter(|o| !left_out.contains(o)).collect();
        let mut steps = vec![step(ShortConvStep::Result, part_tokens.min(op.tokens), without(&[O::Advance]))?];
        if op.state.is_some() {
            let operands = without(&[O::Weight, O::Bias, O::OutputGate, O::D]);
            steps.push(step(ShortConvStep::State, op.sequences, operands)?);
        }
        Ok(LaunchSequence::new::<O>(op.kernel_name(), steps))
    }

    fn source_hash(&self, _: &CheckedShortConv, _: &ShortConvConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn interface_of(step: ShortConvStep) -> &'static Interface {
    match step {
        ShortConvStep::State => &STATE_INTERFACE,
        ShortConvStep::All | ShortConvStep::Result => &RESULT_INTERFACE,
    }
}

/// The shader of a step.
fn compose(step: ShortConvStep) -> Shader {
    let (own, target) = match step {
        ShortConvStep::State => (STATE, "state"),
        ShortConvStep::All | ShortConvStep::Result => (RESULT, "d"),
    };
    let [abi, numbers, half_of] = NUMBERS;
    shader::compose_parts(THREADS, &[abi, numbers, half_of, &WRITTEN.replace("TARGET", target), COMMON, own])
}

/// Workgroups for `items` tokens or sequences.
fn grid(op: &CheckedShortConv, items: usize) -> [u32; 3] {
    let groups = (items * op.channels.div_ceil(GROUP_CHANNELS)) as u32;
    let x = groups.min(MAX_GROUPS);
    [x, groups.div_ceil(x), 1]
}

/// Bytes from the first to the last element of the state.
fn state_bytes(op: &CheckedShortConv) -> Option<u64> {
    let Some(state) = op.state else { return Some(0) };
    let elements = (state.slots as u64 - 1).checked_mul(state.slot_stride)?;
    elements.checked_add((op.window() * op.channels) as u64)?.checked_mul(op.x.dtype.bytes() as u64)
}

/// Tokens of a dispatch, with bindings of at most `limit` bytes.
///
/// # Errors
/// The operand that exceeds the limit with a single token.
fn part_tokens(op: &CheckedShortConv, limit: u64) -> Result<usize, Unsupported> {
    let items = op.tokens.max(op.sequences) as u64 * op.channels.div_ceil(GROUP_CHANNELS) as u64;
    if items >= 1 << 31 {
        return Err(Unsupported::new(format!("there are {items} workgroups, and kernels count in 31 bits")));
    }
    let weight = (op.channels * op.width * DType::F32.bytes()) as u64;
    let state = state_bytes(op).unwrap_or(u64::MAX);
    for (name, bytes) in [("the weight", weight), ("the state", state)] {
        if bytes > limit.saturating_sub(super::dispatch::MARGIN) {
            return Err(too_large(name, bytes, limit));
        }
    }
    let rows = [("x", Some(op.x)), ("the input gate", op.input_gate), ("the output gate", op.output_gate)];
    let rows = rows.into_iter().chain([("d", Some(op.d))]).filter_map(|(name, dense)| Some((name, dense?)));
    let mut fitting = op.tokens + op.window();
    for (name, dense) in rows {
        fitting = fitting.min(rows_that_fit(name, &dense, op.channels, limit)?);
    }
    // A dispatch also reads the inputs before its first token.
    match fitting.checked_sub(op.window()).filter(|&tokens| tokens > 0) {
        Some(tokens) => Ok(tokens),
        None => {
            let row = op.x.row_stride.saturating_mul((op.width * op.x.dtype.bytes()) as u64);
            Err(too_large(&format!("{} rows", op.width), row, limit))
        }
    }
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct ConvKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedShortConv,
    step: ShortConvStep,
    /// Tokens of a dispatch.
    part_tokens: usize,
}

impl ConvKernel {
    fn shape(&self) -> ShortConvShape {
        let op = &self.op;
        let (state, gates) = (op.state, [op.input_gate, op.output_gate].map(|gate| gate.is_some()));
        let flags = [
            (FLAG_SILU, op.silu),
            (FLAG_BIAS, op.bias),
            (FLAG_Q_OFFSETS, matches!(op.queries, QueryLengths::Offsets { .. })),
            (FLAG_FROM_ZEROS, state.is_some_and(|state| state.from_zeros)),
            (FLAG_ADVANCE, state.is_some_and(|state| state.advance)),
            (FLAG_INPUT_GATE, gates[0]),
            (FLAG_OUTPUT_GATE, gates[1]),
        ];
        ShortConvShape {
            sequences: op.sequences as u32,
            tokens: op.tokens as u32,
            most_queries: op.most_queries() as u32,
            channels: op.channels as u32,
            width: op.width as u32,
            slots: state.map_or(0, |state| state.slots as u32),
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            dtype: dtype_code(op.x.dtype),
        }
    }

    /// Rows of an operand for some tokens. Its base is of token 0.
    fn rows<'a>(
        &'a self,
        operands: &'a Operands<'a>,
        operand: ShortConvOperand,
        dense: Option<Dense>,
        tokens: Range<usize>,
    ) -> Result<(Bound<'a>, u32), HalError> {
        let written = operand == ShortConvOperand::D;
        let row = dense.map_or(0, |dense| stride(self.op.tokens, dense.row_stride));
        let bytes = dense.map_or(0..0, |dense| {
            let width = dense.dtype.bytes();
            let first = tokens.start * dense.row_stride as usize;
            // `part_tokens` found the extent in range.
            let elements = dense.extent(tokens.len(), self.op.channels).unwrap_or(0) as usize;
            first * width..(first + elements) * width
        });
        let width = self.op.x.dtype.bytes();
        let touched = Touched { what: operand.name(), view: operands.get(operand), bytes, width };
        let (binding, base) = if written { touched.bind_written(&self.shared) } else { touched.bind(&self.shared) }?;
        Ok(((binding, base.wrapping_sub((tokens.start as u32).wrapping_mul(row))), row))
    }

    /// `count` contiguous elements of an operand, if there is one.
    fn values<'a>(
        &'a self,
        operands: &'a Operands<'a>,
        operand: ShortConvOperand,
        width: usize,
        count: usize,
    ) -> Touched<'a> {
        let view = operands.get(operand);
        let bytes = if view.is_some() { 0..count * width } else { 0..0 };
        Touched { what: operand.name(), view, bytes, width }
    }

    /// The dispatch of the result of `tokens`.
    fn result<'a>(
        &'a self,
        tokens: Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, ResultParams>, HalError> {
        use ShortConvOperand as O;
        let (op, shared) = (&self.op, &self.shared);
        let words = size_of::<u32>();
        let read = tokens.start.saturating_sub(op.window())..tokens.end;
        let state = state_bytes(op).unwrap_or(0) as usize / op.x.dtype.bytes();
        let (x, weight, bias, q_offsets, slots, input_gate, output_gate, of_state, d);
        let mut p = ResultParams {
            shape: self.shape(),
            first: tokens.start as u32,
            end: tokens.end as u32,
            slot_stride: op.state.map_or(0, |state| stride(state.slots, state.slot_stride)),
            ..ResultParams::default()
        };
        ((x, p.x_base), p.x_row) = self.rows(operands, O::X, Some(op.x), read.clone())?;
        ((input_gate, p.input_gate_base), p.input_gate_row) = self.rows(operands, O::InputGate, op.input_gate, read)?;
        ((output_gate, p.output_gate_base), p.output_gate_row) =
            self.rows(operands, O::OutputGate, op.output_gate, tokens.clone())?;
        ((d, p.d_base), p.d_row) = self.rows(operands, O::D, Some(op.d), tokens.clone())?;
        (weight, p.weight_base) = self.values(operands, O::Weight, words, op.channels * op.width).bind(shared)?;
        (bias, p.bias_base) = self.values(operands, O::Bias, words, op.channels).bind(shared)?;
        (q_offsets, p.q_offsets_base) = self.values(operands, O::QOffsets, words, op.sequences + 1).bind(shared)?;
        (slots, p.slots_base) = self.values(operands, O::Slots, words, op.sequences).bind(shared)?;
        (of_state, p.state_base) = self.values(operands, O::State, op.x.dtype.bytes(), state).bind(shared)?;
        let bindings = vec![x, weight, bias, q_offsets, slots, input_gate, output_gate, of_state, d];
        Ok(Dispatch { params: p, bindings, grid: grid(op, tokens.len()) })
    }

    /// The dispatch of the states whose last entering token is
    /// one of `tokens`.
    fn state<'a>(
        &'a self,
        tokens: Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, StateParams>, HalError> {
        use ShortConvOperand as O;
        let (op, shared) = (&self.op, &self.shared);
        let words = size_of::<u32>();
        let read = tokens.start.saturating_sub(op.window())..tokens.end;
        let state = state_bytes(op).unwrap_or(0) as usize / op.x.dtype.bytes();
        let (x, q_offsets, slots, advance, input_gate, of_state);
        let mut p = StateParams {
            shape: self.shape(),
            first: tokens.start as u32,
            end: tokens.end as u32,
            slot_stride: op.state.map_or(0, |state| stride(state.slots, state.slot_stride)),
            ..StateParams::default()
        };
        ((x, p.x_base), p.x_row) = self.rows(operands, O::X, Some(op.x), read.clone())?;
        ((input_gate, p.input_gate_base), p.input_gate_row) = self.rows(operands, O::InputGate, op.input_gate, read)?;
        (q_offsets, p.q_offsets_base) = self.values(operands, O::QOffsets, words, op.sequences + 1).bind(shared)?;
        (slots, p.slots_base) = self.values(operands, O::Slots, words, op.sequences).bind(shared)?;
        (advance, p.advance_base) = self.values(operands, O::Advance, words, op.sequences).bind(shared)?;
        (of_state, p.state_base) = self.values(operands, O::State, op.x.dtype.bytes(), state).bind_written(shared)?;
        let bindings = vec![x, q_offsets, slots, advance, input_gate, of_state];
        Ok(Dispatch { params: p, bindings, grid: grid(op, op.sequences) })
    }
}

impl Kernel for ConvKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let firsts = (0..self.op.tokens).step_by(self.part_tokens);
        let parts = firsts.map(|first| first..self.op.tokens.min(first + self.part_tokens));
        if self.step == ShortConvStep::State {
            let dispatches: Vec<_> = parts.map(|part| self.state(part, &operands)).collect::<Result<_, _>>()?;
            return submit(&self.shared, &STATE_INTERFACE, &self.compiled, &dispatches);
        }
        let dispatches: Vec<_> = parts.map(|part| self.result(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &RESULT_INTERFACE, &self.compiled, &dispatches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_cut_into_bindings() {
        let rows = Dense::rows_of(DType::F16, 1000);
        let op = CheckedShortConv {
            sequences: 1,
            tokens: 100,
            queries: QueryLengths::Each(100),
            channels: 1000,
            width: 3,
            x: rows,
            d: rows,
            input_gate: None,
            output_gate: None,
            bias: false,
            silu: false,
            state: None,
        };
        assert_eq!(part_tokens(&op, 1 << 27).expect("fits"), 100);
        // 32 rows of 2000 bytes fit; two of them are before the first token.
        assert_eq!(part_tokens(&op, 65_536).expect("cut"), 30);
        // The weight has 12,000 bytes, and a binding begins up to a margin earlier.
        let why = part_tokens(&op, 12_000).expect_err("no room for the margin").why;
        assert!(why.contains("weight"), "{why}");
        assert_eq!(grid(&op, 100), [800, 1, 1]);
        assert_eq!(grid(&op, 10_000), [65_535, 2, 1]);
    }
}

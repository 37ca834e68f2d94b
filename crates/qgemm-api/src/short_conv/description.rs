//! Convolution problem: the builder [`ShortConv`] and its validation
//! into a [`CheckedShortConv`].

use qgemm_formats::DType;
use qgemm_hal::op::short_conv::{ConvState, LEAST_WIDTH, MOST_WIDTH};
use qgemm_hal::{CheckedShortConv, Dense, QueryLengths};

use crate::attention::{Queries, check_count};
use crate::error::Error;
use crate::operand::{Stored, StoredRows, WIDE_ACCESS};

/// Most sequences, tokens, channels and slots.
const MOST: usize = i32::MAX as usize;

/// Short causal depthwise convolution over the tokens of sequences, for
/// [`Context::plan_short_conv`]: the convolution before the recurrence
/// of Mamba-2 and Qwen3-Next, and LFM2's token mixer.
///
/// ```text
/// u[t, c] = input_gate[t, c] · x[t, c]
/// D[t, c] = output_gate[t, c] · act(bias[c] + Σ_{j<w} weight[c, j] · u[t − (w − 1) + j, c])
/// ```
///
/// X and D are `[tokens, channels]`, the weight is f32 `[channels, w]`.
/// Inputs before the first token of a sequence are those of its state, or
/// 0. The [state](Self::state) of a sequence is its last `w − 1` inputs `u`.
///
/// Arithmetic is f32, rounded once. `u` is rounded to the type of X, in
/// which the state stores it: results do not depend on how tokens are cut
/// into steps.
///
/// Defaults: no gates, no bias, no activation, no state, no gaps between
/// rows.
///
/// ```
/// use qgemm_api::{Context, DType, Queries, ShortConv, ShortConvArgs};
///
/// // One sequence of one channel: each result is the input plus twice the one before.
/// let ctx = Context::open("cpu")?;
/// let conv = |tokens| ShortConv::new(DType::F32, 1, 2, Queries::each(1, tokens)).state(1);
/// let weight = ctx.upload(&[2.0f32, 1.0])?; // oldest input first
/// let slots = ctx.upload(&[0i32])?; // the sequence has slot 0
/// let mut state = ctx.upload(&[10.0f32])?; // [slots, width - 1, channels]
/// let mut run = |x: &[f32]| -> Result<Vec<f32>, qgemm_api::Error> {
///     let plan = ctx.plan_short_conv(&conv(x.len()))?;
///     let (x, mut d) = (ctx.upload(x)?, ctx.allocate(x.len() * 4)?);
///     let args = ShortConvArgs::new(&x, &weight, &mut d).state(&mut state).slots(&slots);
///     plan.run(&ctx.default_stream(), args)?;
///     ctx.download(&d)
/// };
/// assert_eq!(run(&[1.0, 2.0, 3.0])?, [21.0, 4.0, 7.0]);
/// assert_eq!(run(&[4.0])?, [10.0]); // the state was 3
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_short_conv`]: crate::Context::plan_short_conv
#[derive(Clone, Debug)]
pub struct ShortConv {
    dtype: DType,
    channels: usize,
    width: usize,
    queries: Queries,
    x_row: Option<u64>,
    d_row: Option<u64>,
    /// Row stride of each gate that there is.
    gates: [Option<Option<u64>>; 2],
    alignment: usize,
    bias: bool,
    silu: bool,
    slots: Option<usize>,
    slot_stride: Option<u64>,
    state_alignment: usize,
    from_zeros: bool,
    advance: bool,
}

impl ShortConv {
    /// Convolution of `channels` channels by kernels of `width` taps: 2,
    /// 3 or 4. X, D, gates and state have the type `dtype`. Tokens are
    /// the queries of their sequences; ragged ones are found by
    /// [`ShortConvArgs::q_offsets`](crate::ShortConvArgs::q_offsets).
    pub fn new(dtype: DType, channels: usize, width: usize, queries: Queries) -> Self {
        Self {
            dtype,
            channels,
            width,
            queries,
            x_row: None,
            d_row: None,
            gates: [None; 2],
            alignment: WIDE_ACCESS,
            bias: false,
            silu: false,
            slots: None,
            slot_stride: None,
            state_alignment: WIDE_ACCESS,
            from_zeros: false,
            advance: false,
        }
    }

    /// Adds an f32 bias per channel.
    pub fn bias(mut self) -> Self {
        self.bias = true;
        self
    }

    /// SiLU after the convolution and the bias.
    pub fn silu(mut self) -> Self {
        self.silu = true;
        self
    }

    /// Multiplies X by a gate `[tokens, channels]` first (LFM2's B).
    pub fn input_gate(mut self) -> Self {
        self.gates[0] = self.gates[0].or(Some(None));
        self
    }

    /// As [`input_gate`](Self::input_gate), with this row stride in
    /// elements.
    pub fn input_gate_row_stride(mut self, elements: u64) -> Self {
        self.gates[0] = Some(Some(elements));
        self
    }

    /// Multiplies the result by a gate `[tokens, channels]` (LFM2's C).
    pub fn output_gate(mut self) -> Self {
        self.gates[1] = self.gates[1].or(Some(None));
        self
    }

    /// As [`output_gate`](Self::output_gate), with this row stride in
    /// elements.
    pub fn output_gate_row_stride(mut self, elements: u64) -> Self {
        self.gates[1] = Some(Some(elements));
        self
    }

    /// State: `[slots, width − 1, channels]` in the type of X, oldest
    /// input first. A run reads and writes the slots of its sequences
    /// in place.
    ///
    /// [`ShortConvArgs::slots`](crate::ShortConvArgs::slots) has the slot
    /// of each sequence. A sequence with a negative slot, or one that does
    /// not exist, begins with zeros, and nothing is written. No two
    /// sequences of a run may have the same slot. Sequences without
    /// tokens leave their slot as it is.
    pub fn state(mut self, slots: usize) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Elements from one slot of the state to the next, where slots
    /// are parts of larger records. `(width − 1) · channels` by
    /// default.
    pub fn slot_stride(mut self, elements: u64) -> Self {
        self.slot_stride = Some(elements);
        self
    }

    /// Sequences begin with zeros, as new ones do: the state is
    /// written, but not read. Without a state they always do.
    pub fn from_zeros(mut self) -> Self {
        self.from_zeros = true;
        self
    }

    /// Only the first tokens of each sequence enter the state, as many as
    /// [`ShortConvArgs::advance`](crate::ShortConvArgs::advance) says. All
    /// results are computed.
    ///
    /// Guessed tokens are verified by a run that advances by 0, and a
    /// second run advances by the number that was accepted.
    pub fn advance(mut self) -> Self {
        self.advance = true;
        self
    }

    /// Row stride of X, in elements.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x_row = Some(elements);
        self
    }

    /// Row stride of D, in elements.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d_row = Some(elements);
        self
    }

    /// Alignment of the addresses of X, D and the gates in every run, in
    /// bytes. 16 by default, which all buffers of a context have; less is
    /// slower.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Alignment of the address of the state, in bytes; 16 by default.
    pub fn state_alignment(mut self, bytes: usize) -> Self {
        self.state_alignment = bytes;
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(super) fn check(&self) -> Result<CheckedShortConv, Error> {
        let &Self { dtype, channels, width, queries, bias, silu, .. } = self;
        let (sequences, tokens, lengths) = queries.parts();
        let (QueryLengths::Each(most) | QueryLengths::Offsets { most }) = lengths;
        let counts = [
            ("sequences", sequences, 0, MOST),
            ("tokens", tokens, 0, MOST),
            ("queries of a sequence", most, 0, MOST),
            ("channels", channels, 1, MOST),
            ("kernel width", width, LEAST_WIDTH, MOST_WIDTH),
        ];
        counts.into_iter().try_for_each(|(name, got, least, most)| check_count(name, got, least, most))?;
        let rows = |name, stride: Option<u64>| -> Result<Dense, Error> {
            Stored { name, rows: tokens, columns: channels, dtype, alignment: self.alignment }.check(stride)
        };
        let [input_gate, output_gate] = self.gates;
        Ok(CheckedShortConv {
            sequences,
            tokens,
            queries: lengths,
            channels,
            width,
            x: rows("X", self.x_row)?,
            d: rows("D", self.d_row)?,
            input_gate: input_gate.map(|stride| rows("input gate", stride)).transpose()?,
            output_gate: output_gate.map(|stride| rows("output gate", stride)).transpose()?,
            bias,
            silu,
            state: self.check_state()?,
        })
    }

    /// Validates the layout of the state.
    fn check_state(&self) -> Result<Option<ConvState>, Error> {
        let &Self { dtype, channels, width, from_zeros, advance, .. } = self;
        let Some(slots) = self.slots else { return Ok(None) };
        check_count("slots", slots, 1, MOST)?;
        let (operand, columns) = ("state", (width - 1) * channels);
        let stored =
            StoredRows { name: operand, rows: slots, columns, width: dtype.bytes(), alignment: self.state_alignment };
        let (slot_stride, are_slots_aligned) = stored.check(self.slot_stride)?;
        let row_bytes = channels * dtype.bytes();
        let aligned16 = are_slots_aligned && row_bytes.is_multiple_of(WIDE_ACCESS);
        Ok(Some(ConvState { slots, slot_stride, aligned16, from_zeros, advance }))
    }
}

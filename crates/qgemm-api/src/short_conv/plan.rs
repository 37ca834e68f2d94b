//! [`ShortConvPlan`]: the ready kernels of one convolution.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{BufferMut, BufferRef, CheckedShortConv, Dense, ShortConvOperand, Stream};
use qgemm_sched::Preferences;

use super::description::ShortConv;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded};
use crate::setters::setters;

/// Ready kernels of one [`ShortConv`], from
/// [`Context::plan_short_conv`]. Its text lists the launches of a run.
pub type ShortConvPlan = Planned<CheckedShortConv>;

/// Operands of one run of a [`ShortConvPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ShortConvArgs<'a> {
    /// Inputs, `[tokens, channels]`.
    pub x: BufferRef<'a>,
    /// Weights, f32 `[channels, width]`, oldest input first. They must
    /// not be outputs of unfinished work on the stream.
    pub weight: BufferRef<'a>,
    /// Written: the results, `[tokens, channels]`.
    pub d: BufferMut<'a>,
    /// Bias, f32 `[channels]`, as the weights.
    pub bias: Option<BufferRef<'a>>,
    /// Gate of the inputs, `[tokens, channels]`.
    pub input_gate: Option<BufferRef<'a>>,
    /// Gate of the results, `[tokens, channels]`.
    pub output_gate: Option<BufferRef<'a>>,
    /// Offsets of the tokens of each sequence, and their end, for
    /// [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// The state, `[slots, width − 1, channels]`, read and written:
    /// see [`ShortConv::state`].
    pub state: Option<BufferMut<'a>>,
    /// Slot of each sequence, where there is a state: i32.
    pub slots: Option<BufferRef<'a>>,
    /// Number of tokens of each sequence that enter the state, for
    /// [`ShortConv::advance`]: u32. More than there are means all.
    pub advance: Option<BufferRef<'a>>,
}

impl<'a> ShortConvArgs<'a> {
    /// Operands of every run.
    pub fn new(x: impl Into<BufferRef<'a>>, weight: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        let (bias, input_gate, output_gate, q_offsets) = (None, None, None, None);
        let (x, weight, d) = (x.into(), weight.into(), d.into());
        Self { x, weight, d, bias, input_gate, output_gate, q_offsets, state: None, slots: None, advance: None }
    }

    setters! {
        /// With the bias.
        bias: BufferRef,
        /// With the gate of the inputs.
        input_gate: BufferRef,
        /// With the gate of the results.
        output_gate: BufferRef,
        /// With the offsets of the tokens.
        q_offsets: BufferRef,
        /// With the state.
        state: BufferMut,
        /// With the slot of each sequence.
        slots: BufferRef,
        /// With the numbers of tokens that enter the state.
        advance: BufferRef,
    }
}

impl Context {
    /// Chooses a kernel for `conv` and makes it ready. A known problem
    /// costs a lookup, as with [`Context::plan`]. [`ShortConv`] has an
    /// example.
    ///
    /// # Errors
    /// When the convolution is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_short_conv(&self, conv: &ShortConv) -> Result<ShortConvPlan, Error> {
        Planned::new(self, conv.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_short_conv`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the convolution is invalid.
    pub fn explain_short_conv(&self, conv: &ShortConv) -> Result<PlanRecord, Error> {
        explain(self, &conv.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedShortConv);

impl Recorded for CheckedShortConv {}

impl Bound for CheckedShortConv {
    fn wanted(&self, operand: ShortConvOperand, used: bool) -> Wanted {
        use ShortConvOperand as O;
        let rows = |dense: &Dense| Extent::of(dense, self.tokens, self.channels);
        let given = |name, extent: Extent, why| Wanted::optional(name, used.then_some(extent), why);
        let values = |element: ElementType, count: usize| Extent::of_values(element, count);
        let (word, number) = (ElementType::Int32, ElementType::from(DType::F32));
        let has_state = "the convolution has a state";
        match operand {
            O::X => Wanted::always("x", rows(&self.x)),
            O::Weight => Wanted::always("weight", values(number, self.channels * self.width)),
            O::D => Wanted::always("d", rows(&self.d)),
            O::Bias => given("bias", values(number, self.channels), "the convolution adds one"),
            O::InputGate => {
                Wanted::optional("input gate", self.input_gate.as_ref().map(rows), "the inputs have a gate")
            }
            O::OutputGate => {
                Wanted::optional("output gate", self.output_gate.as_ref().map(rows), "the results have a gate")
            }
            O::QOffsets => given("q offsets", values(word, self.sequences + 1), "tokens are found by offsets"),
            O::Slots => given("slots", values(word, self.sequences), has_state),
            O::Advance => given("advance", values(word, self.sequences), "entering tokens are counted"),
            O::State => {
                let extent = self.state.map(|state| {
                    // `ShortConv::check` has bounded the extent.
                    let elements = (state.slots - 1) * state.slot_stride as usize + self.window() * self.channels;
                    let alignment = if state.aligned16 { WIDE_ACCESS } else { self.x.dtype.bytes() };
                    Extent::new(self.x.dtype, elements * self.x.dtype.bytes(), alignment)
                });
                Wanted::optional("state", extent, has_state)
            }
        }
    }
}

impl ShortConvPlan {
    /// Submits the convolution to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture it.
    /// Offsets, slots and numbers of entering tokens are read on the
    /// device at run time.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: ShortConvArgs<'_>) -> Result<(), Error> {
        use ShortConvOperand as O;
        let mut run = self.start(stream)?;
        run.read(O::X, args.x)?;
        run.read(O::Weight, args.weight)?;
        let read = [
            (O::Bias, args.bias),
            (O::InputGate, args.input_gate),
            (O::OutputGate, args.output_gate),
            (O::QOffsets, args.q_offsets),
            (O::Slots, args.slots),
            (O::Advance, args.advance),
        ];
        read.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.write(O::State, args.state)?;
        run.write(O::D, args.d)?;
        run.launch(stream)
    }
}

//! `short_conv`: short causal depthwise convolution over the tokens of
//! sequences, with the last inputs as state.

use std::fmt;
use std::str::FromStr;

use qgemm_formats::DType;

use super::attention::QueryLengths;
use super::{Dense, Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Least kernel width.
pub const LEAST_WIDTH: usize = 2;
/// Largest kernel width.
pub const MOST_WIDTH: usize = 4;

/// State of a convolution: for each slot the last `width − 1` inputs,
/// oldest first, `[slots, width − 1, channels]` in the type of X.
///
/// A sequence reads and writes the slot that the slot indices give it.
/// With an index outside the slots it starts from zeros, and nothing
/// is written. Sequences without tokens leave their slot unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvState {
    /// Slots; at least 1.
    pub slots: usize,
    /// Slot stride in elements.
    pub slot_stride: u64,
    /// Whether every row of a slot is 16-byte aligned.
    pub aligned16: bool,
    /// Whether sequences start from zeros: the slots are written, but
    /// not read.
    pub from_zeros: bool,
    /// Whether counts of entering tokens are given. Otherwise all
    /// tokens enter the state.
    pub advance: bool,
}

/// Short causal depthwise convolution, validated by the API. For token
/// `t` of a sequence and channel `c`, with `w` the kernel width:
///
/// ```text
/// u[t, c] = round(input_gate[t, c] · x[t, c])
/// s[t, c] = bias[c] + Σ_{j<w} weight[c, j] · u[t − (w − 1) + j, c]
/// D[t, c] = output_gate[t, c] · act(s[t, c])
/// ```
///
/// Inputs before the first token are the state's, or 0. Arithmetic is
/// f32, in ascending order of `j`, rounded once. `u` is rounded to the
/// type of X, which the state has, too: the bits do not depend on how
/// tokens are cut into steps.
///
/// Tokens outside all sequences, and tokens of a sequence beyond the
/// maximum, are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedShortConv {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Tokens of each sequence.
    pub queries: QueryLengths,
    /// Channels; at least 1.
    pub channels: usize,
    /// Kernel width: [`LEAST_WIDTH`] to [`MOST_WIDTH`].
    pub width: usize,
    /// X, `[tokens, channels]`.
    pub x: Dense,
    /// D, `[tokens, channels]`, in the type of X.
    pub d: Dense,
    /// Factor of X before the convolution, in the type of X.
    pub input_gate: Option<Dense>,
    /// Factor of the result, in the type of X.
    pub output_gate: Option<Dense>,
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether the activation is SiLU; otherwise there is none.
    pub silu: bool,
    /// The state, if sequences have one.
    pub state: Option<ConvState>,
}

operands! {
    /// Operands of `short_conv`.
    pub enum ShortConvOperand {
        /// The inputs.
        X: "x" Read,
        /// Weights, f32 `[channels, width]`.
        Weight: "the weight" Constant,
        /// Bias, f32 `[channels]`.
        Bias: "the bias" Constant,
        /// Input gate.
        InputGate: "the input gate" Read,
        /// Output gate.
        OutputGate: "the output gate" Read,
        /// Token offsets: u32 `[sequences + 1]`.
        QOffsets: "the offsets of the tokens" Read,
        /// Slot of each sequence: i32.
        Slots: "the slots" Read,
        /// Number of tokens that enter the state of each
        /// sequence: u32.
        Advance: "the numbers of entering tokens" Read,
        /// The state.
        State: "the state" Accumulate,
        /// The result.
        D: "d" Write,
    }
}

/// Outputs of a `short_conv` kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShortConvStep {
    /// Result and state.
    All,
    /// The result.
    Result,
    /// The state.
    State,
}

impl ShortConvStep {
    /// All steps.
    pub const ALL: [ShortConvStep; 3] = [ShortConvStep::All, ShortConvStep::Result, ShortConvStep::State];

    const fn name(self) -> &'static str {
        match self {
            ShortConvStep::All => "all",
            ShortConvStep::Result => "result",
            ShortConvStep::State => "state",
        }
    }
}

impl fmt::Display for ShortConvStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ShortConvStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|step| step.name() == text);
        found.ok_or_else(|| format!("`{text}` is no part of short_conv"))
    }
}

spec! {
    /// Kernel identity keys of `short_conv`. Width, gates and
    /// activation are run-time parameters.
    pub struct ShortConvSpec {
        /// Outputs of the kernel.
        step: ShortConvStep,
        /// Element type of X, D, the gates and the state.
        x: DType,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShortConvConfig {
    /// The kernel, or the first of several.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShortConvLaunch {
    /// The config.
    pub config: ShortConvConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedShortConv {
    /// Name in tables and messages: `short_conv_4_bf16`.
    pub fn kernel_name(&self) -> String {
        format!("short_conv_{}_{}", self.width, self.x.dtype)
    }

    /// The kernel of `family` that computes `step`.
    pub fn kernel_of(&self, family: &'static str, variant: Option<crate::Variant>, step: ShortConvStep) -> KernelId {
        KernelId::new(family, variant, Spec::ShortConv(ShortConvSpec { step, x: self.x.dtype }))
    }

    /// Inputs of a sequence that the state keeps.
    pub fn window(&self) -> usize {
        self.width - 1
    }

    /// Maximum tokens of a sequence.
    pub fn most_queries(&self) -> usize {
        match self.queries {
            QueryLengths::Each(count) | QueryLengths::Offsets { most: count } => count,
        }
    }

    /// Tokens of sequence `index`: the first, and their number.
    /// `offsets` are clamped to the tokens.
    pub fn span(&self, offsets: Option<&[u32]>, index: usize) -> (usize, usize) {
        let most = self.most_queries();
        let Some(offsets) = offsets else { return (index * most, most) };
        let [first, end] = [offsets[index], offsets[index + 1]].map(|offset| self.tokens.min(offset as usize));
        (first, end.saturating_sub(first).min(most))
    }

    /// Whether rows of all operands are 16-byte aligned.
    pub fn is_aligned(&self) -> bool {
        let gates = self.input_gate.iter().chain(&self.output_gate);
        self.state.is_none_or(|state| state.aligned16)
            && [&self.x, &self.d].into_iter().chain(gates).all(|dense| dense.aligned16)
    }
}

impl Operation for CheckedShortConv {
    type Operand = ShortConvOperand;
    type Config = ShortConvConfig;
    type Plan = ShortConvLaunch;

    fn operands(&self) -> Vec<ShortConvOperand> {
        use ShortConvOperand as O;
        let optional = [
            (self.bias, O::Bias),
            (self.input_gate.is_some(), O::InputGate),
            (self.output_gate.is_some(), O::OutputGate),
            (matches!(self.queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (self.state.is_some(), O::Slots),
            (self.state.is_some_and(|state| state.advance), O::Advance),
            (self.state.is_some(), O::State),
        ];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [O::X, O::Weight].into_iter().chain(given).chain([O::D]).collect()
    }

    fn traffic(&self) -> f64 {
        let row = (self.channels * self.x.dtype.bytes()) as f64;
        let gates = self.input_gate.iter().chain(&self.output_gate).count();
        let windows = self.state.map_or(0, |state| if state.from_zeros { 1 } else { 2 });
        let of_tokens = (2 + gates) as f64 * self.tokens as f64;
        let of_states = windows as f64 * (self.sequences * self.window()) as f64;
        let constants = self.channels * (self.width + usize::from(self.bias)) * DType::F32.bytes();
        row * (of_tokens + of_states) + constants as f64
    }

    fn macs(&self) -> f64 {
        self.tokens as f64 * (self.channels * self.width) as f64
    }

    fn describe(&self) -> String {
        let Self { sequences, tokens, channels, width, x, .. } = self;
        let parts = [
            (self.bias, ", bias"),
            (self.silu, ", SiLU"),
            (self.input_gate.is_some(), ", input gate"),
            (self.output_gate.is_some(), ", output gate"),
            (self.state.is_some(), ", with state"),
        ];
        let parts: String = parts.into_iter().filter(|(is_there, _)| *is_there).map(|(_, text)| text).collect();
        format!("{tokens} tokens of {sequences} sequences x {channels}, width {width}, in {}{parts}", x.dtype)
    }

    fn is_nothing(&self) -> bool {
        self.tokens == 0 || self.sequences == 0 || self.most_queries() == 0
    }

    fn config(plan: &ShortConvLaunch) -> &ShortConvConfig {
        &plan.config
    }

    fn estimate(plan: &ShortConvLaunch) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &ShortConvLaunch) -> KernelId {
        plan.config.kernel
    }

    fn plan_name(&self, _: &str) -> String {
        self.kernel_name()
    }

    fn noop_config(&self) -> Result<ShortConvConfig, Unsupported> {
        let kernel = self.kernel_of("noop", None, ShortConvStep::All);
        Ok(ShortConvConfig { kernel, launches: 1, efficiency: 1000 })
    }
}

memory_bound!(CheckedShortConv, ShortConvConfig, ShortConvLaunch, |config| config.launches);

#[cfg(test)]
mod tests {
    use super::*;

    fn op() -> CheckedShortConv {
        let rows = Dense::rows_of(DType::F16, 64);
        CheckedShortConv {
            sequences: 3,
            tokens: 10,
            queries: QueryLengths::Offsets { most: 4 },
            channels: 64,
            width: 4,
            x: rows,
            d: rows,
            input_gate: None,
            output_gate: Some(rows),
            bias: true,
            silu: false,
            state: None,
        }
    }

    #[test]
    fn operands_and_bytes_are_those_in_use() {
        use ShortConvOperand as O;
        let op = op();
        assert_eq!(op.operands(), [O::X, O::Weight, O::Bias, O::OutputGate, O::QOffsets, O::D]);
        assert_eq!(op.traffic(), (3 * 10 * 128 + 64 * 5 * 4) as f64);
        let state = ConvState { slots: 9, slot_stride: 192, aligned16: true, from_zeros: false, advance: true };
        let with_state = CheckedShortConv { state: Some(state), ..op };
        assert_eq!(with_state.operands()[5..], [O::Slots, O::Advance, O::State, O::D]);
        assert_eq!(with_state.traffic() - op.traffic(), (2 * 9 * 128) as f64);
        assert!(op.is_aligned() && !CheckedShortConv { d: Dense { aligned16: false, ..op.d }, ..op }.is_aligned());
    }

    #[test]
    fn spans_stay_within_the_tokens() {
        let op = op();
        let offsets = [0, 3, 3, 50];
        assert_eq!([0, 1, 2].map(|i| op.span(Some(&offsets), i)), [(0, 3), (3, 0), (3, 4)]);
        assert_eq!(op.span(Some(&[7, 2, 0, 0]), 0), (7, 0));
        let each = CheckedShortConv { queries: QueryLengths::Each(2), ..op };
        assert_eq!(each.span(None, 2), (4, 2));
    }
}

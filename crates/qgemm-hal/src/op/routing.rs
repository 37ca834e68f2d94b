//! `routing`: router top-k and expert lists.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::str::FromStr;

use super::dense::Dense;
use super::gemm::WorkspaceLayout;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};
use crate::operands::Portion;

/// Maximum tokens: the kernels' counters have room for every slot.
pub const MOST_TOKENS: usize = 1 << 20;
/// Maximum experts.
pub const MOST_EXPERTS: usize = 1024;
/// Maximum experts of a token.
pub const MOST_TOP_K: usize = 32;
/// Words of the status: code, token, slot,
/// and the bits of the id.
pub const STATUS_WORDS: usize = 4;
/// [`RoutingOperand::Status`]: every slot has an expert.
pub const STATUS_FINE: u32 = 0;
/// [`RoutingOperand::Status`]: a given id is not a valid expert.
pub const STATUS_BAD_ID: u32 = 1;
/// [`RoutingOperand::Status`]: a token has fewer eligible experts than `top_k`.
pub const STATUS_TOO_FEW: u32 = 2;
/// Id of a slot whose expert is not local
/// ([`CheckedRouting::local`]). It is in no list and no fault.
pub const ELSEWHERE: i32 = -2;

/// Kernel flag: every token uses the last expert
/// ([`CheckedRouting::shared`]). It is part of the
/// prelude of top-k kernels.
pub const FLAG_SHARED: u32 = 1 << 19;

/// Workspace bytes after the reserved part: one u32 for each chunk
/// (first slot without an expert); with `lists`, also one for each
/// expert of every chunk, and one for each expert.
pub const fn workspace_bytes(chunks: usize, experts: usize, lists: bool) -> usize {
    let counts = if lists { (chunks + 1) * experts } else { 0 };
    WorkspaceLayout::RESERVED + (chunks + counts) * size_of::<u32>()
}

/// Source of each token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingSource {
    /// Logits `[tokens][experts]`, for top-k.
    Logits(Dense),
    /// Ids from the caller, `top_k` for each token.
    /// Only lists are built.
    Ids,
}

/// Scoring function of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scoring {
    /// Softmax over the token's logits that are not NaN.
    #[default]
    Softmax,
    /// `1 / (1 + exp(-x))`, independent for each expert.
    Sigmoid,
    /// `sqrt(ln(1 + exp(x)))`, independent for each expert. +∞ scores
    /// +∞, which makes renormalized weights NaN.
    SqrtSoftplus,
}

impl Scoring {
    /// All.
    pub const ALL: [Scoring; 3] = [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Scoring::Softmax => "softmax",
            Scoring::Sigmoid => "sigmoid",
            Scoring::SqrtSoftplus => "sqrt_softplus",
        }
    }
}

/// Groups of consecutive experts. A token uses the
/// experts of few groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Number of groups; a divisor of the experts.
    pub groups: usize,
    /// Groups that a token may use.
    pub chosen: usize,
}

/// Router top-k; validated by the API.
///
/// The *score* of an expert is [`Scoring`] of its logit, in
/// f32. Its *key* is the logit itself, or score plus bias
/// when there is a bias or there are groups. A token
/// gets the `top_k` experts with the largest keys in descending order;
/// among equal keys, the lower id wins. NaN is never chosen.
///
/// With groups, only the `chosen` groups with the largest sums of
/// their two best keys (or their only key) remain. A group
/// with a NaN sum or without a key is dropped.
///
/// An expert's weight is its score times `scale`, with `renormalize`
/// divided by the sum of the token's chosen scores (at least
/// `f32::MIN_POSITIVE`). Slots without an expert have id −1 and weight 0.
///
/// With local experts only, ids count from the first of them, and
/// lists are those of local experts. Slots of the others have the
/// id [`ELSEWHERE`] and weight 0.
///
/// The lists hold slots, `token · top_k + place`, by expert
/// in ascending order. A slot with an invalid id is in
/// no list. Entries after the last list are `u32::MAX`.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRouting {
    /// Tokens; 1 to [`MOST_TOKENS`] wherever kernels are chosen, as 0 tokens take none.
    pub tokens: usize,
    /// Experts; 1 to [`MOST_EXPERTS`].
    pub experts: usize,
    /// Experts of a token; 1 to [`MOST_TOP_K`], and at most `experts`.
    pub top_k: usize,
    /// Source of the experts.
    pub from: RoutingSource,
    /// Scoring function.
    pub scoring: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub renormalize: bool,
    /// Scale of every weight; finite.
    pub scale: f32,
    /// Whether keys have a bias.
    pub bias: bool,
    /// Groups of experts, if any.
    pub groups: Option<ExpertGroups>,
    /// Whether offsets, counts and rows are written; always for given ids.
    pub lists: bool,
    /// Shared expert: the last expert has no logit, and
    /// takes the last slot of every token with
    /// weight 1. Not for given ids.
    pub shared: bool,
    /// Local experts, whose weights this device has: all of
    /// `0..experts`, or a part of them. All for given ids.
    pub local: Range<usize>,
}

operands! {
    /// Operands of `routing`.
    pub enum RoutingOperand {
        /// Logits `[tokens][experts]`.
        Logits: "the logits" Read,
        /// Given ids: i32 `[tokens][top_k]`.
        GivenIds: "the given ids" Read,
        /// Bias of the keys: one f32 for each expert.
        Bias: "the bias" Read,
        /// Chosen experts: i32 `[tokens][top_k]`.
        Ids: "the ids" Write,
        /// Their weights: f32 `[tokens][top_k]`.
        Weights: "the weights" Write,
        /// List offsets: u32, one more than local experts.
        Offsets: "the offsets" Write,
        /// List lengths: u32 for each local expert.
        Counts: "the counts" Write,
        /// Concatenated lists: one u32 for each slot.
        Rows: "the rows" Write,
        /// First fault: see [`STATUS_WORDS`].
        Status: "the status" Write,
        /// Chunk counters.
        Workspace: "the workspace" Accumulate,
    }
}

/// Step of `routing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingStep {
    /// Top-k, plus counts when lists are built. For few tokens
    /// it also builds the lists.
    TopK,
    /// Builds the lists of few ids.
    Lists,
    /// Counts ids chunk by chunk.
    Count,
    /// Prefix sum over the chunk counts; finds the first fault.
    Scan,
    /// Writes the lists.
    Scatter,
}

impl RoutingStep {
    /// All steps.
    pub const ALL: [RoutingStep; 5] =
        [RoutingStep::TopK, RoutingStep::Lists, RoutingStep::Count, RoutingStep::Scan, RoutingStep::Scatter];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            RoutingStep::TopK => "top_k",
            RoutingStep::Lists => "lists",
            RoutingStep::Count => "count",
            RoutingStep::Scan => "scan",
            RoutingStep::Scatter => "scatter",
        }
    }
}

impl fmt::Display for RoutingStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RoutingStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|step| step.name() == text);
        found.ok_or_else(|| format!("`{text}` is no step of a routing"))
    }
}

spec! {
    /// Kernel identity keys of `routing`.
    pub struct RoutingSpec {
        /// The step.
        step: RoutingStep,
        /// Maximum experts supported.
        experts: u32,
    }
}

/// Candidate kernels of a family, with what the
/// scheduler ranks them by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingConfig {
    /// The first kernel.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingLaunches {
    /// The config.
    pub config: RoutingConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedRouting {
    /// The operation for a portion of the tokens.
    pub fn of_portion(&self, portion: Option<Portion>) -> Self {
        Self { tokens: portion.map_or(self.tokens, |portion| portion.rows(self.tokens)), ..self.clone() }
    }

    /// Slots: `top_k` for each token.
    pub fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Experts that have a logit.
    pub fn logit_experts(&self) -> usize {
        self.experts - usize::from(self.shared)
    }

    /// Experts of a token that top-k chooses.
    pub fn chosen(&self) -> usize {
        self.top_k - usize::from(self.shared)
    }

    /// Number of local experts, which have lists.
    pub fn local_experts(&self) -> usize {
        self.local.len()
    }

    /// The logits, if experts are chosen from logits.
    pub fn logits(&self) -> Option<&Dense> {
        match &self.from {
            RoutingSource::Logits(dense) => Some(dense),
            RoutingSource::Ids => None,
        }
    }

    /// Whether top-k compares logits. They order experts as the
    /// scores do, without rounding.
    pub fn compares_logits(&self) -> bool {
        !self.bias && self.groups.is_none()
    }

    /// Status code for a slot without an expert.
    pub fn fault(&self) -> u32 {
        match self.from {
            RoutingSource::Logits(_) => STATUS_TOO_FEW,
            RoutingSource::Ids => STATUS_BAD_ID,
        }
    }
}

/// Plan cache key: floats are finite and are
/// compared by their bits.
impl Eq for CheckedRouting {}

impl Hash for CheckedRouting {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.tokens, self.experts, self.top_k, self.from, self.scoring).hash(state);
        (self.renormalize, self.scale.to_bits(), self.bias, self.groups, self.lists, self.shared).hash(state);
        self.local.hash(state);
    }
}

impl Operation for CheckedRouting {
    type Operand = RoutingOperand;
    type Config = RoutingConfig;
    type Plan = RoutingLaunches;
    const WORKSPACE: Option<RoutingOperand> = Some(RoutingOperand::Workspace);

    fn operands(&self) -> Vec<RoutingOperand> {
        use RoutingOperand as O;
        let from_logits = self.logits().is_some();
        let optional = [
            (from_logits, O::Logits),
            (!from_logits, O::GivenIds),
            (self.bias, O::Bias),
            (from_logits, O::Ids),
            (from_logits, O::Weights),
            (self.lists, O::Offsets),
            (self.lists, O::Counts),
            (self.lists, O::Rows),
            (true, O::Status),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let (slots, experts) = (self.slots() as f64, self.logit_experts() as f64);
        let chosen = match self.logits() {
            Some(logits) => self.tokens as f64 * experts * logits.dtype.bytes() as f64 + slots * 8.0,
            None => slots * 4.0,
        };
        let bias = if self.bias { experts * 4.0 } else { 0.0 };
        let lists = if self.lists { slots * 4.0 + self.local_experts() as f64 * 8.0 } else { 0.0 };
        chosen + bias + lists + (STATUS_WORDS * 4) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { tokens, experts, top_k, local, .. } = self;
        let all = format!("{tokens} tokens to {top_k} of {experts} experts");
        if local.len() == *experts { all } else { format!("{all}, {} to {} local", local.start, local.end - 1) }
    }

    fn is_nothing(&self) -> bool {
        self.tokens == 0
    }

    fn config(plan: &RoutingLaunches) -> &RoutingConfig {
        &plan.config
    }

    fn estimate(plan: &RoutingLaunches) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &RoutingLaunches) -> KernelId {
        plan.config.kernel
    }

    fn workspace_bytes(&self, plan: &RoutingLaunches) -> usize {
        plan.config.workspace_bytes
    }

    fn noop_config(&self) -> Result<RoutingConfig, Unsupported> {
        let step = if self.logits().is_some() { RoutingStep::TopK } else { RoutingStep::Lists };
        let spec = RoutingSpec { step, experts: self.experts as u32 };
        let kernel = KernelId::new("noop", None, Spec::Routing(spec));
        // Large operations have a workspace, so that higher
        // layers can test with one.
        let workspace_bytes = if self.tokens > 64 { 1024 } else { 0 };
        Ok(RoutingConfig { kernel, launches: 1, workspace_bytes, efficiency: 1000 })
    }
}

memory_bound!(CheckedRouting, RoutingConfig, RoutingLaunches, |config| config.launches);

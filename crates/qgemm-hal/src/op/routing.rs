//! `routing`: which experts each token goes to and with what weight, and for each expert the list of its tokens.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use super::dense::Dense;
use super::gemm::WorkspaceLayout;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, spec};
use crate::operands::Portion;

/// Most tokens of a routing: what kernels count with leaves room for every slot.
pub const MOST_TOKENS: usize = 1 << 20;
/// Most experts.
pub const MOST_EXPERTS: usize = 1024;
/// Most experts of a token.
pub const MOST_TOP_K: usize = 16;
/// Words of the status: code, token, slot, and the id as bits.
pub const STATUS_WORDS: usize = 4;
/// [`RoutingOperand::Status`]: every slot has an expert.
pub const STATUS_FINE: u32 = 0;
/// [`RoutingOperand::Status`]: a given id is no expert's.
pub const STATUS_BAD_ID: u32 = 1;
/// [`RoutingOperand::Status`]: a token's logits leave fewer experts than it should have.
pub const STATUS_TOO_FEW: u32 = 2;

/// The flag of kernels that choose: the last expert is every token's ([`CheckedRouting::shared`]). It stands in their prelude.
pub const FLAG_SHARED: u32 = 1 << 19;

/// Bytes of a workspace that holds, behind what is reserved, a u32 for each of `chunks` chunks (the first slot in it without an
/// expert), and with `lists` also one for each of `experts` experts of every chunk, and for each of all.
pub const fn workspace_bytes(chunks: usize, experts: usize, lists: bool) -> usize {
    let counts = if lists { (chunks + 1) * experts } else { 0 };
    WorkspaceLayout::RESERVED + (chunks + counts) * size_of::<u32>()
}

/// Where the experts of each token come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingSource {
    /// Logits, tokens × experts: the best are chosen.
    Logits(Dense),
    /// The caller's ids, `top_k` a token; only lists are made of them.
    Ids,
}

/// What a logit becomes before it is compared and weighed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scoring {
    /// Its share of the token's exponentials, over the logits that are numbers.
    #[default]
    Softmax,
    /// `1 / (1 + exp(-x))`, each for itself.
    Sigmoid,
}

impl Scoring {
    /// Both.
    pub const ALL: [Scoring; 2] = [Scoring::Softmax, Scoring::Sigmoid];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Scoring::Softmax => "softmax",
            Scoring::Sigmoid => "sigmoid",
        }
    }
}

/// Experts in groups of neighbours, of which a token uses few.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Groups; they divide the experts.
    pub groups: usize,
    /// Groups that a token may use.
    pub chosen: usize,
}

/// The experts of each token; validated by the API.
///
/// The *score* of an expert is what [`Scoring`] makes of its logit, in f32. Its *key* is the logit itself, or, with a bias or
/// groups, its score plus its bias. A token gets the `top_k` experts of the largest keys, in that order; of equal keys the lower id.
/// A NaN is never chosen. With groups, those `chosen` remain whose two best keys (the one, where there is one) have the largest
/// sums; a group whose sum is NaN, or that has no key, does not. An expert's weight is its score, divided by the sum of the token's
/// chosen scores (`f32::MIN_POSITIVE` at least) if `renormalize`, times `scale`. Where a token has fewer experts, the other
/// slots have id −1 and weight 0.
///
/// The lists name slots, `token · top_k + place`, by expert, in ascending order. A slot whose id is no expert's is in none; the entries
/// behind the last list are `u32::MAX`.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRouting {
    /// Tokens; 1 to [`MOST_TOKENS`] wherever kernels are chosen, as 0 tokens take none.
    pub tokens: usize,
    /// Experts; 1 to [`MOST_EXPERTS`].
    pub experts: usize,
    /// Experts of a token; 1 to [`MOST_TOP_K`], at most as many as there are.
    pub top_k: usize,
    /// What they are chosen from.
    pub from: RoutingSource,
    /// What a logit becomes.
    pub scoring: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub renormalize: bool,
    /// Factor of every weight; finite.
    pub scale: f32,
    /// Whether keys have a bias.
    pub bias: bool,
    /// The groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Whether offsets, counts and rows are written; always of given ids.
    pub lists: bool,
    /// Whether the last expert is every token's: it has no logit, and the last slot of each token, with weight 1. Not of given ids.
    pub shared: bool,
}

operands! {
    /// What `routing` reads and writes.
    pub enum RoutingOperand {
        /// A row a token, a column an expert.
        Logits: "the logits" Read,
        /// Ids that are given: `top_k` i32 a token.
        GivenIds: "the given ids" Read,
        /// What is added to scores where they are compared: an f32 an expert.
        Bias: "the bias" Read,
        /// The experts of each token: `top_k` i32.
        Ids: "the ids" Write,
        /// Their weights: `top_k` f32 a token.
        Weights: "the weights" Write,
        /// Where the list of each expert begins, and where the last ends: u32.
        Offsets: "the offsets" Write,
        /// How long the list of each expert is: u32.
        Counts: "the counts" Write,
        /// The lists, one behind the other: a u32 a slot.
        Rows: "the rows" Write,
        /// What was wrong first: see [`STATUS_WORDS`].
        Status: "the status" Write,
        /// Counts of parts of the tokens.
        Workspace: "the workspace" Accumulate,
    }
}

/// What a kernel of `routing` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingStep {
    /// Chooses experts, and counts them where lists are made; for few tokens it also makes these.
    TopK,
    /// Makes the lists of few ids.
    Lists,
    /// Counts ids, chunk by chunk.
    Count,
    /// Adds the counts of the chunks up, and finds what was wrong first.
    Scan,
    /// Writes the lists.
    Scatter,
}

impl RoutingStep {
    /// All of them.
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
    /// What tells the kernels of `routing` apart.
    pub struct RoutingSpec {
        /// What the kernel does.
        step: RoutingStep,
        /// Most experts that it serves.
        experts: u32,
    }
}

/// The kernels of a family for one operation, as the scheduler sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingConfig {
    /// The first kernel.
    pub kernel: KernelId,
    /// Kernels that a run launches.
    pub launches: u32,
    /// Bytes of workspace; 0 where nothing is kept in it.
    pub workspace_bytes: usize,
    /// Share of the device's bandwidth that they reach, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingLaunches {
    /// The configuration.
    pub config: RoutingConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedRouting {
    /// The operation for a portion of its tokens.
    pub fn of_portion(&self, portion: Option<Portion>) -> Self {
        Self { tokens: portion.map_or(self.tokens, |portion| portion.rows(self.tokens)), ..self.clone() }
    }

    /// Places for experts: `top_k` a token.
    pub fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Experts that have a logit.
    pub fn logit_experts(&self) -> usize {
        self.experts - usize::from(self.shared)
    }

    /// Experts of a token that are chosen.
    pub fn chosen(&self) -> usize {
        self.top_k - usize::from(self.shared)
    }

    /// The logits, where experts are chosen from some.
    pub fn logits(&self) -> Option<&Dense> {
        match &self.from {
            RoutingSource::Logits(dense) => Some(dense),
            RoutingSource::Ids => None,
        }
    }

    /// Whether experts are compared by their logits, which order them as their scores do and are not rounded.
    pub fn compares_logits(&self) -> bool {
        !self.bias && self.groups.is_none()
    }

    /// What [`RoutingOperand::Status`] says of a slot without an expert.
    pub fn fault(&self) -> u32 {
        match self.from {
            RoutingSource::Logits(_) => STATUS_TOO_FEW,
            RoutingSource::Ids => STATUS_BAD_ID,
        }
    }
}

/// Descriptions are keys of plans: factors are finite, and are told apart by their bits.
impl Eq for CheckedRouting {}

impl Hash for CheckedRouting {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.tokens, self.experts, self.top_k, self.from, self.scoring).hash(state);
        (self.renormalize, self.scale.to_bits(), self.bias, self.groups, self.lists, self.shared).hash(state);
    }
}

impl Operation for CheckedRouting {
    const NAME: &'static str = "routing";
    type Operand = RoutingOperand;
    type Config = RoutingConfig;
    type Plan = RoutingLaunches;

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
        let lists = if self.lists { slots * 4.0 + experts * 8.0 } else { 0.0 };
        chosen + bias + lists + (STATUS_WORDS * 4) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }
}

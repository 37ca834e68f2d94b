//! `linear_attention`: attention with a recurrent state (gated delta
//! rule, KDA, Mamba-2).

use std::hash::{Hash, Hasher};

use qgemm_formats::DType;

use super::attention::{HeadRows, QueryLengths};
use super::{Operation, memory_bound, operands};
use crate::axis::axis;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Divisor of head dimensions.
pub const DIM_STEP: usize = 16;
/// Largest head dimension of keys and of values.
pub const MOST_DIM: usize = 256;

/// Granularity of the decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecayPer {
    /// One number a head: gated delta rule, Mamba-2.
    Head,
    /// One number a key feature: KDA.
    Feature,
}

/// Source of the log-decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecaySource {
    /// Given: f32.
    Log,
    /// `−exp(A_log) · softplus(a + dt_bias)`, with `a` of this type.
    Softplus(DType),
}

/// Decay of the state before each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedDecay {
    /// Granularity.
    pub per: DecayPer,
    /// Source of the log-decay.
    pub source: DecaySource,
    /// Token stride of the log-decay, or of `a`, in elements.
    pub token_stride: u64,
}

impl CheckedDecay {
    /// Element type of the log-decay, or of `a`.
    pub const fn dtype(&self) -> DType {
        match self.source {
            DecaySource::Log => DType::F32,
            DecaySource::Softplus(dtype) => dtype,
        }
    }

    /// Whether the log-decay is made of `a`.
    pub const fn is_made(&self) -> bool {
        matches!(self.source, DecaySource::Softplus(_))
    }
}

/// Source of β.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BetaSource {
    /// Given.
    Given,
    /// Sigmoid of the operand.
    Sigmoid,
    /// Time step of Mamba-2: `softplus(a + dt_bias)` of the decay,
    /// without an operand of its own.
    TimeStep,
}

/// Factor β of the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedBeta {
    /// Source of β.
    pub source: BetaSource,
    /// Token stride of the operand, in elements.
    pub token_stride: u64,
}

/// Key head of each value head `h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyHeadOrder {
    /// `h · key_heads / heads`.
    Grouped,
    /// `h % key_heads`.
    Tiled,
}

/// Linear attention; validated by the API. A head of values has a
/// state S of `v_dim × qk_dim`. For each token, with the key head of
/// [`KeyHeadOrder`]:
///
/// ```text
/// S ← S diag(α)                      α = exp(min(g, 0))
/// u = β (v − S k)                    without the delta term u = β v
/// S ← S + u kᵀ
/// d = scale · S q + skip · v
/// ```
///
/// Arithmetic and state are f32. `α = 0` (`g = −∞`) makes S zero,
/// whatever it holds. Results do not depend on other sequences, and
/// where kernels process token by token, not on how tokens are spread
/// over runs.
///
/// A sequence without tokens leaves its state as it is. Slot indices
/// outside the slots denote no state: S begins as zero and is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedLinearAttention {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Tokens of each sequence.
    pub queries: QueryLengths,
    /// Heads of values and states; at least 1.
    pub heads: usize,
    /// Heads of queries and keys; a divisor of `heads`.
    pub key_heads: usize,
    /// Key head of each value head.
    pub key_head_order: KeyHeadOrder,
    /// Features of a query and a key: a multiple of [`DIM_STEP`]
    /// up to [`MOST_DIM`].
    pub qk_dim: usize,
    /// Features of a value, as `qk_dim`.
    pub v_dim: usize,
    /// Element type of Q, K, V and D.
    pub dtype: DType,
    /// Q.
    pub q: HeadRows,
    /// K.
    pub k: HeadRows,
    /// V.
    pub v: HeadRows,
    /// D; rows do not overlap.
    pub d: HeadRows,
    /// Decay of the state; `None` for α = 1.
    pub decay: Option<CheckedDecay>,
    /// Whether there is a delta term.
    pub delta: bool,
    /// β; `None` for β = 1.
    pub beta: Option<CheckedBeta>,
    /// Whether a multiple of V is added to D.
    pub skip: bool,
    /// Epsilon of the L2 norm of queries and keys:
    /// `x / sqrt(Σ x² + epsilon)`. `None` without norm.
    pub norm_epsilon: Option<f32>,
    /// Scale of the queries.
    pub scale: f32,
    /// Whether results may not depend on how tokens are spread over
    /// runs, so that no kernel processes tokens in chunks.
    pub batch_invariant: bool,
    /// Most workspace bytes. Kernels that need more for all tokens at once
    /// process them in segments.
    pub max_workspace: usize,
    /// Slots of states.
    pub slots: usize,
    /// Elements from one slot to the next; a multiple of 4.
    pub slot_stride: u64,
    /// Whether slot indices are given; otherwise sequence `i` has slot `i`.
    pub slot_indices: bool,
    /// Whether S begins as zero instead of as stored.
    pub from_zero: bool,
    /// Whether each sequence says how many of its tokens enter
    /// the stored state; otherwise all do.
    pub advance: bool,
    /// Whether each sequence says how many of its first tokens
    /// have no output.
    pub pending: bool,
}

operands! {
    /// Operands of `linear_attention`.
    pub enum LinearAttentionOperand {
        /// Queries, `[tokens, key_heads, qk_dim]`.
        Q: "the queries" Read,
        /// Keys, `[tokens, key_heads, qk_dim]`.
        K: "the keys" Read,
        /// Values, `[tokens, heads, v_dim]`.
        V: "the values" Read,
        /// Log-decay or `a`, `[tokens, heads]` or `[tokens, heads, qk_dim]`.
        Decay: "the decay" Read,
        /// Logarithm of the decay rate: f32 `[heads]`.
        ALog: "the logarithms of the decay rates" Read,
        /// Summand of `a`: f32 `[heads]` or `[heads, qk_dim]`.
        DtBias: "the time step bias" Read,
        /// β, or what its sigmoid makes β: f32 `[tokens, heads]`.
        Beta: "beta" Read,
        /// Factor of V in D: f32 `[heads]`.
        Skip: "the skip factors" Read,
        /// States, which live across runs: f32 `[slots, heads, v_dim, qk_dim]`.
        States: "the states" Accumulate,
        /// Token offsets: u32 `[sequences + 1]`.
        QOffsets: "the offsets of the tokens" Read,
        /// Slot of each sequence: i32.
        Slots: "the slot indices" Read,
        /// Tokens of each sequence that enter its stored state: u32.
        Advance: "the advances" Read,
        /// First tokens of each sequence without output: u32.
        Pending: "the pending tokens" Read,
        /// Results, `[tokens, heads, v_dim]`.
        D: "d" Write,
        /// Decays, and index operands together.
        Workspace: "the workspace" Accumulate,
    }
}

axis! {
    /// Kernel step of `linear_attention`.
    pub enum LinearAttentionStep: "step of linear attention" {
        /// Decays, and index operands together.
        Gather: "gather",
        /// Recurrence over tokens.
        Recur: "recur",
        /// Matrices of the tokens of each chunk.
        Matrices: "matrices",
        /// Recurrence over chunks.
        Chunks: "chunks",
        /// Matrices of the tokens of each chunk, with a decay for each feature.
        FeatureMatrices: "feature_matrices",
        /// Recurrence over chunks, with a decay for each feature.
        FeatureChunks: "feature_chunks",
    }
}

spec! {
    /// Kernel identity keys of `linear_attention`. Sizes, decay and
    /// delta term are run-time parameters.
    pub struct LinearAttentionSpec {
        /// Kernel step.
        step: LinearAttentionStep,
        /// Element type of Q, K, V and D.
        x: DType,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttentionConfig {
    /// The kernel of the recurrence.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
    /// Tokens that a step of the recurrence processes. With more than 1,
    /// bits depend on how tokens are spread over runs.
    pub step_tokens: u32,
    /// Seconds of the longest sequence's dependent steps.
    pub chain_seconds: f64,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttentionPlan {
    /// The config.
    pub config: LinearAttentionConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedLinearAttention {
    /// Name in tables and messages: `linear_attention_bf16`.
    pub fn kernel_name(&self) -> String {
        format!("linear_attention_{}", self.dtype)
    }

    /// The kernel of `family` for `step`.
    pub fn kernel_of(
        &self,
        family: &'static str,
        variant: Option<crate::Variant>,
        step: LinearAttentionStep,
    ) -> KernelId {
        KernelId::new(family, variant, Spec::LinearAttention(LinearAttentionSpec { step, x: self.dtype }))
    }

    /// Maximum tokens of a sequence.
    pub fn most_tokens(&self) -> usize {
        match self.queries {
            QueryLengths::Each(count) | QueryLengths::Offsets { most: count } => count,
        }
    }

    /// Whether β has an operand.
    pub fn reads_beta(&self) -> bool {
        self.beta.is_some_and(|beta| beta.source != BetaSource::TimeStep)
    }

    /// Key head of a value head.
    pub fn key_head(&self, head: usize) -> usize {
        match self.key_head_order {
            KeyHeadOrder::Grouped => head / (self.heads / self.key_heads),
            KeyHeadOrder::Tiled => head % self.key_heads,
        }
    }

    /// Elements of a state.
    pub fn state_len(&self) -> usize {
        self.v_dim * self.qk_dim
    }

    /// Decays of a token: one for each head, or for each of its key
    /// features; 0 without decay.
    pub fn token_decays(&self) -> usize {
        self.heads * self.head_decays()
    }

    /// Decays of a token's head.
    pub fn head_decays(&self) -> usize {
        match self.decay.map(|decay| decay.per) {
            None => 0,
            Some(DecayPer::Head) => 1,
            Some(DecayPer::Feature) => self.qk_dim,
        }
    }
}

/// Plan cache key: floats are finite and are
/// compared by their bits.
impl Eq for CheckedLinearAttention {}

impl Hash for CheckedLinearAttention {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.sequences, self.tokens, self.queries, self.dtype).hash(state);
        (self.heads, self.key_heads, self.key_head_order, self.qk_dim, self.v_dim).hash(state);
        (self.q, self.k, self.v, self.d).hash(state);
        (self.decay, self.delta, self.beta, self.skip).hash(state);
        (self.scale.to_bits(), self.norm_epsilon.map(f32::to_bits)).hash(state);
        (self.batch_invariant, self.max_workspace).hash(state);
        (self.slots, self.slot_stride, self.slot_indices, self.from_zero, self.advance, self.pending).hash(state);
    }
}

impl Operation for CheckedLinearAttention {
    type Operand = LinearAttentionOperand;
    type Config = LinearAttentionConfig;
    type Plan = LinearAttentionPlan;
    const WORKSPACE: Option<LinearAttentionOperand> = Some(LinearAttentionOperand::Workspace);

    fn operands(&self) -> Vec<LinearAttentionOperand> {
        use LinearAttentionOperand as O;
        let is_made = self.decay.is_some_and(|decay| decay.is_made());
        let optional = [
            (true, O::Q),
            (true, O::K),
            (true, O::V),
            (self.decay.is_some(), O::Decay),
            (is_made, O::ALog),
            (is_made, O::DtBias),
            (self.reads_beta(), O::Beta),
            (self.skip, O::Skip),
            (true, O::States),
            (matches!(self.queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (self.slot_indices, O::Slots),
            (self.advance, O::Advance),
            (self.pending, O::Pending),
            (true, O::D),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let (width, heads) = (self.dtype.bytes(), self.heads);
        let rows = 2 * (self.key_heads * self.qk_dim + heads * self.v_dim) * width;
        let decays = self.token_decays() * self.decay.map_or(0, |decay| decay.dtype().bytes());
        let beta = if self.reads_beta() { heads * DType::F32.bytes() } else { 0 };
        let passes = if self.from_zero { 1 } else { 2 };
        let state = passes * heads * self.state_len() * DType::F32.bytes();
        self.tokens as f64 * (rows + decays + beta) as f64 + self.sequences as f64 * state as f64
    }

    fn macs(&self) -> f64 {
        let products = if self.delta { 3 } else { 2 };
        self.tokens as f64 * (products * self.heads * self.state_len()) as f64
    }

    fn describe(&self) -> String {
        let Self { sequences, tokens, heads, key_heads, qk_dim, v_dim, dtype, .. } = self;
        let decay = match self.decay.map(|decay| decay.per) {
            None => "no decay",
            Some(DecayPer::Head) => "decay a head",
            Some(DecayPer::Feature) => "decay a feature",
        };
        let delta = if self.delta { ", delta rule" } else { "" };
        format!(
            "{tokens} tokens of {sequences} sequences x {key_heads} key heads x {qk_dim}, {heads} heads x {v_dim} in \
             {dtype}, {decay}{delta}"
        )
    }

    fn is_nothing(&self) -> bool {
        self.tokens == 0 || self.sequences == 0 || self.most_tokens() == 0
    }

    fn config(plan: &LinearAttentionPlan) -> &LinearAttentionConfig {
        &plan.config
    }

    fn estimate(plan: &LinearAttentionPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &LinearAttentionPlan) -> KernelId {
        plan.config.kernel
    }

    fn workspace_bytes(&self, plan: &LinearAttentionPlan) -> usize {
        plan.config.workspace_bytes
    }

    fn plan_name(&self, _: &str) -> String {
        self.kernel_name()
    }

    fn noop_config(&self) -> Result<LinearAttentionConfig, Unsupported> {
        let kernel = self.kernel_of("noop", None, LinearAttentionStep::Recur);
        Ok(LinearAttentionConfig { efficiency: 1000, ..LinearAttentionConfig::of_tokens(kernel) })
    }
}

impl LinearAttentionConfig {
    /// One launch that processes token by token, at half of the
    /// bandwidth.
    pub fn of_tokens(kernel: KernelId) -> Self {
        Self { kernel, launches: 1, workspace_bytes: 0, efficiency: 500, step_tokens: 1, chain_seconds: 0.0 }
    }
}

memory_bound!(
    CheckedLinearAttention,
    LinearAttentionConfig,
    LinearAttentionPlan,
    |config| config.launches,
    chain config.chain_seconds
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_and_written_once() {
        use LinearAttentionOperand as O;
        let rows = |heads: u64| HeadRows { token_stride: heads * 64, head_stride: 64, aligned: true };
        let op = CheckedLinearAttention {
            sequences: 3,
            tokens: 6,
            queries: QueryLengths::Each(2),
            heads: 4,
            key_heads: 2,
            key_head_order: KeyHeadOrder::Grouped,
            qk_dim: 64,
            v_dim: 64,
            dtype: DType::BF16,
            q: rows(2),
            k: rows(2),
            v: rows(4),
            d: rows(4),
            decay: Some(CheckedDecay { per: DecayPer::Head, source: DecaySource::Log, token_stride: 4 }),
            delta: true,
            beta: Some(CheckedBeta { source: BetaSource::Given, token_stride: 4 }),
            skip: false,
            norm_epsilon: None,
            scale: 1.0,
            batch_invariant: false,
            max_workspace: 0,
            slots: 8,
            slot_stride: 4 * 64 * 64,
            slot_indices: false,
            from_zero: false,
            advance: false,
            pending: false,
        };
        assert_eq!(op.operands(), [O::Q, O::K, O::V, O::Decay, O::Beta, O::States, O::D]);
        let state = 3 * 4 * 64 * 64 * 4;
        assert_eq!(op.traffic(), (6 * (2 * (2 + 4) * 64 * 2 + 16 + 16) + 2 * state) as f64);
        let of_zero = CheckedLinearAttention { from_zero: true, ..op };
        assert_eq!(op.traffic() - of_zero.traffic(), state as f64);
        let made =
            CheckedDecay { per: DecayPer::Feature, source: DecaySource::Softplus(DType::F16), token_stride: 256 };
        let made = CheckedLinearAttention { decay: Some(made), delta: false, ..op };
        assert!(made.operands().starts_with(&[O::Q, O::K, O::V, O::Decay, O::ALog, O::DtBias, O::Beta]));
        assert_eq!((op.token_decays(), made.token_decays()), (4, 256));
        assert_eq!(made.macs(), op.macs() * 2.0 / 3.0);
        let step = CheckedBeta { source: BetaSource::TimeStep, token_stride: 0 };
        assert!(!CheckedLinearAttention { beta: Some(step), ..op }.operands().contains(&O::Beta));
        let tiled = CheckedLinearAttention { key_head_order: KeyHeadOrder::Tiled, ..op };
        assert_eq!(
            [0, 1, 2, 3].map(|head| (op.key_head(head), tiled.key_head(head))),
            [(0, 0), (0, 1), (1, 0), (1, 1)]
        );
        assert!(CheckedLinearAttention { tokens: 0, ..op }.is_nothing() && !op.is_nothing());
    }
}

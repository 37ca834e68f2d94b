//! Linear-attention problem: the builder [`LinearAttention`] and its
//! validation into a [`CheckedLinearAttention`].

use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::{
    BetaSource, CheckedBeta, CheckedDecay, DIM_STEP, DecayPer, DecaySource, KeyHeadOrder, MOST_DIM,
};
use qgemm_hal::{CheckedLinearAttention, HeadRows};

use crate::attention::{HeadsOf, Keys, MOST_HEADS, Queries, addressing, check_count};
use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// Most slots.
const MOST_SLOTS: usize = i32::MAX as usize;
/// Default limit of the workspace, in bytes.
const MAX_WORKSPACE: usize = 256 << 20;
/// Elements of a vector access to states.
const STATE_VECTOR: u64 = 4;

/// Decay of the state of a [`LinearAttention`]: α = exp(g).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decay {
    per: DecayPer,
    source: DecaySource,
}

impl Decay {
    /// A log-decay g for each head, f32 `[tokens, heads]`: gated delta
    /// rule, Mamba-2. Numbers above 0 count as 0; −∞ makes the state
    /// zero.
    pub fn per_head() -> Self {
        Self { per: DecayPer::Head, source: DecaySource::Log }
    }

    /// A log-decay for each key feature, f32 `[tokens, heads, key dim]`:
    /// KDA.
    pub fn per_feature() -> Self {
        Self { per: DecayPer::Feature, source: DecaySource::Log }
    }

    /// The log-decay is `−exp(A_log) · softplus(a + dt_bias)`.
    ///
    /// A run takes `a`, of type `dtype`, in place of the log-decay,
    /// A_log, f32 `[heads]`, and dt_bias, f32 `[heads]` or
    /// `[heads, key dim]`
    /// ([`LinearAttentionArgs::made_decay`](crate::LinearAttentionArgs::made_decay)).
    pub fn softplus(self, dtype: DType) -> Self {
        Self { source: DecaySource::Softplus(dtype), ..self }
    }
}

/// Linear attention with a recurrent state, for
/// [`Context::plan_linear_attention`]: gated delta rule (Qwen3-Next),
/// KDA (Kimi Linear), Mamba-2.
///
/// A value head has a state S of `v_dim × key dim` in f32. For each
/// token, with the query and key of head `h · key_heads / heads`:
///
/// ```text
/// S ← S diag(α)                      decay along keys, α = exp(g)
/// u = β (v − S k)                    without the delta term u = β v
/// S ← S + u kᵀ
/// d = scale · S q + skip · v
/// ```
///
/// States stay in device memory, f32 `[slots, heads, v_dim, key dim]`:
/// a run reads them, and writes them in place. Sequence `i` has slot `i`,
/// or the one that [`slot_indices`](Self::slot_indices) say. Each slot
/// must belong to at most one sequence of a run.
///
/// Results have the same bits in every run, whatever other sequences
/// there are. Many tokens may be processed in chunks by matrix
/// instructions; [`batch_invariant`](Self::batch_invariant) promises that
/// bits do not depend on how a sequence's tokens are spread over runs, either.
///
/// Defaults: no decay, the delta rule, β = 1, scale `1 / √key dim`,
/// states are read.
///
/// ```
/// use qgemm_api::{Context, DType, Decay, LinearAttention, LinearAttentionArgs, Queries};
///
/// // Two tokens of one sequence. The second has the key of the first,
/// // and replaces its value.
/// let ctx = Context::open("cpu")?;
/// let dim = 16;
/// let attention = LinearAttention::new(DType::F32, 1, dim, Queries::each(1, 2), 1)
///     .decay(Decay::per_head())
///     .scale(1.0);
/// let plan = ctx.plan_linear_attention(&attention)?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let mut keys = vec![0.0f32; 2 * dim];
/// (keys[0], keys[dim]) = (1.0, 1.0);
/// let values = [vec![3.0f32; dim], vec![5.0; dim]].concat();
/// let (k, v, g) = (ctx.upload(&keys)?, ctx.upload(&values)?, ctx.upload(&[0.0f32, -1.0])?);
/// let mut states = ctx.allocate(dim * dim * 4)?; // zeros
/// let mut d = ctx.allocate(2 * dim * 4)?;
/// let args = LinearAttentionArgs::new(&k, &k, &v, &mut states, &mut d).decay(&g).workspace(&mut workspace);
/// plan.run(&ctx.default_stream(), args)?;
/// let d: Vec<f32> = ctx.download(&d)?;
/// assert!(d[..dim] == [3.0; 16] && d[dim..].iter().all(|d| (d - 5.0).abs() < 1e-6));
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_linear_attention`]: crate::Context::plan_linear_attention
#[derive(Clone, Debug)]
pub struct LinearAttention {
    dtype: DType,
    heads: usize,
    key_heads: usize,
    key_head_order: KeyHeadOrder,
    qk_dim: usize,
    v_dim: usize,
    queries: Queries,
    slots: usize,
    slot_stride: Option<u64>,
    slot_indices: bool,
    decay: Option<Decay>,
    decay_stride: Option<u64>,
    delta: bool,
    beta: Option<BetaSource>,
    beta_stride: Option<u64>,
    skip: bool,
    norm_epsilon: Option<f32>,
    scale: Option<f32>,
    batch_invariant: bool,
    max_workspace: usize,
    from_zero: bool,
    advance: bool,
    pending: bool,
    q: Option<[u64; 2]>,
    k: Option<[u64; 2]>,
    v: Option<[u64; 2]>,
    d: Option<[u64; 2]>,
    alignment: usize,
}

impl LinearAttention {
    /// Attention of `heads` heads of `head_dim` features in `dtype`,
    /// with room for the states of `slots` sequences.
    ///
    /// Q, K, V and D are `[tokens, heads, head_dim]`. Head dimensions
    /// are multiples of 16 up to 256. Without slots, no state is read
    /// or written. With 0 tokens the plan launches nothing.
    pub fn new(dtype: DType, heads: usize, head_dim: usize, queries: Queries, slots: usize) -> Self {
        Self {
            dtype,
            heads,
            key_heads: heads,
            key_head_order: KeyHeadOrder::Grouped,
            qk_dim: head_dim,
            v_dim: head_dim,
            queries,
            slots,
            slot_stride: None,
            slot_indices: false,
            decay: None,
            decay_stride: None,
            delta: true,
            beta: None,
            beta_stride: None,
            skip: false,
            norm_epsilon: None,
            scale: None,
            batch_invariant: false,
            max_workspace: MAX_WORKSPACE,
            from_zero: false,
            advance: false,
            pending: false,
            q: None,
            k: None,
            v: None,
            d: None,
            alignment: WIDE_ACCESS,
        }
    }

    /// Heads of queries and keys, a divisor of the heads: value heads
    /// share them in adjacent groups (Mamba-2: groups of B and C).
    pub fn key_heads(mut self, heads: usize) -> Self {
        self.key_heads = heads;
        self
    }

    /// Value head `h` has key head `h % key_heads`, as in GGUF files of
    /// Qwen3.5. By default adjacent heads share one.
    pub fn tiled_key_heads(mut self) -> Self {
        self.key_head_order = KeyHeadOrder::Tiled;
        self
    }

    /// Head dimension of V and D, if it differs from that of Q and K.
    pub fn v_dim(mut self, features: usize) -> Self {
        self.v_dim = features;
        self
    }

    /// Decay of the state before each token.
    pub fn decay(mut self, decay: Decay) -> Self {
        self.decay = Some(decay);
        self
    }

    /// Token stride of the log-decay, or of `a`, in elements. Without
    /// gaps by default.
    pub fn decay_stride(mut self, token: u64) -> Self {
        self.decay_stride = Some(token);
        self
    }

    /// No delta term: `S ← S + β v kᵀ`, as in Mamba-2, whose β is the
    /// time step.
    pub fn without_delta(mut self) -> Self {
        self.delta = false;
        self
    }

    /// Takes β, f32 `[tokens, heads]`
    /// ([`LinearAttentionArgs::beta`](crate::LinearAttentionArgs::beta)).
    pub fn beta(mut self) -> Self {
        self.beta = Some(BetaSource::Given);
        self
    }

    /// β is the sigmoid of what [`beta`](Self::beta) takes.
    pub fn beta_logits(mut self) -> Self {
        self.beta = Some(BetaSource::Sigmoid);
        self
    }

    /// β is Mamba-2's time step, `softplus(a + dt_bias)` of a
    /// [`Decay::softplus`] a head. A run takes no β.
    pub fn time_step_beta(mut self) -> Self {
        self.beta = Some(BetaSource::TimeStep);
        self
    }

    /// Token stride of β, in elements. Without gaps by default.
    pub fn beta_stride(mut self, token: u64) -> Self {
        self.beta_stride = Some(token);
        self
    }

    /// Adds V times a factor of the head, f32 `[heads]`, to D: Mamba-2's
    /// `D · x` ([`LinearAttentionArgs::skip`](crate::LinearAttentionArgs::skip)).
    pub fn skip(mut self) -> Self {
        self.skip = true;
        self
    }

    /// L2-normalizes queries and keys in f32: `x / sqrt(Σ x² + epsilon)`.
    pub fn normalized(mut self, epsilon: f32) -> Self {
        self.norm_epsilon = Some(epsilon);
        self
    }

    /// Scale of the queries; by default the inverse root of the key
    /// dimension.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Takes the slot of each sequence, i32
    /// ([`LinearAttentionArgs::slots`](crate::LinearAttentionArgs::slots)).
    /// A sequence whose slot is negative or does not exist begins
    /// with a zero state, which is dropped.
    pub fn slot_indices(mut self) -> Self {
        self.slot_indices = true;
        self
    }

    /// Elements from one slot to the next: a multiple of 4. Without
    /// gaps by default.
    pub fn slot_stride(mut self, elements: u64) -> Self {
        self.slot_stride = Some(elements);
        self
    }

    /// Requires that bits do not depend on how a sequence's tokens are
    /// spread over runs: they are processed one by one, which takes
    /// longer for prompts. A plan with [`advance`](Self::advance) or
    /// [`pending`](Self::pending) does so anyway.
    pub fn batch_invariant(mut self) -> Self {
        self.batch_invariant = true;
        self
    }

    /// Most bytes of the workspace; 256 MiB by default. Kernels that process
    /// chunks of tokens take several launches where more were needed.
    pub fn max_workspace(mut self, bytes: usize) -> Self {
        self.max_workspace = bytes;
        self
    }

    /// States begin as zero instead of being read; they are written.
    pub fn from_zero(mut self) -> Self {
        self.from_zero = true;
        self
    }

    /// Takes how many tokens of each sequence enter its stored state,
    /// u32 ([`LinearAttentionArgs::advance`](crate::LinearAttentionArgs::advance)).
    /// Later tokens have outputs alone: guesses of speculative decoding.
    ///
    /// With [`pending`](Self::pending), a verification step costs no
    /// second pass. Its tokens are the accepted ones of the step before,
    /// which count as pending and advance the state, then new guesses.
    pub fn advance(mut self) -> Self {
        self.advance = true;
        self
    }

    /// Takes how many of the first tokens of each sequence have no
    /// output, u32
    /// ([`LinearAttentionArgs::pending`](crate::LinearAttentionArgs::pending)).
    /// Their rows of D are not written.
    pub fn pending(mut self) -> Self {
        self.pending = true;
        self
    }

    /// Token and head strides of Q, in elements.
    pub fn q_strides(mut self, token: u64, head: u64) -> Self {
        self.q = Some([token, head]);
        self
    }

    /// Token and head strides of K, in elements.
    pub fn k_strides(mut self, token: u64, head: u64) -> Self {
        self.k = Some([token, head]);
        self
    }

    /// Token and head strides of V, in elements.
    pub fn v_strides(mut self, token: u64, head: u64) -> Self {
        self.v = Some([token, head]);
        self
    }

    /// Token and head strides of D, in elements. Heads must not overlap.
    pub fn d_strides(mut self, token: u64, head: u64) -> Self {
        self.d = Some([token, head]);
        self
    }

    /// Alignment of the addresses of Q, K, V and D in every run, in
    /// bytes. 16 by default; less is slower. States are always aligned
    /// to 16 bytes.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(super) fn check(&self) -> Result<CheckedLinearAttention, Error> {
        let addressing = addressing(self.queries, Keys::each(0))?;
        let (sequences, tokens) = (addressing.sequences, addressing.tokens);
        let &Self { heads, key_heads, qk_dim, v_dim, slots, .. } = self;
        let least = if self.slot_indices || slots == 0 { 0 } else { sequences };
        let counts = [
            ("heads", heads, 1, MOST_HEADS),
            ("heads of keys", key_heads, 1, MOST_HEADS),
            ("slots", slots, least, MOST_SLOTS),
        ];
        counts.into_iter().try_for_each(|(name, got, least, most)| check_count(name, got, least, most))?;
        if !heads.is_multiple_of(key_heads) {
            return Err(Error::HeadsNotShared { heads, kv_heads: key_heads });
        }
        for (name, got) in [("features of a key", qk_dim), ("features of a value", v_dim)] {
            if got == 0 || got > MOST_DIM || !got.is_multiple_of(DIM_STEP) {
                return Err(Error::HeadDim { name, step: DIM_STEP, most: MOST_DIM, got });
            }
        }
        let scale = self.scale.unwrap_or(1.0 / (qk_dim as f32).sqrt());
        for (name, got) in [("scale", scale), ("eps", self.norm_epsilon.unwrap_or(0.0))] {
            if !got.is_finite() {
                return Err(Error::NonFiniteScalar { name, got });
            }
        }
        if let Some(got) = self.norm_epsilon.filter(|eps| *eps < 0.0) {
            return Err(Error::NegativeEps { got });
        }
        let op = CheckedLinearAttention {
            sequences,
            tokens,
            queries: addressing.queries,
            heads,
            key_heads,
            key_head_order: self.key_head_order,
            qk_dim,
            v_dim,
            dtype: self.dtype,
            q: self.of_tokens("q", [tokens, key_heads, qk_dim], self.q)?,
            k: self.of_tokens("k", [tokens, key_heads, qk_dim], self.k)?,
            v: self.of_tokens("v", [tokens, heads, v_dim], self.v)?,
            d: self.of_tokens("d", [tokens, heads, v_dim], self.d)?,
            decay: self.decay.map(|decay| self.check_decay(decay, tokens)).transpose()?,
            delta: self.delta,
            beta: self.beta.map(|source| self.check_beta(source, tokens)).transpose()?,
            skip: self.skip,
            norm_epsilon: self.norm_epsilon,
            scale,
            batch_invariant: self.batch_invariant,
            max_workspace: self.max_workspace,
            slots,
            slot_stride: self.check_slot_stride()?,
            slot_indices: self.slot_indices,
            from_zero: self.from_zero,
            advance: self.advance,
            pending: self.pending,
        };
        if !op.d.is_injective(tokens, heads, v_dim) {
            let HeadRows { token_stride, head_stride, .. } = op.d;
            return Err(Error::OverlappingHeads { operand: "d", token_stride, head_stride, columns: v_dim });
        }
        Ok(op)
    }

    fn check_decay(&self, decay: Decay, tokens: usize) -> Result<CheckedDecay, Error> {
        let Decay { per, source } = decay;
        let columns = match per {
            DecayPer::Head => self.heads,
            DecayPer::Feature => self.heads * self.qk_dim,
        };
        let checked = CheckedDecay { per, source, token_stride: 0 };
        let token_stride = token_stride("decay", tokens, columns, checked.dtype(), self.decay_stride)?;
        Ok(CheckedDecay { token_stride, ..checked })
    }

    fn check_beta(&self, source: BetaSource, tokens: usize) -> Result<CheckedBeta, Error> {
        let is_step = self.decay.is_some_and(|decay| decay.per == DecayPer::Head && decay.source != DecaySource::Log);
        let token_stride = match source {
            BetaSource::TimeStep if !is_step => return Err(Error::NoTimeStep),
            BetaSource::TimeStep => 0,
            _ => token_stride("beta", tokens, self.heads, DType::F32, self.beta_stride)?,
        };
        Ok(CheckedBeta { source, token_stride })
    }

    /// Elements between slots.
    fn check_slot_stride(&self) -> Result<u64, Error> {
        let state = (self.heads * self.v_dim * self.qk_dim) as u64;
        let stride = self.slot_stride.unwrap_or(state);
        if stride < state || !stride.is_multiple_of(STATE_VECTOR) {
            return Err(Error::SlotStride { expected: state, got: stride });
        }
        let rows = HeadsOf::of_tokens("states", 1, state as usize, DType::F32);
        rows.check([stride, 0, 0], [self.slots, 1], WIDE_ACCESS)?;
        Ok(stride)
    }

    /// Checks the strides of an operand `[tokens, heads, columns]`.
    fn of_tokens(
        &self,
        name: &'static str,
        [tokens, heads, columns]: [usize; 3],
        strides: Option<[u64; 2]>,
    ) -> Result<HeadRows, Error> {
        let [token, head] = strides.unwrap_or([(heads * columns) as u64, columns as u64]);
        let rows = HeadsOf::of_tokens(name, heads, columns, self.dtype);
        rows.check([0, token, head], [1, tokens], self.alignment).map(|kv| kv.rows)
    }
}

/// Token stride of an operand `[tokens, columns]`, checked.
fn token_stride(
    name: &'static str,
    tokens: usize,
    columns: usize,
    dtype: DType,
    stride: Option<u64>,
) -> Result<u64, Error> {
    let rows = HeadsOf::of_tokens(name, 1, columns, dtype);
    let checked = rows.check([0, stride.unwrap_or(columns as u64), 0], [1, tokens], dtype.bytes())?;
    Ok(checked.rows.token_stride)
}

//! `linear_attention`: a kernel that gathers small operands in the
//! workspace, and the recurrence with states in registers.

use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::op::linear_attention::{BetaSource, DecayPer, KeyHeadOrder, LinearAttentionStep};
use qgemm_hal::{
    CheckedLinearAttention, Device, DeviceInfo, Families, Family, Geometry, HalError, HeadRows, Kernel, LaunchSequence,
    LaunchStep, LinearAttentionConfig, LinearAttentionOperand, LinearAttentionPlan, Operand, Operands, Operation,
    QueryLengths, Stream, Unsupported, WorkspaceLayout,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, stride, submit, too_large};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{Shader, compose_chosen};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `linear_attention`.
pub(super) const FAMILIES: Families<CheckedLinearAttention> = &[&LinearAttention];

/// Kernel interface: the operands of `shaders/linear_attention_gather.wgsl`.
pub(crate) const GATHER_INTERFACE: Interface =
    Interface { name: "linear_attention_gather", bindings: "rrrrrrrw", params_bytes: size_of::<GatherParams>() as u32 };

/// Kernel interface: the operands of `shaders/linear_attention.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: NAME, bindings: "rrrrrrww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "linear_attention";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Rows of a workgroup: `ROWS` of the shader.
const ROWS: usize = 8;
/// Words of a sequence's record.
const RECORD_WORDS: usize = 5;
/// Slot of a sequence without state.
const NO_SLOT: u32 = u32::MAX;
/// Bytes of an f32 and of an index.
const WORD: usize = 4;

const GATHER_TEXTS: [&str; 2] =
    [include_str!("../../shaders/exponential.wgsl"), include_str!("../../shaders/linear_attention_gather.wgsl")];
const TEXTS: [&str; 3] = [
    include_str!("../../shaders/exponential.wgsl"),
    include_str!("../../shaders/half_of.wgsl"),
    include_str!("../../shaders/linear_attention.wgsl"),
];
const WRITTEN: &str = include_str!("../../shaders/norm_written.wgsl");
const NUMBERS: &str = include_str!("../../shaders/numbers.wgsl");

static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| hash_of(GATHER_TEXTS.into_iter().chain(TEXTS).chain([WRITTEN, NUMBERS])));

/// `Params` of `shaders/linear_attention_gather.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct GatherParams {
    sequences: u32,
    tokens: u32,
    most_tokens: u32,
    slots: u32,
    a_log_base: u32,
    dt_bias_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    advance_base: u32,
    pending_base: u32,
    skip_base: u32,
    gathered_base: u32,
}

/// `Params` of `shaders/linear_attention.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    sequences: u32,
    q_base: u32,
    k_base: u32,
    v_base: u32,
    decay_base: u32,
    beta_base: u32,
    gathered_base: u32,
    states_base: u32,
    d_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct LinearAttention;

/// Words that the recurrence reads of small operands.
fn gathered_words(op: &CheckedLinearAttention) -> usize {
    op.sequences * RECORD_WORDS + 2 * op.heads + op.token_decays()
}

/// Workspace bytes.
fn workspace_bytes(op: &CheckedLinearAttention) -> usize {
    WorkspaceLayout::RESERVED + gathered_words(op) * WORD
}

/// Elements from the first to the last of all tokens.
fn span(op: &CheckedLinearAttention, rows: &HeadRows, heads: usize, columns: usize) -> usize {
    (op.tokens - 1) * rows.token_stride as usize + (heads - 1) * rows.head_stride as usize + columns
}

/// Operands with an extent of their own: elements of a type.
fn extents(op: &CheckedLinearAttention) -> [(LinearAttentionOperand, usize, DType); 7] {
    use LinearAttentionOperand as O;
    let of_tokens =
        |stride: Option<u64>, columns: usize| stride.map_or(0, |stride| (op.tokens - 1) * stride as usize + columns);
    let decay = op.decay.map(|decay| decay.token_stride);
    let beta = op.beta.filter(|_| op.reads_beta()).map(|beta| beta.token_stride);
    let states = match op.slots {
        0 => 0,
        slots => (slots - 1) * op.slot_stride as usize + op.heads * op.state_len(),
    };
    [
        (O::Q, span(op, &op.q, op.key_heads, op.qk_dim), op.dtype),
        (O::K, span(op, &op.k, op.key_heads, op.qk_dim), op.dtype),
        (O::V, span(op, &op.v, op.heads, op.v_dim), op.dtype),
        (O::D, span(op, &op.d, op.heads, op.v_dim), op.dtype),
        (O::Decay, of_tokens(decay, op.token_decays()), op.decay.map_or(DType::F32, |decay| decay.dtype())),
        (O::Beta, of_tokens(beta, op.heads), DType::F32),
        (O::States, states, DType::F32),
    ]
}

/// Workgroups of both kernels.
fn groups(op: &CheckedLinearAttention) -> [usize; 2] {
    let gathered = op.sequences.max(op.heads).max(op.token_decays()).div_ceil(THREADS as usize);
    [gathered, op.sequences.saturating_mul(op.heads * op.v_dim.div_ceil(ROWS))]
}

/// Checks that the kernels support `op`.
fn check(op: &CheckedLinearAttention, limit: u64) -> Result<(), Unsupported> {
    for (operand, elements, dtype) in extents(op) {
        let bytes = elements as u64 * dtype.bytes() as u64;
        if bytes + MARGIN > limit {
            return Err(too_large(operand.name(), bytes, limit));
        }
    }
    if workspace_bytes(op) as u64 + MARGIN > limit {
        return Err(too_large("the workspace", workspace_bytes(op) as u64, limit));
    }
    match groups(op).into_iter().max() {
        Some(groups) if groups >= 1 << 31 => {
            Err(Unsupported::new("counts workgroups in 31 bits: run fewer sequences at once"))
        }
        _ => Ok(()),
    }
}

impl Family<CheckedLinearAttention> for LinearAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(
        &self,
        op: &CheckedLinearAttention,
        info: &DeviceInfo,
    ) -> Result<Vec<LinearAttentionConfig>, Unsupported> {
        check(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![LinearAttentionConfig {
            launches: 2,
            workspace_bytes: workspace_bytes(op),
            ..LinearAttentionConfig::of_tokens(op.kernel_of(NAME, None, LinearAttentionStep::Recur))
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedLinearAttention,
        _: &LinearAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "linear attention on the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        check(op, device.info().max_buffer_bytes).map_err(refused)?;
        let steps = [LinearAttentionStep::Gather, LinearAttentionStep::Recur];
        let steps = steps.into_iter().map(|which| step(shared, op, which)).collect::<Result<_, _>>()?;
        Ok(LaunchSequence::new::<LinearAttentionOperand>(op.kernel_name(), steps))
    }

    fn source_hash(&self, _: &CheckedLinearAttention, _: &LinearAttentionConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn step(shared: &Arc<Shared>, op: &CheckedLinearAttention, which: LinearAttentionStep) -> Result<LaunchStep, HalError> {
    use LinearAttentionOperand as O;
    let gathers = which == LinearAttentionStep::Gather;
    let interface = if gathers { &GATHER_INTERFACE } else { &INTERFACE };
    let compiled = Compiled::new(shared, interface, interface.name.to_owned(), shader(op, which))?;
    let [of_gather, of_recurrence] = groups(op);
    let groups = if gathers { of_gather } else { of_recurrence } as u32;
    let x = groups.clamp(1, MAX_GROUPS);
    let geometry = Geometry { grid: [x, groups.div_ceil(x).max(1), 1], threads: THREADS, shared_bytes: 0 };
    let kernel = StepKernel { compiled, shared: shared.clone(), op: *op, which, grid: geometry.grid };
    let step = LaunchStep::new::<O>(op.kernel_of(NAME, None, which), geometry, Arc::new(kernel));
    let is_gathered = |operand: &O| {
        matches!(operand, O::ALog | O::DtBias | O::QOffsets | O::Slots | O::Advance | O::Pending | O::Skip)
    };
    let step = step.bind_all(op.operands().into_iter().filter(|operand| is_gathered(operand) == gathers));
    Ok(step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..workspace_bytes(op)))
}

/// The shader of a kernel. Values that differ between plans
/// of a model are parameters.
fn shader(op: &CheckedLinearAttention, which: LinearAttentionStep) -> Shader {
    let is_made = op.decay.is_some_and(|decay| decay.is_made());
    let (per_feature, decay_dtype) =
        op.decay.map_or((false, DType::F32), |decay| (decay.per == DecayPer::Feature, decay.dtype()));
    let mut words = vec![("THREADS", THREADS), ("HEADS", op.heads as u32)];
    words.extend([("RECORD_WORDS", RECORD_WORDS as u32), ("NO_SLOT", NO_SLOT)]);
    let mut choices = vec![("SKIP", op.skip), ("MADE", is_made)];
    if which == LinearAttentionStep::Gather {
        words.push(("TOKEN_DECAYS", op.token_decays() as u32));
        choices.extend([
            ("Q_OFFSETS", matches!(op.queries, QueryLengths::Offsets { .. })),
            ("SLOTS", op.slot_indices),
            ("ADVANCE", op.advance),
            ("PENDING", op.pending),
        ]);
        return compose_chosen(&words, &choices, &GATHER_TEXTS);
    }
    words.extend([
        ("GROUP", (op.heads / op.key_heads) as u32),
        ("QK_DIM", op.qk_dim as u32),
        ("V_DIM", op.v_dim as u32),
        ("DECAYS", if per_feature { op.qk_dim as u32 } else { 1 }),
        ("DTYPE", dtype_code(op.dtype)),
        ("A_DTYPE", dtype_code(decay_dtype)),
        ("SCALE", op.scale.to_bits()),
        ("EPSILON", op.norm_epsilon.unwrap_or(0.0).to_bits()),
        ("Q_TOKEN", stride(op.tokens, op.q.token_stride)),
        ("Q_HEAD", stride(op.key_heads, op.q.head_stride)),
        ("K_TOKEN", stride(op.tokens, op.k.token_stride)),
        ("K_HEAD", stride(op.key_heads, op.k.head_stride)),
        ("V_TOKEN", stride(op.tokens, op.v.token_stride)),
        ("V_HEAD", stride(op.heads, op.v.head_stride)),
        ("D_TOKEN", stride(op.tokens, op.d.token_stride)),
        ("D_HEAD", stride(op.heads, op.d.head_stride)),
        ("DECAY_TOKEN", op.decay.map_or(0, |decay| stride(op.tokens, decay.token_stride))),
        ("BETA_TOKEN", stride(op.tokens, op.beta.map_or(0, |beta| beta.token_stride))),
        ("KEY_HEADS", op.key_heads as u32),
        ("SLOT_STRIDE", stride(op.slots, op.slot_stride)),
    ]);
    choices.extend([
        ("DECAY", op.decay.is_some()),
        ("FEATURES", per_feature),
        ("DELTA", op.delta),
        ("BETA", op.reads_beta()),
        ("SIGMOID", op.beta.is_some_and(|beta| beta.source == BetaSource::Sigmoid)),
        ("TIME_STEP", op.beta.is_some_and(|beta| beta.source == BetaSource::TimeStep)),
        ("TILED_HEADS", op.key_head_order == KeyHeadOrder::Tiled),
        ("NORM", op.norm_epsilon.is_some()),
        ("FROM_ZERO", op.from_zero),
    ]);
    let written = WRITTEN.replace("TARGET", "d");
    let [exponential, half_of, attention] = TEXTS;
    compose_chosen(&words, &choices, &[exponential, half_of, &written, attention])
}

/// One of the kernels. A launch allocates no device memory.
#[derive(Debug)]
struct StepKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedLinearAttention,
    which: LinearAttentionStep,
    grid: [u32; 3],
}

impl StepKernel {
    /// The operand's bytes from its start on.
    fn touched<'a>(
        &self,
        operands: &'a Operands<'a>,
        operand: LinearAttentionOperand,
        elements: usize,
        dtype: DType,
    ) -> Touched<'a> {
        let width = dtype.bytes();
        Touched { what: operand.name(), view: operands.get(operand), bytes: 0..elements * width, width }
    }

    fn gathered<'a>(&'a self, operands: &'a Operands<'a>) -> Touched<'a> {
        self.touched(operands, LinearAttentionOperand::Workspace, gathered_words(&self.op), DType::F32)
    }

    fn gather<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, GatherParams>, HalError> {
        use LinearAttentionOperand as O;
        let (op, shared) = (&self.op, &self.shared);
        let given = op.operands();
        let bind = |operand: O, count: usize| -> Result<Bound<'a>, HalError> {
            let count = if given.contains(&operand) { count } else { 0 };
            self.touched(operands, operand, count, DType::F32).bind(shared)
        };
        let mut p = GatherParams {
            sequences: op.sequences as u32,
            tokens: op.tokens as u32,
            most_tokens: op.most_tokens() as u32,
            slots: op.slots as u32,
            ..GatherParams::default()
        };
        let (a_log, dt_bias, q_offsets, slots, advance, pending, skip, gathered);
        (a_log, p.a_log_base) = bind(O::ALog, op.heads)?;
        (dt_bias, p.dt_bias_base) = bind(O::DtBias, op.token_decays())?;
        (q_offsets, p.q_offsets_base) = bind(O::QOffsets, op.sequences + 1)?;
        (slots, p.slots_base) = bind(O::Slots, op.sequences)?;
        (advance, p.advance_base) = bind(O::Advance, op.sequences)?;
        (pending, p.pending_base) = bind(O::Pending, op.sequences)?;
        (skip, p.skip_base) = bind(O::Skip, op.heads)?;
        (gathered, p.gathered_base) = self.gathered(operands).bind_written(shared)?;
        let bindings = vec![a_log, dt_bias, q_offsets, slots, advance, pending, skip, gathered];
        Ok(Dispatch { params: p, bindings, grid: self.grid })
    }

    fn recur<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        let shared = &self.shared;
        let [q, k, v, d, decay, beta, states] =
            extents(&self.op).map(|(operand, elements, dtype)| self.touched(operands, operand, elements, dtype));
        let mut p = Params { sequences: self.op.sequences as u32, ..Params::default() };
        let (q_bound, k_bound, v_bound, decay_bound, beta_bound, gathered, states_bound, d_bound);
        (q_bound, p.q_base) = q.bind(shared)?;
        (k_bound, p.k_base) = k.bind(shared)?;
        (v_bound, p.v_base) = v.bind(shared)?;
        (decay_bound, p.decay_base) = decay.bind(shared)?;
        (beta_bound, p.beta_base) = beta.bind(shared)?;
        (gathered, p.gathered_base) = self.gathered(operands).bind(shared)?;
        (states_bound, p.states_base) = states.bind_written(shared)?;
        (d_bound, p.d_base) = d.bind_written(shared)?;
        let bindings = vec![q_bound, k_bound, v_bound, decay_bound, beta_bound, gathered, states_bound, d_bound];
        Ok(Dispatch { params: p, bindings, grid: self.grid })
    }
}

impl Kernel for StepKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        match self.which {
            LinearAttentionStep::Gather => {
                submit(&self.shared, &GATHER_INTERFACE, &self.compiled, &[self.gather(&operands)?])
            }
            _ => submit(&self.shared, &INTERFACE, &self.compiled, &[self.recur(&operands)?]),
        }
    }
}

/// Shaders of plans with all options and with none, for the
/// test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_hal::op::linear_attention::{CheckedBeta, CheckedDecay, DecaySource};
    let rows = |heads: u64| HeadRows { token_stride: heads * 48, head_stride: 48, aligned: true };
    let decay = CheckedDecay { per: DecayPer::Feature, source: DecaySource::Softplus(DType::BF16), token_stride: 144 };
    let all = CheckedLinearAttention {
        sequences: 2,
        tokens: 9,
        queries: QueryLengths::Offsets { most: 5 },
        heads: 3,
        key_heads: 1,
        key_head_order: KeyHeadOrder::Grouped,
        qk_dim: 48,
        v_dim: 48,
        dtype: DType::F16,
        q: rows(1),
        k: rows(1),
        v: rows(3),
        d: rows(3),
        decay: Some(decay),
        delta: true,
        beta: Some(CheckedBeta { source: BetaSource::Given, token_stride: 3 }),
        skip: true,
        norm_epsilon: Some(1e-6),
        scale: 0.5,
        batch_invariant: false,
        max_workspace: 0,
        slots: 4,
        slot_stride: 3 * 48 * 48,
        slot_indices: true,
        from_zero: false,
        advance: true,
        pending: true,
    };
    let none = CheckedLinearAttention {
        queries: QueryLengths::Each(4),
        decay: None,
        delta: false,
        beta: None,
        skip: false,
        norm_epsilon: None,
        slot_indices: false,
        from_zero: true,
        advance: false,
        pending: false,
        dtype: DType::F32,
        ..all
    };
    let per_head = CheckedDecay { per: DecayPer::Head, token_stride: 3, ..decay };
    let of_mamba = CheckedLinearAttention {
        decay: Some(per_head),
        delta: false,
        beta: Some(CheckedBeta { source: BetaSource::TimeStep, token_stride: 0 }),
        ..all
    };
    let sigmoid = CheckedBeta { source: BetaSource::Sigmoid, token_stride: 3 };
    let tiled = CheckedLinearAttention { beta: Some(sigmoid), key_head_order: KeyHeadOrder::Tiled, ..all };
    let steps = [LinearAttentionStep::Gather, LinearAttentionStep::Recur];
    [all, none, of_mamba, tiled].iter().flat_map(|op| steps.map(|which| shader(op, which))).collect()
}

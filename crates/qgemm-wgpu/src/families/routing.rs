//! `routing`: router top-k and expert lists. Separate kernels for
//! top-k, counting, scanning and listing.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_GIVEN_IDS, FLAG_LISTS, FLAG_RENORMALIZE, FLAG_SIGMOID, FLAG_SQRT_SOFTPLUS, RoutingShape, dtype_code,
};
use qgemm_hal::op::routing::{FLAG_SHARED, STATUS_WORDS, workspace_bytes};
use qgemm_hal::{
    CheckedRouting, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, KernelId, LaunchSequence,
    LaunchStep, Operand, Operands, RoutingConfig, RoutingLaunches, RoutingOperand, RoutingSpec, RoutingStep, Scoring,
    Spec, Stream, Unsupported, WorkspaceLayout,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{ROUTING_TEXTS, compose_routing};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `routing`.
pub(super) const FAMILIES: Families<CheckedRouting> = &[&Routing];

/// Interface of the top-k kernel: the operands of
/// `shaders/routing_top_k.wgsl`.
pub(crate) const TOP_K_INTERFACE: Interface =
    Interface { name: "routing_top_k", bindings: "rrww", params_bytes: size_of::<Params>() as u32 };

/// Interface of the list kernels: the operands of
/// `shaders/routing_lists.wgsl`.
pub(crate) const LISTS_INTERFACE: Interface =
    Interface { name: "routing_lists", bindings: "rwwwww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "routing";
/// Maximum chunks; the scan reads the counts of all of them.
const MOST_CHUNKS: usize = 256;
/// Minimum slots of a chunk.
const LEAST_COUNTED: usize = 1024;
/// Bytes of an id, weight, offset, count or list entry.
const WORD: usize = 4;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(ROUTING_TEXTS));

/// `Params` of `shaders/routing_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: RoutingShape,
    logits_row: u32,
    logits_base: u32,
    bias_base: u32,
    ids_base: u32,
    weights_base: u32,
    workspace_base: u32,
    offsets_base: u32,
    counts_base: u32,
    rows_base: u32,
    status_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Routing;

impl Family<CheckedRouting> for Routing {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedRouting, info: &DeviceInfo) -> Result<Vec<RoutingConfig>, Unsupported> {
        let cut = Cut::new(op, info.max_buffer_bytes)?;
        let steps = steps(op);
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![RoutingConfig {
            kernel: kernel_id(steps[0]),
            launches: steps.len() as u32,
            workspace_bytes: workspace_bytes(cut.chunks, op.experts, true),
            efficiency: 300,
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedRouting,
        _: &RoutingLaunches,
    ) -> Result<LaunchSequence, HalError> {
        use RoutingOperand as O;
        let shared = shared_of(device, "a routing of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let cut = Cut::new(op, device.info().max_buffer_bytes).map_err(refused)?;
        let bound = |(kind, step): (RoutingStep, LaunchStep)| {
            if kind == RoutingStep::TopK {
                let step = step.bind_all([O::Logits, O::Ids, O::Weights]);
                return if op.bias { step.bind(O::Bias, O::Bias) } else { step };
            }
            let step = step.bind(O::GivenIds, if op.logits().is_some() { O::Ids } else { O::GivenIds });
            let bytes = WorkspaceLayout::RESERVED..workspace_bytes(cut.chunks, op.experts, true);
            let step = step.bind_part(O::Workspace, O::Workspace, bytes).bind(O::Status, O::Status);
            if op.lists { step.bind_all([O::Offsets, O::Counts, O::Rows]) } else { step }
        };
        let made = made(shared, op, &cut)?.into_iter().map(bound).collect();
        Ok(LaunchSequence::new::<O>(NAME, made))
    }

    fn source_hash(&self, _: &CheckedRouting, _: &RoutingConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// List kernels as first launches of another
/// operation, with no operand bound.
///
/// # Errors
/// The operand that exceeds a binding.
pub(super) fn list_steps(
    shared: &Arc<Shared>,
    op: &CheckedRouting,
    info: &DeviceInfo,
) -> Result<Vec<LaunchStep>, HalError> {
    let refused =
        |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
    let cut = Cut::new(op, info.max_buffer_bytes).map_err(refused)?;
    Ok(made(shared, op, &cut)?.into_iter().map(|(_, step)| step).collect())
}

/// Workspace bytes of the list kernels.
///
/// # Errors
/// The operand that exceeds a binding.
pub(super) fn list_workspace_bytes(op: &CheckedRouting, info: &DeviceInfo) -> Result<usize, Unsupported> {
    let cut = Cut::new(op, info.max_buffer_bytes)?;
    Ok(workspace_bytes(cut.chunks, op.experts, true) - WorkspaceLayout::RESERVED)
}

/// One launch for each kernel, with no operand bound.
fn made(shared: &Arc<Shared>, op: &CheckedRouting, cut: &Cut) -> Result<Vec<(RoutingStep, LaunchStep)>, HalError> {
    let step = |&kind: &RoutingStep| {
        let shader = compose_routing(kind, threads(kind));
        let compiled = Compiled::new(shared, interface(kind), NAME.to_owned(), shader)?;
        let geometry = Geometry { grid: cut.grid(kind), threads: threads(kind), shared_bytes: shared_bytes(kind) };
        let kernel = RoutingKernel { compiled, shared: shared.clone(), op: op.clone(), cut: cut.clone(), kind };
        Ok((kind, LaunchStep::new::<RoutingOperand>(kernel_id(kind), geometry, Arc::new(kernel))))
    };
    steps(op).iter().map(step).collect()
}

/// Kernels that run. Without lists, counting and
/// scanning still find faults.
fn steps(op: &CheckedRouting) -> &'static [RoutingStep] {
    use RoutingStep as S;
    match (op.logits().is_some(), op.lists) {
        (true, true) => &[S::TopK, S::Count, S::Scan, S::Scatter],
        (true, false) => &[S::TopK, S::Count, S::Scan],
        (false, _) => &[S::Count, S::Scan, S::Scatter],
    }
}

fn kernel_id(step: RoutingStep) -> KernelId {
    let experts = qgemm_hal::op::routing::MOST_EXPERTS as u32;
    KernelId::new(NAME, None, Spec::Routing(RoutingSpec { step, experts }))
}

fn interface(step: RoutingStep) -> &'static Interface {
    match step {
        RoutingStep::TopK => &TOP_K_INTERFACE,
        _ => &LISTS_INTERFACE,
    }
}

/// Invocations of a workgroup.
const fn threads(step: RoutingStep) -> u32 {
    match step {
        RoutingStep::TopK => 64,
        _ => 256,
    }
}

/// Workgroup memory: `var<workgroup>` of the shaders.
const fn shared_bytes(step: RoutingStep) -> u32 {
    const OF_EXPERTS: u32 = 1024 * 4;
    match step {
        RoutingStep::TopK => 3 * OF_EXPERTS + 3 * 64 * 4 + 2 * 16 * 4,
        RoutingStep::Scan => 256 * 4 + 4,
        _ => OF_EXPERTS + 256 * 4,
    }
}

/// Split of the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cut {
    /// Tokens of a chunk, which is counted and listed separately.
    chunk_tokens: usize,
    chunks: usize,
    /// Tokens of each top-k dispatch: as many as have
    /// their logits in a binding.
    parts: Vec<Range<usize>>,
}

impl Cut {
    /// # Errors
    /// The operand that exceeds a binding of `limit` bytes.
    fn new(op: &CheckedRouting, limit: u64) -> Result<Self, Unsupported> {
        let slots = (op.slots() * WORD) as u64;
        if slots.max(WORD as u64 * op.experts as u64) + MARGIN > limit {
            return Err(too_large("the ids", slots, limit));
        }
        let chunk_tokens = op.tokens.div_ceil(MOST_CHUNKS).max(LEAST_COUNTED.div_ceil(op.top_k)).min(op.tokens);
        let chunks = op.tokens.div_ceil(chunk_tokens);
        let counts = (workspace_bytes(chunks, op.experts, true) - WorkspaceLayout::RESERVED) as u64;
        if counts + MARGIN > limit {
            return Err(too_large("the counts", counts, limit));
        }
        let each = match op.logits() {
            Some(logits) => rows_that_fit("the logits", logits, op.logit_experts(), limit)?.min(op.tokens),
            None => op.tokens,
        };
        let parts = (0..op.tokens).step_by(each).map(|first| first..(first + each).min(op.tokens)).collect();
        Ok(Self { chunk_tokens, chunks, parts })
    }

    /// The cut for the first `tokens` tokens. The chunk length is
    /// unchanged, because results are located by chunk number.
    fn of_first(&self, tokens: usize) -> Self {
        let parts = self.parts.iter().filter(|part| part.start < tokens);
        Self {
            chunk_tokens: self.chunk_tokens,
            chunks: tokens.div_ceil(self.chunk_tokens),
            parts: parts.map(|part| part.start..part.end.min(tokens)).collect(),
        }
    }

    /// Grid of the first dispatch.
    fn grid(&self, step: RoutingStep) -> [u32; 3] {
        match step {
            RoutingStep::TopK => self.parts.first().map_or([0; 3], |part| tokens_grid(part.len())),
            RoutingStep::Scan | RoutingStep::Lists => [1, 1, 1],
            RoutingStep::Count | RoutingStep::Scatter => [self.chunks as u32, 1, 1],
        }
    }
}

/// One workgroup for each token.
fn tokens_grid(tokens: usize) -> [u32; 3] {
    let x = (tokens as u32).min(MAX_GROUPS);
    [x, (tokens as u32).div_ceil(x), 1]
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct RoutingKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedRouting,
    cut: Cut,
    kind: RoutingStep,
}

/// A launch for all tokens or a portion of them.
struct Run<'k> {
    kernel: &'k RoutingKernel,
    op: CheckedRouting,
    cut: Cut,
}

impl Run<'_> {
    /// Parameters for `tokens` tokens without base offsets.
    fn params(&self, tokens: usize) -> Params {
        let op = &self.op;
        let flags = [
            (FLAG_BIAS, op.bias),
            (FLAG_SIGMOID, op.scoring == Scoring::Sigmoid),
            (FLAG_SQRT_SOFTPLUS, op.scoring == Scoring::SqrtSoftplus),
            (FLAG_RENORMALIZE, op.renormalize),
            (FLAG_LISTS, op.lists),
            (FLAG_GIVEN_IDS, op.logits().is_none()),
            (FLAG_SHARED, op.shared),
        ];
        let experts = if self.kernel.kind == RoutingStep::TopK { op.experts } else { op.local_experts() };
        let shape = RoutingShape {
            tokens: tokens as u32,
            experts: experts as u32,
            top_k: op.top_k as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            groups: op.groups.map_or(0, |groups| groups.groups as u32),
            chosen_groups: op.groups.map_or(0, |groups| groups.chosen as u32),
            scale: op.scale,
            dtype: op.logits().map_or(0, |logits| dtype_code(logits.dtype)),
            chunk_tokens: self.cut.chunk_tokens as u32,
            chunks: self.cut.chunks as u32,
            first_local: op.local.start as u32,
            local: op.local_experts() as u32,
        };
        Params { shape, logits_row: op.logits().map_or(0, |l| stride(op.tokens, l.row_stride)), ..Params::default() }
    }

    /// The 4-byte words `words` of an operand.
    fn touched<'a>(&self, operands: &'a Operands<'a>, operand: RoutingOperand, words: Range<usize>) -> Touched<'a> {
        let bytes = words.start * WORD..words.end * WORD;
        Touched { what: operand.name(), view: operands.get(operand), bytes, width: WORD }
    }

    /// Top-k for the tokens of a part.
    fn choose<'a>(&'a self, part: &Range<usize>, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use RoutingOperand as O;
        let (op, shared, mut p) = (&self.op, &self.kernel.shared, self.params(part.len()));
        let bytes = op.logits().map_or(0..0, |logits| {
            let width = logits.dtype.bytes();
            let row = |token: usize| token * logits.row_stride as usize;
            row(part.start) * width..(row(part.end - 1) + op.logit_experts()) * width
        });
        let width = op.logits().map_or(WORD, |logits| logits.dtype.bytes());
        let of_logits = Touched { what: O::Logits.name(), view: operands.get(O::Logits), bytes, width };
        let slots = part.start * op.top_k..part.end * op.top_k;
        let bias_words = if op.bias { 0..op.logit_experts() } else { 0..0 };
        let (logits, bias, ids, weights);
        (logits, p.logits_base) = of_logits.bind(shared)?;
        (bias, p.bias_base) = self.touched(operands, O::Bias, bias_words).bind(shared)?;
        (ids, p.ids_base) = self.touched(operands, O::Ids, slots.clone()).bind_written(shared)?;
        (weights, p.weights_base) = self.touched(operands, O::Weights, slots).bind_written(shared)?;
        Ok(Dispatch { params: p, bindings: vec![logits, bias, ids, weights], grid: tokens_grid(part.len()) })
    }

    /// Counts, scans or lists.
    fn list<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use RoutingOperand as O;
        let (op, shared, mut p) = (&self.op, &self.kernel.shared, self.params(self.op.tokens));
        let counts_end = workspace_bytes(self.cut.chunks, op.experts, true) - WorkspaceLayout::RESERVED;
        let written = |operand: O, words: usize| -> Result<Bound<'a>, HalError> {
            self.touched(operands, operand, 0..words).bind_written(shared)
        };
        let listed = |words: usize| if op.lists { words } else { 0 };
        let (ids, workspace, offsets, counts, rows, status);
        (ids, p.ids_base) = self.touched(operands, O::GivenIds, 0..op.slots()).bind(shared)?;
        (workspace, p.workspace_base) = written(O::Workspace, counts_end / WORD)?;
        (offsets, p.offsets_base) = written(O::Offsets, listed(op.local_experts() + 1))?;
        (counts, p.counts_base) = written(O::Counts, listed(op.local_experts()))?;
        (rows, p.rows_base) = written(O::Rows, listed(op.slots()))?;
        (status, p.status_base) = written(O::Status, STATUS_WORDS)?;
        let bindings = vec![ids, workspace, offsets, counts, rows, status];
        Ok(Dispatch { params: p, bindings, grid: self.cut.grid(self.kernel.kind) })
    }
}

impl Kernel for RoutingKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let op = self.op.of_portion(operands.portion());
        let run = Run { kernel: self, cut: self.cut.of_first(op.tokens), op };
        let dispatches = match self.kind {
            RoutingStep::TopK => {
                run.cut.parts.iter().map(|part| run.choose(part, &operands)).collect::<Result<Vec<_>, _>>()?
            }
            _ => vec![run.list(&operands)?],
        };
        submit(&self.shared, interface(self.kind), &self.compiled, &dispatches)
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{Dense, RoutingSource};

    use super::*;

    fn op(tokens: usize, experts: usize, top_k: usize) -> CheckedRouting {
        CheckedRouting {
            tokens,
            experts,
            top_k,
            from: RoutingSource::Logits(Dense::rows_of(DType::F32, experts)),
            scoring: Scoring::Softmax,
            renormalize: false,
            scale: 1.0,
            bias: false,
            groups: None,
            lists: true,
            shared: false,
            local: 0..experts,
        }
    }

    #[test]
    fn tokens_are_cut_into_few_chunks_and_logits_into_bindings() {
        let cut = |op: &CheckedRouting, limit| Cut::new(op, limit).expect("cut");
        assert_eq!(
            cut(&op(7, 60, 4), 1 << 27),
            Cut { chunk_tokens: 7, chunks: 1, parts: std::iter::once(0..7).collect() }
        );
        for op in [op(5000, 128, 8), op(1 << 20, 256, 8), op(1 << 20, 8, 1)] {
            let Cut { chunk_tokens, chunks, parts } = cut(&op, 1 << 27);
            assert!(chunks <= MOST_CHUNKS && chunks * chunk_tokens >= op.tokens);
            assert!(parts.iter().map(ExactSizeIterator::len).sum::<usize>() == op.tokens, "{parts:?}");
            assert!(parts.iter().all(|part| part.len() as u64 * op.experts as u64 * 4 + MARGIN <= 1 << 27));
        }
        assert_eq!(cut(&op(1 << 20, 256, 8), 1 << 27).parts.len(), 9);
        assert_eq!(tokens_grid(70_000), [65_535, 2, 1]);
    }

    #[test]
    fn what_a_binding_does_not_hold_is_refused() {
        let why = Cut::new(&op(1 << 20, 8, 8), 1 << 24).expect_err("ids of 32 MiB").why;
        assert!(why.contains("the ids") && why.contains("16777216"), "{why}");
        let why = Cut::new(&op(1, 1024, 1), 4096).expect_err("a row and its margin").why;
        assert!(why.contains("4096"), "{why}");
    }

    #[test]
    fn workgroup_memory_is_what_every_adapter_has() {
        assert!(RoutingStep::ALL.into_iter().all(|step| shared_bytes(step) <= 16 << 10));
    }
}

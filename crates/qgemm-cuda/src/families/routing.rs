//! `routing`: router top-k and expert lists. Few tokens take one launch
//! and more tokens two. Three launches (top-k with counts, scan, scatter)
//! are used when one CTA would take long for the lists.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{self, RoutingPointers, RoutingShape, dtype_code};
use qgemm_hal::op::routing::{FLAG_SHARED, workspace_bytes};
use qgemm_hal::{
    CheckedRouting, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence, LaunchStep,
    Operand, Operands, RoutingConfig, RoutingLaunches, RoutingOperand, RoutingSpec, RoutingStep, Scoring, Spec,
    Unsupported, Variant, WorkspaceLayout,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "routing";
/// Expert counts that top-k kernels are compiled for: a warp
/// holds them, 2 to 32 per lane.
const EXPERTS: [u32; 5] = [64, 128, 256, 512, 1024];
/// Threads of most CTAs, and minimum threads of a top-k
/// CTA (one warp per token).
const THREADS: u32 = 256;
/// Maximum threads of a CTA that builds all lists, scans counts,
/// or runs top-k over few experts.
const MOST_THREADS: u32 = 1024;
/// Maximum experts whose keys fit in registers with that many threads.
const EXPERTS_OF_MOST_THREADS: u32 = 256;
/// Tokens for which one CTA does top-k and
/// lists: one or two per warp.
const ALONE_TOKENS: usize = 16;
/// Slots that one CTA lists. More are distributed over CTAs.
const ALONE_SLOTS: usize = 8192;
/// Words of shared memory for the counts of all warps.
const SHARED_COUNTS: u32 = 8192;
/// Slots per scatter CTA when one CTA counts all, and maximum
/// such CTAs. Scattered words are written one by one per SM.
/// Each of these CTAs counts all slots itself.
const SLOTS_A_WRITER: usize = 512;
const MOST_WRITERS: usize = 8;
/// CTAs per SM.
const CTAS_A_UNIT: usize = 4;
/// Minimum slots of a chunk with separate counts.
const LEAST_COUNTED: usize = 256;
/// Expected share of the bandwidth, per mille: top-k takes
/// more instructions than loads.
const EFFICIENCY: u32 = 300;

/// Families of `routing`.
pub(super) const FAMILIES: Families<CheckedRouting> = &[&Routing];

/// The kernel family.
#[derive(Debug)]
struct Routing;

/// Split of the tokens, and the kernels that run.
#[derive(Debug)]
struct Cut {
    chunk_tokens: usize,
    chunks: usize,
    /// Whether chunks leave counts in the workspace.
    counts: bool,
    steps: Vec<RoutingStep>,
}

impl Cut {
    fn new(op: &CheckedRouting, units: u32) -> Self {
        use RoutingStep as S;
        let chooses = op.logits().is_some();
        let few_slots = op.slots() <= ALONE_SLOTS;
        let (counts, steps) = match (chooses, op.lists) {
            (true, _) if op.tokens <= ALONE_TOKENS => (false, vec![S::TopK]),
            (true, false) => (true, vec![S::TopK, S::Scan]),
            (true, true) if few_slots => (false, vec![S::TopK, S::Lists]),
            (true, true) => (true, vec![S::TopK, S::Scan, S::Scatter]),
            (false, _) if few_slots => (false, vec![S::Lists]),
            (false, _) => (true, vec![S::Count, S::Scan, S::Scatter]),
        };
        let alone = steps.len() == 1;
        let least = if counts && op.lists { LEAST_COUNTED.div_ceil(op.top_k) } else { 1 };
        let shared_out = op.tokens.div_ceil(CTAS_A_UNIT * units.max(1) as usize).max(least);
        let chunk_tokens = if alone { op.tokens } else { shared_out.next_multiple_of(THREADS as usize / 32) };
        Self { chunk_tokens, chunks: op.tokens.div_ceil(chunk_tokens), counts, steps }
    }

    fn workspace_bytes(&self, op: &CheckedRouting) -> usize {
        if self.counts { workspace_bytes(self.chunks, op.experts, op.lists) } else { 0 }
    }

    /// CTAs of a kernel.
    fn ctas(&self, step: RoutingStep, op: &CheckedRouting) -> u32 {
        match step {
            RoutingStep::Lists => op.slots().div_ceil(SLOTS_A_WRITER).clamp(1, MOST_WRITERS) as u32,
            RoutingStep::Scan if op.lists => (op.local_experts() as u32).div_ceil(32),
            RoutingStep::Scan => 1,
            RoutingStep::TopK | RoutingStep::Count | RoutingStep::Scatter => self.chunks as u32,
        }
    }
}

/// Maximum threads of a kernel's CTA.
fn most_threads(spec: RoutingSpec) -> u32 {
    match spec.step {
        RoutingStep::Lists | RoutingStep::Scan => MOST_THREADS,
        RoutingStep::TopK if spec.experts <= EXPERTS_OF_MOST_THREADS => MOST_THREADS,
        RoutingStep::TopK | RoutingStep::Count | RoutingStep::Scatter => THREADS,
    }
}

/// `SharedStorage` of `entry/routing_scan.cu`.
const SCAN_SHARED_BYTES: u32 = MOST_THREADS / 32 * 33 * 4;

/// Launch geometry, with shared memory for `ListStorage` in
/// `mainloop/expert_lists.cuh`.
fn geometry(step: RoutingStep, cut: &Cut, op: &CheckedRouting) -> Geometry {
    let grid = [cut.ctas(step, op), 1, 1];
    if step == RoutingStep::Scan {
        return Geometry { grid, threads: MOST_THREADS, shared_bytes: SCAN_SHARED_BYTES };
    }
    let experts = op.experts as u32;
    // As many warps as have counts in shared memory.
    let fitting = (SHARED_COUNTS / experts).clamp(THREADS / 32, MOST_THREADS / 32) * 32;
    let most = most_threads(spec_of(step, op)).min(fitting);
    // One token per warp, and no idle warps.
    let wanted = if step == RoutingStep::TopK { (cut.chunk_tokens as u32).saturating_mul(32) } else { most };
    let threads = wanted.clamp(THREADS.min(most), most);
    let words = threads / 32 * experts + experts + 1 + 32 + 32;
    Geometry { grid, threads, shared_bytes: words * 4 }
}

/// Identity keys of a step's kernel.
fn spec_of(step: RoutingStep, op: &CheckedRouting) -> RoutingSpec {
    let fitting = EXPERTS.into_iter().find(|&most| most as usize >= op.logit_experts());
    let all = EXPERTS[EXPERTS.len() - 1];
    RoutingSpec { step, experts: if step == RoutingStep::TopK { fitting.unwrap_or(all) } else { all } }
}

fn id(spec: RoutingSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Routing(spec))
}

fn source(spec: RoutingSpec, variant: Variant) -> KernelSpec {
    let (entry, symbol) = match spec.step {
        RoutingStep::TopK => ("entry/routing_top_k.cu", "qg_routing_top_k"),
        RoutingStep::Lists => ("entry/routing_lists.cu", "qg_routing_lists"),
        RoutingStep::Count => ("entry/routing_count.cu", "qg_routing_count"),
        RoutingStep::Scan => ("entry/routing_scan.cu", "qg_routing_scan"),
        RoutingStep::Scatter => ("entry/routing_scatter.cu", "qg_routing_scatter"),
    };
    let step = spec.step;
    let chooses = step == RoutingStep::TopK;
    let prelude = Prelude {
        threads: Some(most_threads(spec)),
        routed_experts: chooses.then_some(spec.experts),
        flag_shared: chooses.then_some(FLAG_SHARED),
        // The warps of a single CTA have one or two rows of slots.
        rows_at_once: Some(if chooses { 1 } else { 4 }),
        shared_bytes: (step == RoutingStep::Scan).then_some(SCAN_SHARED_BYTES),
        ..Prelude::of(variant)
    };
    KernelSpec {
        name: id(spec, variant).to_string(),
        entry,
        text: source::entry(entry),
        symbol,
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_step = |step| {
        let sizes = if step == RoutingStep::TopK { &EXPERTS[..] } else { &EXPERTS[EXPERTS.len() - 1..] };
        sizes.iter().map(move |&experts| RoutingSpec { step, experts })
    };
    RoutingStep::ALL.into_iter().flat_map(of_step).map(move |spec| source(spec, variant))
}

/// `RoutingParams` in `mainloop/expert_lists.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct RoutingParams {
    shape: RoutingShape,
    at: RoutingPointers,
}

impl Params for RoutingParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use RoutingOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.logits, O::Logits),
            (&mut params.at.given_ids, O::GivenIds),
            (&mut params.at.bias, O::Bias),
            (&mut params.at.ids, O::Ids),
            (&mut params.at.weights, O::Weights),
            (&mut params.at.offsets, O::Offsets),
            (&mut params.at.counts, O::Counts),
            (&mut params.at.rows, O::Rows),
            (&mut params.at.status, O::Status),
            (&mut params.at.workspace, O::Workspace),
        ];
        at.fill(operands, pointers)?;
        // The chunks stay the same; those after the
        // last token are empty.
        params.shape.tokens = operands.rows(self.shape.tokens as usize) as u32;
        Ok(LaunchParams::of(&params))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

fn params(op: &CheckedRouting, cut: &Cut, step: RoutingStep) -> RoutingParams {
    // Top-k adds the shared expert itself.
    let (experts, top_k) = match step {
        RoutingStep::TopK => (op.logit_experts(), op.chosen()),
        _ => (op.local_experts(), op.top_k),
    };
    let flags = [
        (abi::FLAG_BIAS, op.bias),
        (abi::FLAG_SIGMOID, op.scoring == Scoring::Sigmoid),
        (abi::FLAG_SQRT_SOFTPLUS, op.scoring == Scoring::SqrtSoftplus),
        (abi::FLAG_RENORMALIZE, op.renormalize),
        (abi::FLAG_LISTS, op.lists),
        (abi::FLAG_COUNTS, cut.counts),
        (abi::FLAG_GIVEN_IDS, op.logits().is_none()),
        (FLAG_SHARED, op.shared),
    ];
    let shape = RoutingShape {
        tokens: op.tokens as u32,
        experts: experts as u32,
        top_k: top_k as u32,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        groups: op.groups.map_or(0, |groups| groups.groups as u32),
        chosen_groups: op.groups.map_or(0, |groups| groups.chosen as u32),
        scale: op.scale,
        dtype: op.logits().map_or(0, |logits| dtype_code(logits.dtype)),
        chunk_tokens: cut.chunk_tokens as u32,
        chunks: cut.chunks as u32,
        first_local: op.local.start as u32,
        local: op.local_experts() as u32,
    };
    let logits_row = op.logits().map_or(0, |logits| logits.row_stride);
    RoutingParams { shape, at: RoutingPointers { logits_row, ..RoutingPointers::default() } }
}

/// Binds a step to the operands of its kernel.
fn bound(step: LaunchStep, kind: RoutingStep, op: &CheckedRouting, cut: &Cut) -> LaunchStep {
    use RoutingOperand as O;
    let alone = cut.steps.len() == 1;
    let step = match kind {
        RoutingStep::TopK => {
            let step = step.bind_all([O::Logits, O::Ids, O::Weights]);
            let step = if op.bias { step.bind(O::Bias, O::Bias) } else { step };
            let step = if alone { step.bind(O::Status, O::Status) } else { step };
            if alone && op.lists { step.bind_all([O::Offsets, O::Counts, O::Rows]) } else { step }
        }
        RoutingStep::Lists => step.bind_all([O::Offsets, O::Counts, O::Rows, O::Status]),
        RoutingStep::Count => step,
        RoutingStep::Scan => step.bind(O::Status, O::Status),
        RoutingStep::Scatter => step.bind_all([O::Offsets, O::Counts, O::Rows]),
    };
    let step = match kind {
        RoutingStep::TopK => step,
        // The scan reads no ids when experts are chosen by top-k.
        RoutingStep::Scan if op.logits().is_some() => step,
        _ => step.bind(O::GivenIds, if op.logits().is_some() { O::Ids } else { O::GivenIds }),
    };
    match cut.counts {
        true => step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..cut.workspace_bytes(op)),
        false => step,
    }
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedRouting,
    _: &RoutingLaunches,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let cut = Cut::new(op, info.units);
    let steps = steps(op, &cut, info, make)?;
    let steps = cut.steps.iter().zip(steps).map(|(&kind, step)| bound(step, kind, op, &cut)).collect();
    Ok(LaunchSequence::new::<RoutingOperand>(NAME, steps))
}

/// List kernels as first launches of another
/// operation, with no operand bound.
///
/// # Errors
/// As [`sequence`].
pub(super) fn list_steps(
    op: &CheckedRouting,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<Vec<LaunchStep>, HalError> {
    steps(op, &Cut::new(op, info.units), info, make)
}

/// Workspace bytes of the list kernels.
pub(super) fn list_workspace_bytes(op: &CheckedRouting, units: u32) -> usize {
    Cut::new(op, units).workspace_bytes(op).saturating_sub(WorkspaceLayout::RESERVED)
}

/// One launch for each step, with no operand bound.
fn steps(
    op: &CheckedRouting,
    cut: &Cut,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<Vec<LaunchStep>, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let step = |&kind: &RoutingStep| {
        let spec = spec_of(kind, op);
        let launch = KernelLaunch {
            id: id(spec, variant),
            spec: source(spec, variant),
            geometry: geometry(kind, cut, op),
            // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
            starts_early: variant >= Variant::Sm90,
            operands: RoutingOperand::ALL,
            updated: None,
            params: Arc::new(params(op, cut, kind)),
        };
        launch.step::<RoutingOperand>(make)
    };
    cut.steps.iter().map(step).collect()
}

impl Family<CheckedRouting> for Routing {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedRouting, info: &DeviceInfo) -> Result<Vec<RoutingConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let cut = Cut::new(op, info.units);
        Ok(vec![RoutingConfig {
            kernel: id(spec_of(cut.steps[0], op), variant),
            launches: cut.steps.len() as u32,
            workspace_bytes: cut.workspace_bytes(op),
            efficiency: EFFICIENCY,
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedRouting,
        plan: &RoutingLaunches,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedRouting, config: &RoutingConfig) -> u64 {
        let Some(variant) = config.kernel.variant else { return 0 };
        let hash = |step| source(spec_of(step, op), variant).source_hash().short();
        RoutingStep::ALL.into_iter().fold(0, |all: u64, step| all.rotate_left(7) ^ hash(step))
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
    fn few_tokens_take_one_launch_and_a_million_three() {
        let launches = |op: &CheckedRouting| Cut::new(op, 132).steps.len();
        let of_ids = |tokens| CheckedRouting { from: RoutingSource::Ids, ..op(tokens, 128, 8) };
        let unlisted = |tokens| CheckedRouting { lists: false, ..op(tokens, 128, 8) };
        assert_eq!([1, 16, 17, 1024, 1025, 1 << 20].map(|tokens| launches(&op(tokens, 128, 8))), [1, 1, 2, 2, 3, 3]);
        assert_eq!([1, 1024, 1025].map(|tokens| launches(&of_ids(tokens))), [1, 1, 3]);
        assert_eq!([1, 16, 17, 1 << 20].map(|tokens| launches(&unlisted(tokens))), [1, 1, 2, 2]);
    }

    #[test]
    fn every_token_is_in_a_chunk_and_shared_memory_suffices() {
        for (tokens, experts, top_k) in [(17, 1, 1), (1000, 1024, 32), (5000, 60, 2), (1 << 20, 1024, 32)] {
            let op = op(tokens, experts, top_k);
            for units in [1, 24, 132] {
                let cut = Cut::new(&op, units);
                assert!(cut.chunk_tokens * cut.chunks >= tokens && cut.chunk_tokens * (cut.chunks - 1) < tokens);
                assert!(cut.chunks <= CTAS_A_UNIT * units as usize, "{cut:?}");
                for &step in &cut.steps {
                    let Geometry { threads, shared_bytes, .. } = geometry(step, &cut, &op);
                    // Available on every chip without opting in to more shared memory.
                    let most = most_threads(spec_of(step, &op));
                    assert!(shared_bytes <= 48 << 10 && threads.is_multiple_of(32) && threads <= most);
                }
            }
        }
    }
}

//! `indexer`: scores with matrix instructions, and top-k.
//! Top-k reads scores from the workspace, or keys that were
//! gathered while they were scored.

mod decode;
mod decode_tma;
mod gather;
mod mapped;
mod mma;
mod wgmma;

use std::sync::Arc;

use qgemm_hal::abi::IndexerParams;
use qgemm_hal::{
    CheckedIndexer, DeviceInfo, Families, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerResult, IndexerSpec, IndexerStep, KernelId, LaunchSequence, LaunchStep, Math, Name, Operand, Operands,
    Operation, Paging, Spec, Unsupported, Variant, WorkspaceLayout,
};

use self::gather::Gathering;
use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, unknown_family};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Families of CUDA devices.
pub(super) const FAMILIES: Families<CheckedIndexer> =
    &[&wgmma::IndexerWgmma, &decode_tma::IndexerDecodeTma, &decode::IndexerDecode, &mma::IndexerMma];

/// Threads of a top-k CTA, which serves one query.
const CHOOSE_THREADS: u32 = 512;
/// `SharedStorage` of `mainloop/indexer_ranks.cuh`.
const CHOOSE_SHARED_BYTES: u32 = 4096 * 8 + 2048 * 4 + CHOOSE_THREADS / 32 * 4 + 4 * 4;
/// Bits of a masked key's score: −∞, or for top-k a
/// value that no score has.
const MASKED_SCORE: [u32; 2] = [0xff80_0000, u32::MAX];

/// Algorithm of a family: how keys are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scorer {
    Wgmma,
    DecodeTma,
    Decode,
    Mma,
}

impl Scorer {
    const ALL: [Self; 4] = [Self::Wgmma, Self::DecodeTma, Self::Decode, Self::Mma];

    /// The family's name.
    const fn name(self) -> &'static str {
        match self {
            Self::Wgmma => wgmma::NAME,
            Self::DecodeTma => decode_tma::NAME,
            Self::Decode => decode::NAME,
            Self::Mma => mma::NAME,
        }
    }

    /// The algorithm of a kernel of these families.
    fn of(kernel: &KernelId) -> Option<Self> {
        Self::ALL.into_iter().find(|scorer| kernel.family == Name::new(scorer.name()))
    }
}

/// All kernels of these families for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_hopper = wgmma::specs(variant).chain(decode_tma::specs(variant)).chain(decode::specs(variant));
    let choosers = Chooser::ALL.into_iter().filter(move |chooser| chooser.serves(variant));
    of_hopper.chain(mma::specs(variant)).chain(choosers.map(move |chooser| chooser.source(variant)))
}

/// A top-k kernel with one CTA per query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chooser {
    /// Top-k over all scores.
    Scores,
    /// Finds the gathering thresholds.
    Bound,
    /// Top-k over gathered keys.
    Gathered,
}

impl Chooser {
    const ALL: [Self; 3] = [Self::Scores, Self::Bound, Self::Gathered];

    /// Gathering is supported on Hopper only.
    fn serves(self, variant: Variant) -> bool {
        self == Self::Scores || variant == Variant::Sm90
    }

    /// Kernel step, entry and symbol.
    fn names(self) -> (IndexerStep, &'static str, &'static str) {
        match self {
            Self::Scores => (IndexerStep::Choose, "entry/indexer_choose.cu", "qg_indexer_choose"),
            Self::Bound => (IndexerStep::Bound, "entry/indexer_bound.cu", "qg_indexer_bound"),
            Self::Gathered => {
                (IndexerStep::ChooseGathered, "entry/indexer_choose_gathered.cu", "qg_indexer_choose_gathered")
            }
        }
    }

    fn id(self, variant: Variant) -> KernelId {
        // It reads nothing but scores.
        let x = qgemm_hal::KvFormat::Plain(qgemm_formats::DType::F32);
        let spec = IndexerSpec::of(self.names().0, x, 0, 0);
        KernelId::new("indexer_choose", Some(variant), Spec::Indexer(spec))
    }

    fn source(self, variant: Variant) -> KernelSpec {
        let (_, entry, symbol) = self.names();
        let prelude =
            Prelude { threads: Some(CHOOSE_THREADS), shared_bytes: Some(CHOOSE_SHARED_BYTES), ..Prelude::of(variant) };
        let name = self.id(variant).to_string();
        KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: false }
    }

    /// A launch for the queries of `part`.
    fn launch(self, variant: Variant, part: Part, params: IndexerParams) -> KernelLaunch {
        KernelLaunch {
            id: self.id(variant),
            spec: self.source(variant),
            geometry: Geometry {
                grid: [part.queries as u32, 1, 1],
                threads: CHOOSE_THREADS,
                shared_bytes: CHOOSE_SHARED_BYTES,
            },
            starts_early: variant >= Variant::Sm90,
            operands: IndexerOperand::ALL,
            updated: None,
            params: Arc::new(params),
        }
    }
}

impl Params for IndexerParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&at_operands(self, operands, at)?))
    }
}

/// Fills in the addresses.
fn at_operands(params: &IndexerParams, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<IndexerParams, HalError> {
    use IndexerOperand as O;
    let mut params = *params;
    let pointers = [
        (&mut params.q, O::Q),
        (&mut params.k, O::K),
        (&mut params.weights, O::Weights),
        (&mut params.q_scales, O::QScales),
        (&mut params.k_scales, O::KScales),
        (&mut params.starts, O::Starts),
        (&mut params.ends, O::Ends),
        (&mut params.lengths, O::Lengths),
        (&mut params.block_table, O::BlockTable),
        (&mut params.indices, O::Indices),
    ];
    at.fill(operands, pointers)?;
    let kept = operands.get(O::Workspace).is_some();
    params.scores = at.of(operands, if kept { O::Workspace } else { O::Scores })?;
    // So far relative to the workspace.
    if params.query_states > 0 {
        params.query_states += params.scores;
        params.found += params.scores;
        params.found_header += params.scores;
    }
    Ok(params)
}

/// Config of `kernel` with launches split by `cut`, for as many
/// query parts as the workspace requires.
fn offered(
    op: &CheckedIndexer,
    info: &DeviceInfo,
    kernel: KernelId,
    cut: impl Fn(Part) -> Cut,
    math: Math,
    padding: f64,
    efficiency: (u32, u32),
) -> Result<Vec<IndexerConfig>, Unsupported> {
    let chooses = op.chosen() > 0;
    let most_bytes = usize::try_from(info.memory_bytes / 4).unwrap_or(usize::MAX);
    let part_queries = if chooses { op.part_queries(most_bytes) } else { op.queries };
    let part = Part { first: 0, queries: part_queries };
    if cut(part).ctas(op, part).2.is_none() {
        return Err(Unsupported::new("counts CTAs in 31 bits: ask for fewer queries at once"));
    }
    let parts = op.queries.div_ceil(part_queries) as u32;
    Ok(vec![IndexerConfig {
        kernel,
        launches: parts * (u32::from(op.most_keys() > 0) + u32::from(chooses)),
        part_queries,
        workspace_bytes: if chooses { op.score_bytes(part_queries) } else { 0 },
        math,
        padding,
        efficiency,
    }])
}

/// Queries of a launch.
#[derive(Clone, Copy, Debug)]
struct Part {
    first: usize,
    queries: usize,
}

/// Split of a scoring launch.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Keys of a CTA.
    keys: usize,
    /// Queries of a CTA.
    queries: usize,
    /// Distance between scored keys.
    key_step: usize,
}

/// Split of a launch with one CTA per query.
const WHOLE: Cut = Cut { keys: 1, queries: 1, key_step: 1 };

impl Cut {
    /// CTAs along the keys, CTAs along the queries of a
    /// sequence, and total CTAs.
    fn ctas(&self, op: &CheckedIndexer, part: Part) -> (usize, usize, Option<usize>) {
        let (_, each) = op.sequences();
        let each = each.min(part.queries).max(1);
        let scored = op.most_keys().div_ceil(self.key_step);
        let (along_keys, along_queries) = (scored.div_ceil(self.keys), each.div_ceil(self.queries));
        let all = along_keys.checked_mul(along_queries).and_then(|ctas| ctas.checked_mul(part.queries / each));
        (along_keys, along_queries, all.filter(|&ctas| i32::try_from(ctas).is_ok()))
    }
}

/// Workspace contents.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    /// Offset of the part's notes; 0 without notes.
    query_states: u64,
    /// Offsets of the gathered scores and of the header.
    found: u64,
    found_header: u64,
    /// Row stride of scores or records when not
    /// all scores are kept.
    row: Option<u64>,
    /// Chunks of scores that are not initially assigned to a warp.
    spare_chunks: u32,
    /// Keys to gather for a query.
    aim: u32,
}

/// Kernel parameters without addresses. `cut` is unused for top-k.
fn params(op: &CheckedIndexer, part: Part, cut: Cut, kept: Kept) -> IndexerParams {
    let Paging { pages, page_size, width } = op.paging();
    let (_, each) = op.sequences();
    let (key_ctas, query_ctas, _) = cut.ctas(op, part);
    let scores_row = match op.result {
        IndexerResult::Scores { row_stride } => row_stride,
        IndexerResult::Best { .. } => op.kept_stride() as u64,
    };
    IndexerParams {
        q_token: op.q.token_stride,
        q_head: op.q.head_stride,
        weights_row: op.weights_stride,
        k_page: op.k.page_stride,
        k_row: op.k.row_stride,
        k_scale_page: op.k.scale_page_stride,
        scores_row: kept.row.unwrap_or(scores_row),
        first_query: part.first as u32,
        cta_keys: cut.keys as u32,
        heads: op.heads as u32,
        features: op.features as u32,
        most_keys: op.most_keys() as u32,
        sequence_queries: each.min(part.queries) as u32,
        query_ctas: query_ctas as u32,
        cta_queries: cut.queries as u32,
        key_ctas: key_ctas as u32,
        pages: pages as u32,
        page_size: page_size as u32,
        table_width: width as u32,
        chosen: op.chosen() as u32,
        q_aligned: u32::from(op.q.aligned),
        k_aligned: u32::from(op.k.aligned),
        masked_score: MASKED_SCORE[usize::from(op.chosen() > 0)],
        query_states: kept.query_states,
        key_step: cut.key_step as u32,
        columns: op.most_keys().div_ceil(cut.key_step) as u32,
        found: kept.found,
        found_header: kept.found_header,
        spare_chunks: kept.spare_chunks,
        aim: kept.aim,
        ..IndexerParams::default()
    }
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, [`HalError::KernelUnavailable`] when the plan is of
/// another backend's family, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedIndexer,
    plan: &IndexerLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let IndexerConfig { kernel, part_queries, workspace_bytes, .. } = plan.config;
    let scorer = match Scorer::of(&kernel) {
        // Without keys, nothing is scored.
        None if kernel == Chooser::Scores.id(variant) => None,
        None => return Err(unknown_family(&kernel, info)),
        scorer => scorer,
    };
    let gathering = Gathering::of(op, info).filter(|_| scorer == Some(Scorer::Wgmma));
    let mut launches = Vec::new();
    for whole in parts(Part { first: 0, queries: op.queries }, gathering.map_or(op.queries, |all| all.part_queries)) {
        if let Some(gathering) = gathering {
            launches.extend(gathering.launch(op, whole, info, variant));
        }
        // When keys are gathered: retries the queries whose threshold was wrong.
        for part in parts(whole, part_queries) {
            let kept = gathering.map_or(Kept::default(), |all| all.kept(part.first - whole.first));
            if let Some(scorer) = scorer {
                launches.push(match scorer {
                    Scorer::Wgmma => wgmma::launch(op, part, info, 1, false, kept),
                    Scorer::DecodeTma => decode_tma::launch(op, kernel, part, info),
                    Scorer::Decode => decode::launch(op, kernel, part, info),
                    Scorer::Mma => mma::launch(op, kernel, part, info, variant),
                });
            }
            if op.chosen() > 0 {
                launches.push(Chooser::Scores.launch(variant, part, params(op, part, WHOLE, kept)));
            }
        }
    }
    let step = |launch: KernelLaunch| Ok(bound(op, launch.step::<IndexerOperand>(make)?, workspace_bytes));
    let steps = launches.into_iter().map(step).collect::<Result<Vec<_>, HalError>>()?;
    Ok(LaunchSequence::new::<IndexerOperand>(format!("{}_{}", kernel.family, op.format), steps))
}

/// The queries of `whole`, in parts of `queries`.
fn parts(whole: Part, queries: usize) -> impl Iterator<Item = Part> {
    let end = whole.first + whole.queries;
    (whole.first..end).step_by(queries.max(1)).map(move |first| Part { first, queries: (end - first).min(queries) })
}

/// Binds a step to the operation's operands, and
/// top-k data to the workspace.
fn bound(op: &CheckedIndexer, step: LaunchStep, workspace_bytes: usize) -> LaunchStep {
    use IndexerOperand as O;
    let step = step.bind_all(op.operands());
    match op.chosen() {
        0 => step,
        _ => step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..workspace_bytes),
    }
}

//! `indexer`: scores by matrix instructions, and the keys with the highest, which are chosen from scores in the workspace.

mod decode;
mod decode_tma;
mod mapped;
mod mma;
mod wgmma;

use std::sync::Arc;

use qgemm_hal::abi::IndexerParams;
use qgemm_hal::{
    CheckedIndexer, DeviceInfo, Geometry, HalError, IndexerConfig, IndexerFamilies, IndexerLaunch, IndexerOperand,
    IndexerResult, IndexerSpec, KernelId, LaunchSequence, LaunchStep, Math, Name, Operand, Operands, Operation, Paging,
    Spec, Unsupported, Variant, WorkspaceLayout,
};

use super::kernel_launch::{KernelLaunch, MakeKernel, Params, Places};
use super::launch_params::LaunchParams;
use super::prelude::{constant_line, macro_line};
use crate::source;
use crate::spec::KernelSpec;

/// What CUDA devices offer.
pub(super) const FAMILIES: IndexerFamilies =
    &[&wgmma::IndexerWgmma, &decode_tma::IndexerDecodeTma, &decode::IndexerDecode, &mma::IndexerMma];

/// Threads of a CTA that chooses keys for a query.
const CHOOSE_THREADS: u32 = 512;
/// `SharedStorage` of `entry/indexer_choose.cu`.
const CHOOSE_SHARED_BYTES: u32 = 4096 * 8 + 2048 * 4 + CHOOSE_THREADS / 32 * 4 + 4 * 4;
/// Bits of the score of a key that a query does not see: minus infinity, and where keys are chosen, what no score has.
const NOT_SEEN: [u32; 2] = [0xff80_0000, u32::MAX];

/// Every kernel of the families on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_hopper = wgmma::specs(variant).chain(decode_tma::specs(variant)).chain(decode::specs(variant));
    of_hopper.chain(mma::specs(variant)).chain([choose_source(variant)])
}

fn choose_id(variant: Variant) -> KernelId {
    // Scores are all that it reads.
    let x = qgemm_hal::KvFormat::Plain(qgemm_formats::DType::F32);
    let spec = IndexerSpec { step: Name::new("choose"), x, features: 0, keys: 0 };
    KernelId::new("indexer_choose", Some(variant), Spec::Indexer(spec))
}

fn choose_source(variant: Variant) -> KernelSpec {
    let entry = "entry/indexer_choose.cu";
    let mut prelude = String::new();
    macro_line(&mut prelude, "QG_VARIANT", &variant.number().to_string());
    constant_line(&mut prelude, "QG_THREADS", CHOOSE_THREADS);
    constant_line(&mut prelude, "QG_SHARED_BYTES", CHOOSE_SHARED_BYTES);
    let (name, symbol) = (choose_id(variant).to_string(), "qg_indexer_choose");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude, arch_specific: false }
}

impl Params for IndexerParams {
    fn with(&self, operands: &Operands<'_>, at: &Places<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&at_operands(self, operands, at)?))
    }
}

/// The parameters with addresses.
fn at_operands(params: &IndexerParams, operands: &Operands<'_>, at: &Places<'_>) -> Result<IndexerParams, HalError> {
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
    for (pointer, operand) in pointers {
        *pointer = at.of(operands, operand)?;
    }
    let kept = operands.get(O::Workspace).is_some();
    params.scores = at.of(operands, if kept { O::Workspace } else { O::Scores })?;
    Ok(params)
}

/// The configuration of `kernel`, whose launches are cut by `cut`, for queries in as many parts as the workspace asks for.
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

/// How a launch of a scoring kernel is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Keys of a CTA.
    keys: usize,
    /// Queries of a CTA.
    queries: usize,
}

impl Cut {
    /// CTAs along the keys, those along the queries of a sequence, and all of a launch.
    fn ctas(&self, op: &CheckedIndexer, part: Part) -> (usize, usize, Option<usize>) {
        let (_, each) = op.sequences();
        let each = each.min(part.queries).max(1);
        let (along_keys, along_queries) = (op.most_keys().div_ceil(self.keys), each.div_ceil(self.queries));
        let all = along_keys.checked_mul(along_queries).and_then(|ctas| ctas.checked_mul(part.queries / each));
        (along_keys, along_queries, all.filter(|&ctas| i32::try_from(ctas).is_ok()))
    }
}

/// All parameters but addresses; `cut` plays no part where keys are chosen.
fn params(op: &CheckedIndexer, part: Part, cut: Cut) -> IndexerParams {
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
        scores_row,
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
        not_seen: NOT_SEEN[usize::from(op.chosen() > 0)],
        ..IndexerParams::default()
    }
}

/// The launches of a plan, whose kernels `make` makes ready.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel variant, and those of `make`.
pub fn indexer_sequence(
    op: &CheckedIndexer,
    plan: &IndexerLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let IndexerConfig { kernel, part_queries, .. } = plan.config;
    let mut steps = Vec::new();
    for first in (0..op.queries).step_by(part_queries.max(1)) {
        let part = Part { first, queries: (op.queries - first).min(part_queries) };
        if op.most_keys() > 0 {
            let launch = match kernel.family.as_str() {
                wgmma::NAME => wgmma::launch(op, kernel, part, info),
                decode_tma::NAME => decode_tma::launch(op, kernel, part, info),
                decode::NAME => decode::launch(op, kernel, part, info),
                _ => mma::launch(op, kernel, part, info, variant),
            };
            steps.push(bound(op, launch.step::<IndexerOperand>(make)?, part));
        }
        if op.chosen() > 0 {
            steps.push(bound(op, choose_launch(op, part, variant).step::<IndexerOperand>(make)?, part));
        }
    }
    Ok(LaunchSequence::new::<IndexerOperand>(format!("{}_{}", kernel.family, op.format), steps))
}

/// A step with the operands of the operation, its scores in the workspace where keys are chosen.
fn bound(op: &CheckedIndexer, step: LaunchStep, part: Part) -> LaunchStep {
    use IndexerOperand as O;
    let step = op.operands().into_iter().fold(step, |step, operand| step.bind(operand, operand));
    match op.chosen() {
        0 => step,
        _ => step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..op.score_bytes(part.queries)),
    }
}

fn choose_launch(op: &CheckedIndexer, part: Part, variant: Variant) -> KernelLaunch {
    KernelLaunch {
        id: choose_id(variant),
        spec: choose_source(variant),
        geometry: Geometry {
            grid: [part.queries as u32, 1, 1],
            threads: CHOOSE_THREADS,
            shared_bytes: CHOOSE_SHARED_BYTES,
        },
        starts_early: variant >= Variant::Sm90,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(params(op, part, Cut { keys: 1, queries: 1 })),
    }
}

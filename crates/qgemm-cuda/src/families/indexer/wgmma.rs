//! `indexer_wgmma`: scores of E4M3 keys for many queries on Hopper.

use std::sync::Arc;

use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Family, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerSpec, IndexerStep, KernelId, KvFormat, LaunchSequence, Math, Operand, Spec, Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, load};
use super::super::prelude::Prelude;
use super::mapped::{Mapped, MappedOperand};
use super::{Cut, Kept, Part, gather, offered, params};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::{MapElement, MapSwizzle, TileMap};

/// Family name.
pub(super) const NAME: &str = "indexer_wgmma";
/// Consumer threads: a warpgroup for every 64 keys.
const CONSUMERS: u32 = 512;
/// Threads of a CTA, including a producer warpgroup
/// for heads and weights.
const THREADS: u32 = CONSUMERS + 128;
/// Keys of a CTA.
pub(super) const KEYS: u32 = CONSUMERS / 128 * 64;
/// Features of a stage's rows.
const FEATURES: u32 = 128;
/// Columns of a stage.
const STAGE_COLUMNS: u32 = 512;
/// Stages of shared memory.
const STAGES: u32 = 3;
/// Supported head counts. Others are padded to the next one.
const HEADS: [u32; 2] = [32, 64];
/// Maximum queries of a CTA.
const MOST_QUERIES: u32 = 512;
/// Minimum queries of a sequence for which keys in registers pay.
const LEAST_QUERIES: usize = 16;
/// Maximum head or query stride in bytes (`cuTensorMapEncodeTiled`).
const MOST_STRIDE: u64 = 1 << 40;
/// Expected shares of the bandwidth and of the
/// matrix rate, per mille.
const EFFICIENCY: (u32, u32) = (700, 550);

/// The kernel family.
#[derive(Debug)]
pub(super) struct IndexerWgmma;

/// Kernel specialization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Columns {
    /// Columns of a query.
    heads: u32,
    /// Whether keys above a threshold are gathered instead of storing scores.
    gathers: bool,
}

impl Columns {
    fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|gathers| HEADS.map(|heads| Self { heads, gathers }))
    }

    /// The kernel for `heads` heads.
    fn of(heads: usize, gathers: bool) -> Self {
        let heads = HEADS.into_iter().find(|&most| most as usize >= heads).unwrap_or(HEADS[0]);
        Self { heads, gathers }
    }

    fn spec(self) -> IndexerSpec {
        let step = if self.gathers { IndexerStep::Gather } else { IndexerStep::Score };
        IndexerSpec { heads: self.heads, ..IndexerSpec::of(step, KvFormat::E4M3, FEATURES, KEYS) }
    }

    /// Columns of the kernel with these keys.
    fn of_spec(spec: &IndexerSpec) -> Self {
        Self { heads: spec.heads, gathers: spec.step == IndexerStep::Gather }
    }

    /// `SharedStorage` of `entry/sm90_indexer_wgmma_ws.cu`.
    fn shared_bytes(self) -> u32 {
        let stage = STAGE_COLUMNS * (FEATURES + 4) + STAGE_COLUMNS / self.heads * 16 + 16;
        let of_query = if self.gathers { 4 } else { 3 };
        (STAGES * stage + (of_query * MOST_QUERIES + MOST_QUERIES / 32) * 4 + CONSUMERS * 16).next_multiple_of(16)
    }
}

fn id(spec: IndexerSpec) -> KernelId {
    KernelId::new(NAME, Some(Variant::Sm90), Spec::Indexer(spec))
}

fn source(columns: Columns) -> KernelSpec {
    let entry = "entry/sm90_indexer_wgmma_ws.cu";
    let prelude = Prelude {
        gathers: Some(columns.gathers.into()),
        threads: Some(THREADS),
        consumers: Some(CONSUMERS),
        heads: Some(columns.heads),
        stage_columns: Some(STAGE_COLUMNS),
        queries: Some(MOST_QUERIES),
        stages: Some(STAGES),
        shared_bytes: Some(columns.shared_bytes()),
        ..Prelude::of(Variant::Sm90)
    };
    let (name, symbol) = (id(columns.spec()).to_string(), "qg_sm90_indexer_wgmma_ws");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: true }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    Columns::all().filter(move |_| variant == Variant::Sm90).map(source)
}

/// Warps of all CTAs that score all keys for `part`, with
/// 16 keys each; `None` when there are too many.
pub(super) fn warps(op: &CheckedIndexer, part: Part, info: &DeviceInfo) -> Option<usize> {
    let columns = Columns::of(op.heads, true);
    let (_, _, ctas) = cut(op, columns.heads, part, 1, info).ctas(op, part);
    ctas.map(|ctas| ctas * (CONSUMERS / 32) as usize)
}

/// Queries and keys of a CTA when every
/// `key_step`-th key is scored.
fn cut(op: &CheckedIndexer, heads: u32, part: Part, key_step: usize, info: &DeviceInfo) -> Cut {
    let (sequences, each) = op.sequences();
    let each = each.min(part.queries).max(1);
    let scored = op.most_keys().div_ceil(key_step);
    let ctas = scored.div_ceil(KEYS as usize) * sequences.min(part.queries.div_ceil(each));
    let of_stage = (STAGE_COLUMNS / heads) as usize;
    let queries = cta_queries(each, ctas.max(1), info.units.max(1) as usize, of_stage);
    Cut { keys: KEYS as usize, queries, key_step }
}

/// Queries of a CTA, out of `each`. A stage has
/// `of_stage` queries, each query part has `ctas` CTAs,
/// and `units` CTAs run concurrently.
///
/// As many as possible, but the CTAs of the last part
/// should fill the last wave.
fn cta_queries(each: usize, ctas: usize, units: usize, of_stage: usize) -> usize {
    let cost = |queries: usize| {
        // Starting and ending a CTA takes about as
        // long as half a stage.
        let (whole, whole_ctas, rest) = (queries + of_stage / 2, ctas * (each / queries), each % queries);
        let of_whole = whole_ctas.div_ceil(units) * whole;
        if rest == 0 {
            return of_whole;
        }
        let last = rest + of_stage / 2;
        of_whole.max((whole_ctas * whole + ctas * last).div_ceil(units) + last)
    };
    let most_stages = each.min(MOST_QUERIES as usize).div_ceil(of_stage);
    (1..=most_stages).rev().map(|stages| stages * of_stage).min_by_key(|&queries| cost(queries)).unwrap_or(of_stage)
}

/// Byte strides of heads and queries. A stride over a single
/// element is replaced by a valid one.
fn strides(op: &CheckedIndexer) -> [u64; 2] {
    let head = if op.heads > 1 { op.q.head_stride } else { u64::from(FEATURES) };
    [head, if op.queries > 1 { op.q.token_stride } else { head * op.heads as u64 }]
}

impl Family<CheckedIndexer> for IndexerWgmma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        if info.variant != Some(Variant::Sm90) {
            return Err(Unsupported::new("runs on Hopper only"));
        }
        let has_room = op.features <= FEATURES as usize && op.heads <= HEADS[1] as usize;
        if op.format != KvFormat::E4M3 || !has_room || op.most_keys() == 0 {
            let why = format!("multiplies keys in E4M3 of up to {FEATURES} features with up to {} heads", HEADS[1]);
            return Err(Unsupported::new(why));
        }
        let (_, each) = op.sequences();
        if each < LEAST_QUERIES {
            return Err(Unsupported::new(format!("is for {LEAST_QUERIES} queries a sequence and more")));
        }
        let is_strided =
            strides(op).into_iter().all(|stride| stride.is_multiple_of(16) && (1..MOST_STRIDE).contains(&stride));
        if !op.q.aligned || !op.k.aligned || !is_strided {
            return Err(Unsupported::new("reads queries and keys whose rows begin at multiples of 16 bytes"));
        }
        let columns = Columns::of(op.heads, false);
        check_shared(Columns { gathers: true, ..columns }.shared_bytes(), info)?;
        let padding = f64::from(columns.heads * FEATURES) / (op.heads * op.features) as f64;
        let cut = |part| cut(op, columns.heads, part, 1, info);
        let mut configs = offered(op, info, id(columns.spec()), cut, Math::TensorFp8, padding, EFFICIENCY)?;
        if let Some(gathering) = gather::Gathering::of(op, info) {
            for config in &mut configs {
                config.part_queries = gathering.score_queries;
                config.launches = gathering.launches(op);
                config.workspace_bytes = gathering.workspace_bytes();
            }
        }
        Ok(configs)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedIndexer,
        plan: &IndexerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        super::sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedIndexer, config: &IndexerConfig) -> u64 {
        match config.kernel.spec {
            Spec::Indexer(spec) => source(Columns::of_spec(&spec)).source_hash().short(),
            _ => 0,
        }
    }
}

/// TMA map of the queries: a box has all heads of
/// one query, zero-padded.
fn q_map(op: &CheckedIndexer, heads: u32) -> TileMap {
    let [head, query] = strides(op);
    TileMap {
        address: 0,
        element: MapElement::Byte,
        dimensions: 3,
        size: [op.features as u64, op.heads as u64, op.queries as u64, 1, 1],
        strides: [head, query, 0, 0],
        tile: [FEATURES, heads, 1, 1, 1],
        swizzle: MapSwizzle::Bytes128,
    }
}

/// The launch that scores every `key_step`-th key for `part`, and
/// stores scores, or with `gathers` keys.
pub(super) fn launch(
    op: &CheckedIndexer,
    part: Part,
    info: &DeviceInfo,
    key_step: usize,
    gathers: bool,
    kept: Kept,
) -> KernelLaunch {
    let columns = Columns::of(op.heads, gathers);
    let cut = cut(op, columns.heads, part, key_step, info);
    let (_, _, ctas) = cut.ctas(op, part);
    let indexer = params(op, part, cut, kept);
    KernelLaunch {
        id: id(columns.spec()),
        spec: source(columns),
        geometry: Geometry {
            // `configs` checked that the count fits.
            grid: [ctas.unwrap_or(0) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: columns.shared_bytes(),
        },
        starts_early: true,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(Mapped { indexer, map: q_map(op, columns.heads), of: MappedOperand::Queries }),
    }
}

#[cfg(test)]
mod tests {
    use super::cta_queries;

    #[test]
    fn ctas_make_whole_waves() {
        // 65536 keys: 256 CTAs for each part of the queries;
        // the last part is small.
        assert_eq!([cta_queries(2048, 256, 132, 8), cta_queries(512, 256, 132, 8)], [504, 504]);
        // 4096 keys: 16 CTAs.
        assert_eq!(cta_queries(2048, 16, 132, 8), 256);
        // One part.
        assert_eq!([cta_queries(16, 1, 132, 16), cta_queries(17, 4, 132, 8), cta_queries(1, 1, 1, 8)], [16, 8, 8]);
    }
}

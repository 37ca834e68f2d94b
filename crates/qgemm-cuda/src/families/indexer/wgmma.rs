//! `indexer_wgmma`: scores of E4M3 keys on Hopper, for many queries.

use std::sync::Arc;

use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Family, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerSpec, KernelId, KvFormat, LaunchSequence, Math, Name, Operand, Spec, Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, load};
use super::super::prelude::{constant_line, macro_line};
use super::mapped::{Mapped, MappedOperand};
use super::{Cut, Part, offered, params};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::{MapElement, MapSwizzle, TileMap};

/// Name of the family.
pub(super) const NAME: &str = "indexer_wgmma";
/// Threads that multiply: a warpgroup for 64 keys.
const CONSUMERS: u32 = 512;
/// Those, and a warpgroup that copies heads and weights.
const THREADS: u32 = CONSUMERS + 128;
/// Keys of a CTA.
const KEYS: u32 = CONSUMERS / 128 * 64;
/// Features of a stage's rows.
const FEATURES: u32 = 128;
/// Columns of a stage.
const STAGE_COLUMNS: u32 = 512;
/// Stages of shared memory.
const STAGES: u32 = 3;
/// Heads that there are kernels for; others take the next larger ones.
const HEADS: [u32; 2] = [32, 64];
/// Most queries of a CTA.
const MOST_QUERIES: u32 = 512;
/// Queries of a sequence from which on keys that stay in registers pay.
const LEAST_QUERIES: usize = 16;
/// Most bytes from a head or a query to the next (`cuTensorMapEncodeTiled`).
const MOST_STRIDE: u64 = 1 << 40;
/// Shares of the bandwidth and of the rate of matrix instructions that the kernels should reach, per mille.
const EFFICIENCY: (u32, u32) = (700, 550);

/// The family.
#[derive(Debug)]
pub(super) struct IndexerWgmma;

fn spec_of(heads: u32) -> IndexerSpec {
    let step = Name::new(if heads > HEADS[0] { "score_heads64" } else { "score_heads32" });
    IndexerSpec { step, x: KvFormat::E4M3, features: FEATURES, keys: KEYS }
}

/// Columns of a query.
fn columns_of(spec: &IndexerSpec) -> u32 {
    HEADS[usize::from(*spec == spec_of(HEADS[1]))]
}

/// `SharedStorage` of `entry/sm90_indexer_wgmma_ws.cu`.
fn shared_bytes(spec: &IndexerSpec) -> u32 {
    let stage = STAGE_COLUMNS * (FEATURES + 4) + STAGE_COLUMNS / columns_of(spec) * 16 + 16;
    (STAGES * stage + (3 * MOST_QUERIES + MOST_QUERIES / 32) * 4 + CONSUMERS * 16).next_multiple_of(16)
}

fn id(spec: IndexerSpec) -> KernelId {
    KernelId::new(NAME, Some(Variant::Sm90), Spec::Indexer(spec))
}

fn source(spec: IndexerSpec) -> KernelSpec {
    let entry = "entry/sm90_indexer_wgmma_ws.cu";
    let mut prelude = String::new();
    macro_line(&mut prelude, "QG_VARIANT", &Variant::Sm90.number().to_string());
    constant_line(&mut prelude, "QG_THREADS", THREADS);
    constant_line(&mut prelude, "QG_CONSUMERS", CONSUMERS);
    constant_line(&mut prelude, "QG_HEADS", columns_of(&spec));
    constant_line(&mut prelude, "QG_STAGE_COLUMNS", STAGE_COLUMNS);
    constant_line(&mut prelude, "QG_QUERIES", MOST_QUERIES);
    constant_line(&mut prelude, "QG_STAGES", STAGES);
    constant_line(&mut prelude, "QG_SHARED_BYTES", shared_bytes(&spec));
    let (name, symbol) = (id(spec).to_string(), "qg_sm90_indexer_wgmma_ws");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude, arch_specific: true }
}

/// Every kernel of the family on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    HEADS.into_iter().filter(move |_| variant == Variant::Sm90).map(|heads| source(spec_of(heads)))
}

/// Queries and keys of a CTA.
fn cut(op: &CheckedIndexer, spec: &IndexerSpec, part: Part, info: &DeviceInfo) -> Cut {
    let (sequences, each) = op.sequences();
    let each = each.min(part.queries).max(1);
    let ctas = op.most_keys().div_ceil(KEYS as usize) * sequences.min(part.queries.div_ceil(each));
    let of_stage = (STAGE_COLUMNS / columns_of(spec)) as usize;
    Cut { keys: KEYS as usize, queries: cta_queries(each, ctas.max(1), info.units.max(1) as usize, of_stage) }
}

/// How many of `each` queries a CTA has, of which a stage has `of_stage`, where each part of them has `ctas` CTAs and `units` run at once:
/// the most but for the last part's, whose CTAs fill what the last wave leaves.
fn cta_queries(each: usize, ctas: usize, units: usize, of_stage: usize) -> usize {
    let cost = |queries: usize| {
        // A CTA begins and ends for as long as it takes for half a stage.
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

/// Bytes from a head to the next, and from a query to the next; of what there is one of, as if there were more.
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
        let spec = spec_of(op.heads as u32);
        check_shared(shared_bytes(&spec), info)?;
        let padding = f64::from(columns_of(&spec) * FEATURES) / (op.heads * op.features) as f64;
        offered(op, info, id(spec), |part| cut(op, &spec, part, info), Math::TensorFp8, padding, EFFICIENCY)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedIndexer,
        plan: &IndexerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        super::indexer_sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedIndexer, config: &IndexerConfig) -> u64 {
        match config.kernel.spec {
            Spec::Indexer(spec) => source(spec).source_hash().short(),
            _ => 0,
        }
    }
}

/// Queries: a box has all heads of one, and zeros behind them.
fn q_map(op: &CheckedIndexer, spec: &IndexerSpec) -> TileMap {
    let [head, query] = strides(op);
    TileMap {
        address: 0,
        element: MapElement::Byte,
        dimensions: 3,
        size: [op.features as u64, op.heads as u64, op.queries as u64, 1, 1],
        strides: [head, query, 0, 0],
        tile: [FEATURES, columns_of(spec), 1, 1, 1],
        swizzle: MapSwizzle::Bytes128,
    }
}

/// The launch that scores `part`.
pub(super) fn launch(op: &CheckedIndexer, kernel: KernelId, part: Part, info: &DeviceInfo) -> KernelLaunch {
    let Spec::Indexer(spec) = kernel.spec else { unreachable!("a configuration is of a kernel of the indexer") };
    let cut = cut(op, &spec, part, info);
    let (_, _, ctas) = cut.ctas(op, part);
    KernelLaunch {
        id: kernel,
        spec: source(spec),
        geometry: Geometry {
            // `configs` found that they can be counted.
            grid: [ctas.unwrap_or(0) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: shared_bytes(&spec),
        },
        starts_early: true,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(Mapped { indexer: params(op, part, cut), map: q_map(op, &spec), of: MappedOperand::Queries }),
    }
}

#[cfg(test)]
mod tests {
    use super::cta_queries;

    #[test]
    fn ctas_make_whole_waves() {
        // 65536 keys: 256 CTAs for each part of the queries, of which the last is small.
        assert_eq!([cta_queries(2048, 256, 132, 8), cta_queries(512, 256, 132, 8)], [504, 504]);
        // 4096 keys: 16 CTAs.
        assert_eq!(cta_queries(2048, 16, 132, 8), 256);
        // One part.
        assert_eq!([cta_queries(16, 1, 132, 16), cta_queries(17, 4, 132, 8), cta_queries(1, 1, 1, 8)], [16, 8, 8]);
    }
}

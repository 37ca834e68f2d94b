//! `indexer_mma`: scores with `mma.sync`. A warp
//! keeps its keys in registers.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::op::indexer::{FORMATS, MOST_FEATURES};
use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Family, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerSpec, IndexerStep, KernelId, KvFormat, LaunchSequence, Math, Operand, Spec, Unsupported, Variant,
};

use super::super::attention::params::kv_code;
use super::super::kernel_launch::{KernelLaunch, load};
use super::super::prelude::Prelude;
use super::{Cut, Kept, Part, offered, params};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "indexer_mma";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Supported feature counts. Others are padded to the next one.
const FEATURES: [u32; 3] = [64, 128, 256];
/// Maximum queries of a CTA.
const MOST_QUERIES: usize = 64;
/// CTAs per SM that balance the load. More CTAs would have
/// fewer queries each and load keys more often.
const CTAS_PER_UNIT: usize = 16;
/// Heads of an `mma`.
const MMA_HEADS: usize = 8;
/// Expected shares of the bandwidth and of the
/// matrix rate, per mille.
const EFFICIENCY: (u32, u32) = (700, 450);

const _: () = assert!(MOST_FEATURES <= FEATURES[2] as usize);

/// The kernel family.
#[derive(Debug)]
pub(super) struct IndexerMma;

/// Whether `mma` supports E4M3. Elsewhere keys are converted to f16; on
/// Hopper the compiler would convert them for each `mma`.
fn takes_e4m3(variant: Variant) -> bool {
    matches!(variant, Variant::Sm89 | Variant::Sm120)
}

/// Bytes of a feature in shared memory.
fn operand_bytes(x: KvFormat, variant: Variant) -> u32 {
    if x.is_plain() || !takes_e4m3(variant) { 2 } else { 1 }
}

fn spec_of(x: KvFormat, features: usize, variant: Variant) -> Option<IndexerSpec> {
    if x == KvFormat::Plain(DType::BF16) && variant < Variant::Sm80 {
        return None;
    }
    let features = FEATURES.into_iter().find(|&most| most as usize >= features)?;
    // Sixteen long keys need as many registers as 32 keys of
    // half the bytes. Volta's `mma` needs 32.
    let is_long = features * operand_bytes(x, variant) > 256;
    let warp_keys = if is_long && variant > Variant::Sm70 { 16 } else { 32 };
    Some(IndexerSpec::of(IndexerStep::Score, x, features, THREADS / 32 * warp_keys))
}

/// Heads that are staged in shared memory together.
fn stage_heads(spec: &IndexerSpec, variant: Variant) -> u32 {
    if spec.features * operand_bytes(spec.x, variant) > 256 { 32 } else { 64 }
}

/// Stages in shared memory; with cp.async the prefetch distance is two.
fn stages(variant: Variant) -> u32 {
    if variant >= Variant::Sm80 { 3 } else { 2 }
}

/// `SharedStorage` of `entry/sm70_indexer_mma.cu`.
fn shared_bytes(spec: &IndexerSpec, variant: Variant) -> u32 {
    let stage = stage_heads(spec, variant) * (spec.features * operand_bytes(spec.x, variant) + 8);
    stages(variant) * stage + (3 * MOST_QUERIES as u32 + 2) * 4
}

fn id(spec: IndexerSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Indexer(spec))
}

fn source(spec: IndexerSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm70_indexer_mma.cu";
    let prelude = Prelude {
        threads: Some(THREADS),
        x: Some(kv_code(spec.x)),
        features: Some(spec.features),
        keys: Some(spec.keys),
        heads: Some(stage_heads(&spec, variant)),
        stages: Some(stages(variant)),
        shared_bytes: Some(shared_bytes(&spec, variant).next_multiple_of(16)),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_indexer_mma");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: false }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let all = FORMATS.into_iter().flat_map(|x| FEATURES.map(|features| (x, features)));
    let all = all.filter_map(move |(x, features)| spec_of(x, features as usize, variant));
    all.map(move |spec| source(spec, variant))
}

/// Queries and keys of a CTA: as many queries as
/// keep the device busy.
fn cut(op: &CheckedIndexer, spec: &IndexerSpec, part: Part, info: &DeviceInfo) -> Cut {
    let keys = spec.keys as usize;
    let (sequences, each) = op.sequences();
    let wanted = (CTAS_PER_UNIT * info.units as usize).max(1);
    let key_ctas = (op.most_keys().div_ceil(keys) * sequences).max(1);
    let queries = (each.min(part.queries) * key_ctas / wanted).clamp(1, MOST_QUERIES);
    Cut { keys, queries, key_step: 1 }
}

impl Family<CheckedIndexer> for IndexerMma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let spec = spec_of(op.format, op.features, variant);
        let spec = spec.ok_or_else(|| Unsupported::new(format!("multiplies no {} before Ampere", op.format)))?;
        check_shared(shared_bytes(&spec, variant), info)?;
        // Without keys there is nothing to score.
        let kernel = if op.most_keys() > 0 { id(spec, variant) } else { super::Chooser::Scores.id(variant) };
        let math = if operand_bytes(op.format, variant) == 1 { Math::TensorFp8 } else { Math::TensorF16 };
        let padded = op.heads.next_multiple_of(MMA_HEADS) as f64 * f64::from(spec.features);
        let padding = padded / (op.heads * op.features) as f64;
        offered(op, info, kernel, |part| cut(op, &spec, part, info), math, padding, EFFICIENCY)
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
        match (config.kernel.spec, config.kernel.variant) {
            (Spec::Indexer(spec), Some(variant)) => source(spec, variant).source_hash().short(),
            _ => 0,
        }
    }
}

/// The launch that scores the queries of `part`.
pub(super) fn launch(
    op: &CheckedIndexer,
    kernel: KernelId,
    part: Part,
    info: &DeviceInfo,
    variant: Variant,
) -> KernelLaunch {
    let Spec::Indexer(spec) = kernel.spec else { unreachable!("a configuration is of a kernel of the indexer") };
    let cut = cut(op, &spec, part, info);
    let (_, _, ctas) = cut.ctas(op, part);
    KernelLaunch {
        id: kernel,
        spec: source(spec, variant),
        geometry: Geometry {
            // `configs` checked that the count fits.
            grid: [ctas.unwrap_or(0) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: shared_bytes(&spec, variant).next_multiple_of(16),
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(params(op, part, cut, Kept::default())),
    }
}

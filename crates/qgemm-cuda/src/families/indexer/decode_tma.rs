//! `indexer_decode_tma`: scores of paged E4M3 keys for few queries on
//! Hopper, bound by reading keys. Pages must be whole tiles.

use std::sync::Arc;

use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Family, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerSpec, KernelId, LaunchSequence, Math, Operand, Paging, Spec, Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, load};
use super::super::prelude::Prelude;
use super::decode::{COLUMNS, Columns, FEATURES, TILE_KEYS, cut, padding, served};
use super::mapped::{Mapped, MappedOperand};
use super::{Kept, Part, offered, params};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::{MapElement, MapSwizzle, TileMap};

/// Family name.
pub(super) const NAME: &str = "indexer_decode_tma";
/// Consumer warpgroups, and threads of a CTA including a producer warp.
const WARPGROUPS: u32 = 2;
const THREADS: u32 = WARPGROUPS * 128 + 32;
/// Keys of a warpgroup at a time.
const BOX_KEYS: u32 = TILE_KEYS as u32 / WARPGROUPS;
/// Stages of a warpgroup's ring, and bytes of a stage: keys,
/// scales and presence flags.
const STAGES: u32 = 4;
const STAGE_BYTES: u32 = BOX_KEYS * (FEATURES + 4) + 16;
/// Maximum key or page stride in bytes (`cuTensorMapEncodeTiled`).
const MOST_STRIDE: u64 = 1 << 40;
/// Expected shares of the bandwidth and of the
/// matrix rate, per mille.
const EFFICIENCY: (u32, u32) = (900, 350);

/// The kernel family.
#[derive(Debug)]
pub(super) struct IndexerDecodeTma;

/// `SharedStorage` of `entry/sm90_indexer_wgmma_decode_tma.cu`.
fn shared_bytes(columns: Columns) -> u32 {
    let heads = columns.groups * COLUMNS * (FEATURES + 4) + columns.queries() * 8;
    (WARPGROUPS * STAGES * (STAGE_BYTES + 16) + heads).next_multiple_of(16)
}

fn id(spec: IndexerSpec) -> KernelId {
    KernelId::new(NAME, Some(Variant::Sm90), Spec::Indexer(spec))
}

fn source(spec: IndexerSpec) -> KernelSpec {
    let entry = "entry/sm90_indexer_wgmma_decode_tma.cu";
    let columns = Columns::of_spec(&spec);
    let prelude = Prelude {
        threads: Some(THREADS),
        heads: Some(columns.heads),
        groups: Some(columns.groups),
        stages: Some(STAGES),
        shared_bytes: Some(shared_bytes(columns)),
        ..Prelude::of(Variant::Sm90)
    };
    let (name, symbol) = (id(spec).to_string(), "qg_sm90_indexer_wgmma_decode_tma");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: true }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    Columns::all().filter(move |_| variant == Variant::Sm90).map(|columns| source(columns.spec()))
}

/// TMA map of the keys. A box holds a warpgroup's keys
/// of one page, with zeros beyond its end. `None` when
/// TMA cannot read this layout.
fn k_map(op: &CheckedIndexer) -> Option<TileMap> {
    let Paging { pages, page_size, width } = op.paging();
    let is_whole = width == 0 || page_size.is_multiple_of(BOX_KEYS as usize);
    let of_keys = if page_size > 1 { op.k.row_stride } else { u64::from(FEATURES) };
    let of_pages = if pages > 1 { op.k.page_stride } else { of_keys * page_size.max(1) as u64 };
    let is_strided =
        [of_keys, of_pages].iter().all(|stride| stride.is_multiple_of(16) && (1..MOST_STRIDE).contains(stride));
    let are_some = [pages, page_size].iter().all(|&count| count > 0 && i32::try_from(count).is_ok());
    (is_whole && is_strided && are_some).then_some(TileMap {
        address: 0,
        element: MapElement::Byte,
        dimensions: 3,
        size: [op.features as u64, page_size as u64, pages as u64, 1, 1],
        strides: [of_keys, of_pages, 0, 0],
        tile: [FEATURES, BOX_KEYS, 1, 1, 1],
        swizzle: MapSwizzle::Bytes128,
    })
}

impl Family<CheckedIndexer> for IndexerDecodeTma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        let columns = served(op, info)?;
        if k_map(op).is_none() {
            return Err(Unsupported::new(format!(
                "reads pages of a multiple of {BOX_KEYS} keys, at multiples of 16 bytes"
            )));
        }
        check_shared(shared_bytes(columns), info)?;
        let padding = padding(op, columns);
        offered(op, info, id(columns.spec()), |part| cut(op, part, info), Math::TensorFp8, padding, EFFICIENCY)
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
            Spec::Indexer(spec) => source(spec).source_hash().short(),
            _ => 0,
        }
    }
}

/// The launch that scores the queries of `part`.
pub(super) fn launch(op: &CheckedIndexer, kernel: KernelId, part: Part, info: &DeviceInfo) -> KernelLaunch {
    let Spec::Indexer(spec) = kernel.spec else { unreachable!("a configuration is of a kernel of the indexer") };
    let Some(map) = k_map(op) else { unreachable!("`configs` found that TMA can read the keys") };
    let cut = cut(op, part, info);
    let (_, _, ctas) = cut.ctas(op, part);
    KernelLaunch {
        id: kernel,
        spec: source(spec),
        geometry: Geometry {
            // `configs` checked that the count fits.
            grid: [ctas.unwrap_or(0) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: shared_bytes(Columns::of_spec(&spec)),
        },
        starts_early: true,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(Mapped { indexer: params(op, part, cut, Kept::default()), map, of: MappedOperand::Keys }),
    }
}

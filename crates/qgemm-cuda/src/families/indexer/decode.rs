//! `indexer_wgmma_decode`: scores of E4M3 keys for few queries on
//! Hopper, with any key layout.

use std::sync::Arc;

use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Family, Geometry, HalError, IndexerConfig, IndexerLaunch, IndexerOperand,
    IndexerSpec, IndexerStep, KernelId, KvFormat, LaunchSequence, Math, Operand, Spec, Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, load};
use super::super::prelude::Prelude;
use super::{Cut, Kept, Part, offered, params};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "indexer_wgmma_decode";
/// Threads of a CTA: two warpgroups.
const THREADS: u32 = 256;
/// Key tile that a CTA's warpgroups process at a time.
pub(super) const TILE_KEYS: usize = 128;
/// Features of a row in shared memory.
pub(super) const FEATURES: u32 = 128;
/// Columns of a `wgmma`: heads of one or two queries.
pub(super) const COLUMNS: u32 = 64;
/// Supported head counts, and numbers of column groups.
const HEADS: [u32; 2] = [32, 64];
const GROUPS: [u32; 3] = [1, 2, 4];
/// Resident CTAs per SM.
const CTAS_PER_UNIT: usize = 2;
/// Expected shares of the bandwidth and of the
/// matrix rate, per mille.
const EFFICIENCY: (u32, u32) = (850, 300);

/// The kernel family.
#[derive(Debug)]
pub(super) struct IndexerDecode;

/// Columns of a query, and column groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// Columns of a query: its heads, padded.
    pub(super) heads: u32,
    /// Column groups.
    pub(super) groups: u32,
}

impl Columns {
    /// All kernels, the smallest first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        HEADS.into_iter().flat_map(|heads| GROUPS.map(|groups| Self { heads, groups }))
    }

    /// The smallest that hold `heads` heads of `queries` queries.
    pub(super) fn of(heads: usize, queries: usize) -> Option<Self> {
        let holds = |columns: &Self| columns.heads as usize >= heads && columns.queries() as usize >= queries;
        Self::all().find(holds)
    }

    pub(super) fn spec(self) -> IndexerSpec {
        let all = IndexerSpec::of(IndexerStep::Score, KvFormat::E4M3, FEATURES, TILE_KEYS as u32);
        IndexerSpec { heads: self.heads, groups: self.groups, ..all }
    }

    /// Queries of all columns.
    pub(super) fn queries(self) -> u32 {
        self.groups * COLUMNS / self.heads
    }

    /// Columns of the kernel with these keys.
    pub(super) const fn of_spec(spec: &IndexerSpec) -> Self {
        Self { heads: spec.heads, groups: spec.groups }
    }

    /// `SharedStorage` of `entry/sm90_indexer_wgmma_decode.cu`.
    fn shared_bytes(self) -> u32 {
        (self.groups * COLUMNS * (FEATURES + 4) + self.queries() * 8).next_multiple_of(16)
    }
}

fn id(spec: IndexerSpec) -> KernelId {
    KernelId::new(NAME, Some(Variant::Sm90), Spec::Indexer(spec))
}

fn source(spec: IndexerSpec) -> KernelSpec {
    let entry = "entry/sm90_indexer_wgmma_decode.cu";
    let columns = Columns::of_spec(&spec);
    let prelude = Prelude {
        threads: Some(THREADS),
        heads: Some(columns.heads),
        groups: Some(columns.groups),
        shared_bytes: Some(columns.shared_bytes()),
        ..Prelude::of(Variant::Sm90)
    };
    let (name, symbol) = (id(spec).to_string(), "qg_sm90_indexer_wgmma_decode");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: true }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    Columns::all().filter(move |_| variant == Variant::Sm90).map(|columns| source(columns.spec()))
}

/// Keys of a CTA: as many as give each SM
/// its resident CTAs.
pub(super) fn cut(op: &CheckedIndexer, part: Part, info: &DeviceInfo) -> Cut {
    let (_, each) = op.sequences();
    let sequences = (part.queries / each.max(1)).max(1);
    let ctas = (CTAS_PER_UNIT * info.units as usize / sequences).max(1);
    let keys = op.most_keys().div_ceil(ctas).next_multiple_of(TILE_KEYS);
    // All queries are in every CTA.
    Cut { keys, queries: each.max(1), key_step: 1 }
}

/// Columns for the heads of a sequence's queries.
///
/// # Errors
/// When kernels that keep all heads in shared
/// memory do not support `op`.
pub(super) fn served(op: &CheckedIndexer, info: &DeviceInfo) -> Result<Columns, Unsupported> {
    if info.variant != Some(Variant::Sm90) {
        return Err(Unsupported::new("runs on Hopper only"));
    }
    if op.format != KvFormat::E4M3 || op.features > FEATURES as usize || op.most_keys() == 0 {
        return Err(Unsupported::new(format!("multiplies keys in E4M3 of up to {FEATURES} features")));
    }
    let (_, each) = op.sequences();
    let Some(found) = Columns::of(op.heads, each) else {
        let most = GROUPS[2] * COLUMNS;
        return Err(Unsupported::new(format!("has room for {most} heads of all queries of a sequence")));
    };
    if !op.q.aligned || !op.k.aligned {
        return Err(Unsupported::new("reads queries and keys whose rows begin at multiples of 16 bytes"));
    }
    // A part must hold all queries of a sequence.
    if op.chosen() > 0 && op.part_queries(usize::MAX) < each {
        return Err(Unsupported::new("keeps scores of all queries of a sequence"));
    }
    Ok(found)
}

/// Computed heads and features, padding included, divided by the real ones.
pub(super) fn padding(op: &CheckedIndexer, columns: Columns) -> f64 {
    let (_, each) = op.sequences();
    f64::from(columns.groups * COLUMNS * FEATURES) / (each * op.heads * op.features) as f64
}

impl Family<CheckedIndexer> for IndexerDecode {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        let columns = served(op, info)?;
        check_shared(columns.shared_bytes(), info)?;
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
    let cut = cut(op, part, info);
    let (_, _, ctas) = cut.ctas(op, part);
    KernelLaunch {
        id: kernel,
        spec: source(spec),
        geometry: Geometry {
            // `configs` checked that the count fits.
            grid: [ctas.unwrap_or(0) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: Columns::of_spec(&spec).shared_bytes(),
        },
        starts_early: true,
        operands: IndexerOperand::ALL,
        updated: None,
        params: Arc::new(params(op, part, cut, Kept::default())),
    }
}

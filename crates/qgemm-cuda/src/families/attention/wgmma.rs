//! `attention_wgmma`: attention of many queries with `wgmma` on Hopper.
//! TMA copies queries, keys and values.
//!
//! CTAs are persistent and take row tiles of a head in
//! turn. Paged keys are copied in pieces of a page, or
//! row by row where pieces would be too small. With a
//! bit mask, key tiles are listed first (`tile_lists`).

use std::collections::BTreeSet;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{AttentionPointers, dtype_code};
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceInfo, Family,
    Geometry, HalError, KernelDType, KernelId, KvAddressing, KvFormat, KvFormats, KvPaging, KvRows, LaunchSequence,
    LaunchStep, Operand, Operands, Spec, Unsupported, Variant, WorkspaceLayout,
};

use super::super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::dequantized;
use super::params::{AttentionParams, is_all};
use super::simt::ctas;
use super::tile_lists::{self, ListedParams, TileLists};
use crate::arch::check_shared;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// Family name.
pub(super) const NAME: &str = "attention_wgmma";
/// Queries of a warpgroup.
const WARPGROUP_ROWS: u32 = 64;
/// Features of a TMA box: 128 bytes, one swizzle row.
const BOX: u32 = 64;
/// Warps that inspect values for infinities and NaN.
const INSPECTORS: u32 = 3;
/// Maximum row, head or page stride in bytes (`cuTensorMapEncodeTiled`).
const MOST_STRIDE_BYTES: u64 = (1 << 40) - 16;
/// Minimum rows of a page piece: one swizzle pattern.
const LEAST_PIECE: usize = 8;
/// Expected shares of the bandwidth and of the matrix
/// rate, per mille. For kernels that copy pages row by
/// row this is an estimate.
const EFFICIENCY: (u32, u32) = (800, 550);
const EFFICIENCY_BY_ROWS: (u32, u32) = (750, 450);

/// How keys and values of `op` get to shared memory, with tiles of
/// `keys` keys: a tile at a time by TMA, pieces of a page by TMA,
/// or row by row where pieces would be too small.
fn paging_of(op: &CheckedAttention, keys: u32) -> KvPaging {
    match op.places {
        KvAddressing::Table { page_size, .. } if piece_rows(page_size, keys) as usize >= LEAST_PIECE => {
            KvPaging::Pieces
        }
        KvAddressing::Table { .. } => KvPaging::Rows,
        _ => KvPaging::Contiguous,
    }
}

/// Supported values of [`AttentionSpec::paging`].
const PAGING: [KvPaging; 3] = [KvPaging::Contiguous, KvPaging::Pieces, KvPaging::Rows];

/// Kernel specialization beside types and tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    paging: KvPaging,
    masked: bool,
    bounded: bool,
}

impl Step {
    fn of(op: &CheckedAttention, keys: u32) -> Self {
        Self { paging: paging_of(op, keys), masked: op.mask.is_some(), bounded: super::is_bounded(op) }
    }

    fn all() -> impl Iterator<Item = Self> {
        let of_paging = |paging| super::MASKED_AND_BOUNDED.map(|(masked, bounded)| Self { paging, masked, bounded });
        PAGING.into_iter().flat_map(of_paging)
    }
}

/// Largest power of two that divides both page and tile.
fn piece_rows(page_size: usize, keys: u32) -> u32 {
    1 << page_size.trailing_zeros().min(keys.trailing_zeros())
}

/// Tile of a kernel.
#[derive(Clone, Copy, Debug)]
struct Tile {
    /// Head dimensions (Q and K, V). Others are
    /// padded to the next. Beyond [`MOST_SLICE`] features of
    /// values each CTA has a slice.
    qk: u32,
    v: u32,
    /// Consumer warpgroups.
    warpgroups: u32,
    keys: u32,
    stages: u32,
}

/// Consumer warpgroups of kernels with a mask, which needs registers, too.
const MASKED_WARPGROUPS: u32 = 2;
/// Value features of a CTA: its accumulators are 128 registers.
const MOST_SLICE: u32 = 256;
/// Registers suffice for two warpgroups with 128 or 256
/// features, or three with 64. Shared memory holds one stage of
/// 512 features, whose copies overlap with the other products.
const TILES: [Tile; 7] = [
    Tile { qk: 64, v: 64, warpgroups: 3, keys: 128, stages: 4 },
    Tile { qk: 128, v: 128, warpgroups: 2, keys: 128, stages: 2 },
    Tile { qk: 192, v: 128, warpgroups: 2, keys: 128, stages: 2 },
    Tile { qk: 256, v: 256, warpgroups: 2, keys: 64, stages: 2 },
    Tile { qk: 320, v: 256, warpgroups: 2, keys: 64, stages: 2 },
    Tile { qk: 512, v: 256, warpgroups: 2, keys: 64, stages: 1 },
    Tile { qk: 512, v: 512, warpgroups: 2, keys: 64, stages: 1 },
];

/// The kernel family.
#[derive(Debug)]
pub(super) struct AttentionWgmma;

fn attend_spec(dtype: DType, tile: &Tile, step: Step) -> AttentionSpec {
    let &Tile { qk, v, warpgroups, keys, .. } = tile;
    let Step { paging, masked, bounded } = step;
    let warpgroups = if masked { warpgroups.min(MASKED_WARPGROUPS) } else { warpgroups };
    let attend =
        AttentionSpec::attend(KvFormats::both(KvFormat::Plain(dtype)), [qk, v], warpgroups * WARPGROUP_ROWS, keys);
    AttentionSpec { x: KernelDType::Of(dtype), paging, masked, bounded, ..attend }
}

fn warpgroups(spec: &AttentionSpec) -> u32 {
    spec.rows / WARPGROUP_ROWS
}

/// One producer warpgroup beside the consumers.
fn threads(spec: &AttentionSpec) -> u32 {
    (warpgroups(spec) + 1) * 128
}

fn stages(spec: &AttentionSpec) -> u32 {
    TILES.iter().find(|tile| (tile.qk, tile.v) == (spec.qk, spec.v)).map_or(0, |tile| tile.stages)
}

/// Value features of a CTA.
fn slice(spec: &AttentionSpec) -> u32 {
    spec.v.min(MOST_SLICE)
}

/// `AttentionRing` of `attention/sm90/ring.cuh`.
fn shared_bytes(spec: &AttentionSpec) -> u32 {
    let tiles = spec.rows * spec.qk * 2 + stages(spec) * spec.keys * (spec.qk + slice(spec)) * 2;
    let barriers = (2 + 5 * stages(spec)) * 8;
    // A bit for each key without a page, for twice
    // as many tiles as stages.
    let absent = if spec.paging == KvPaging::Contiguous { 0 } else { 2 * stages(spec) * spec.keys / 8 };
    (tiles + barriers + stages(spec) * (INSPECTORS + 1) * 4 + absent).next_multiple_of(1024)
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm90_attention_wgmma_ws.cu";
    let KvFormat::Plain(dtype) = spec.kv.k else { unreachable!("keys are plain") };
    let pages = match spec.paging {
        KvPaging::Any | KvPaging::Contiguous => 0,
        KvPaging::Pieces => 1,
        KvPaging::Rows => 2,
    };
    let prelude = Prelude {
        threads: Some(threads(&spec)),
        warpgroups: Some(warpgroups(&spec)),
        kv: Some(dtype_code(dtype)),
        qk: Some(spec.qk),
        v: Some(slice(&spec)),
        sliced: Some((slice(&spec) < spec.v).into()),
        keys: Some(spec.keys),
        stages: Some(stages(&spec)),
        bounded: Some(spec.bounded.into()),
        bits: Some(spec.masked.into()),
        pages: Some(pages),
        shared_bytes: Some(shared_bytes(&spec)),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_sm90_attention_wgmma_ws");
    KernelSpec { name, entry, text: crate::source::entry(entry), symbol, prelude: prelude.text(), arch_specific: true }
}

/// All kernels of the family for `variant` but those of rare head
/// dimensions, which are compiled on first use.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let dtypes = [DType::F16, DType::BF16].into_iter().filter(move |_| variant == Variant::Sm90);
    let of_dtype = |dtype| {
        TILES
            .iter()
            .filter(|tile| super::is_common(tile.qk))
            .flat_map(move |tile| Step::all().map(move |step| attend_spec(dtype, tile, step)))
    };
    let attend: Vec<AttentionSpec> = dtypes.flat_map(of_dtype).collect();
    let masked = attend.iter().filter(|spec| spec.masked);
    let lists: BTreeSet<_> = masked.map(|spec| (spec.rows, spec.keys)).collect();
    let lists = lists.into_iter().map(move |(rows, keys)| tile_lists::source(tile_lists::spec_of(rows, keys), variant));
    attend.into_iter().map(move |spec| source(spec, variant)).chain(lists)
}

/// Heads as TMA sees them: contiguous features, tokens, heads, pages.
#[derive(Clone, Copy, Debug)]
struct Heads {
    dtype: DType,
    size: [u64; 4],
    /// Element strides of tokens, heads and pages.
    strides: [u64; 3],
    /// Tokens of a box.
    rows: u32,
}

impl Heads {
    fn queries(op: &CheckedAttention) -> Self {
        let size = [op.qk_dim, op.tokens, op.heads, 1].map(|size| size as u64);
        Self { dtype: op.dtype, size, strides: [op.q.token_stride, op.q.head_stride, 0], rows: WARPGROUP_ROWS }
    }

    fn keys(op: &CheckedAttention, rows: &KvRows, dim: usize, keys: u32) -> Self {
        let paging = op.paging();
        let size = [dim, paging.page_size, op.kv_heads, paging.pages].map(|size| size as u64);
        let KvRows { page_stride, rows } = *rows;
        Self { dtype: op.dtype, size, strides: [rows.token_stride, rows.head_stride, page_stride], rows: keys }
    }

    /// Byte strides of tokens, heads and pages. A stride over a
    /// single element is replaced: nothing is read behind it.
    fn stride_bytes(&self) -> [u64; 3] {
        let one = (self.size[0] * self.dtype.bytes() as u64).next_multiple_of(16);
        std::array::from_fn(|i| match self.size[i + 1] {
            1 => one,
            _ => self.strides[i].saturating_mul(self.dtype.bytes() as u64),
        })
    }

    /// Whether TMA can read them: coordinates have 31 bits, and
    /// sizes and strides are not 0.
    fn fit(&self) -> bool {
        self.size.iter().all(|&size| size > 0 && i32::try_from(size).is_ok())
            && self.stride_bytes().iter().all(|stride| (16..=MOST_STRIDE_BYTES).contains(stride))
    }

    /// Tensor map at `address`.
    fn map(&self, address: u64, dimensions: usize) -> TileMap {
        let [columns, rows, heads, pages] = self.size;
        let [row_bytes, head_bytes, page_bytes] = self.stride_bytes();
        let element = MapElement::Number(self.dtype);
        let one = TileMap::matrix(address, element, [columns, rows], row_bytes, [BOX, self.rows]);
        TileMap {
            dimensions,
            size: [columns, rows, heads, pages, 1],
            strides: [row_bytes, head_bytes, page_bytes, page_bytes],
            ..one
        }
    }
}

/// Kernel parameter without maps. `A` depends on
/// whether there is a mask.
#[derive(Debug)]
struct MappedAttention<A> {
    attention: A,
    heads_together: u32,
    piece_shift: u32,
    queries: Heads,
    /// Keys and values, if TMA copies them.
    kv: Option<[Heads; 2]>,
}

/// `TmaAttentionParams` in
/// `attention/sm90/ring.cuh`, without a mask.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TmaAttentionParams {
    attention: AttentionParams,
    heads_together: u32,
    piece_shift: u32,
    padding: [u64; 1],
    maps: [EncodedMap; 3],
}

/// `TmaAttentionParams` with a mask.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MaskedTmaAttentionParams {
    attention: ListedParams,
    heads_together: u32,
    piece_shift: u32,
    padding: [u64; 5],
    maps: [EncodedMap; 3],
}

impl<A> MappedAttention<A> {
    /// Tensor maps of queries, keys and values at
    /// the addresses in `at`.
    fn maps(&self, at: &AttentionPointers, places: &Addresses<'_>) -> Result<[EncodedMap; 3], HalError> {
        let mut maps = [(places.encode)(&self.queries.map(at.q, 3))?, EncodedMap::default(), EncodedMap::default()];
        if let Some([keys, values]) = &self.kv {
            maps[1] = (places.encode)(&keys.map(at.k, 5))?;
            maps[2] = (places.encode)(&values.map(at.v, 5))?;
        }
        Ok(maps)
    }
}

impl Params for MappedAttention<AttentionParams> {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let attention = self.attention.at(operands, at)?;
        Ok(LaunchParams::of(&TmaAttentionParams {
            attention,
            heads_together: self.heads_together,
            piece_shift: self.piece_shift,
            padding: [0; 1],
            maps: self.maps(&attention.at, at)?,
        }))
    }
}

impl Params for MappedAttention<ListedParams> {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let attention = self.attention.at(operands, at)?;
        Ok(LaunchParams::of(&MaskedTmaAttentionParams {
            attention,
            heads_together: self.heads_together,
            piece_shift: self.piece_shift,
            padding: [0; 5],
            maps: self.maps(&attention.attention().at, at)?,
        }))
    }
}

/// Work items: row tiles of all sequences and heads.
fn items(op: &CheckedAttention, spec: &AttentionSpec) -> Result<u32, Unsupported> {
    ctas(&[op.sequences, op.heads, op.most_queries().div_ceil(spec.rows as usize)])
}

/// The kernel for `op`, or the refusal.
pub(super) fn spec_of(op: &CheckedAttention, info: &DeviceInfo) -> Result<(AttentionSpec, Variant), Unsupported> {
    let variant = info.variant.filter(|&variant| variant == Variant::Sm90);
    let variant = variant.ok_or_else(|| Unsupported::new("runs on Hopper only, whose warpgroups multiply"))?;
    let dtype = [DType::F16, DType::BF16].into_iter().find(|&dtype| is_all(op, dtype));
    let dtype = dtype.ok_or_else(|| Unsupported::new("multiplies Q, K and V of one type of [f16, bf16]"))?;
    if op.most_queries() < super::LEAST_QUERIES {
        return Err(Unsupported::new(format!("leaves fewer than {} queries to others", super::LEAST_QUERIES)));
    }
    let tile = TILES.iter().find(|tile| tile.qk as usize >= op.qk_dim && tile.v as usize >= op.v_dim);
    let tile = tile.ok_or_else(|| Unsupported::new("has no kernel for so many features a head"))?;
    let step = Step::of(op, tile.keys);
    let mut by_tma = vec![Heads::queries(op)];
    if step.paging != KvPaging::Rows {
        by_tma.extend([Heads::keys(op, &op.k, op.qk_dim, 1), Heads::keys(op, &op.v, op.v_dim, 1)]);
    }
    if !op.q.aligned || !op.k.rows.aligned || !op.v.rows.aligned || !by_tma.iter().all(Heads::fit) {
        return Err(Unsupported::new(
            "reads Q, K and V with TMA: rows begin at multiples of 16 bytes, and strides are not 0",
        ));
    }
    let spec = attend_spec(dtype, tile, step);
    items(op, &spec)?;
    if let Some(mask) = op.mask {
        TileLists::new(op, mask, &spec).check()?;
    }
    check_shared(shared_bytes(&spec), info)?;
    Ok((spec, variant))
}

/// Configs for plain keys and values.
fn configs(op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
    let (spec, variant) = spec_of(op, info)?;
    super::check_invariant(NAME, op, info)?;
    let by_rows = spec.paging == KvPaging::Rows;
    let efficiency = if by_rows { EFFICIENCY_BY_ROWS } else { EFFICIENCY };
    let attend = super::one_launch(op, id(spec, variant), &spec, efficiency);
    let attend = AttentionConfig { padding: super::padding_of_slices(op, &spec, slice(&spec)), ..attend };
    Ok(vec![match op.mask {
        Some(mask) => {
            let workspace_bytes = WorkspaceLayout::RESERVED + TileLists::new(op, mask, &spec).bytes();
            AttentionConfig { launches: 2, workspace_bytes, ..attend }
        }
        None => attend,
    }])
}

impl Family<CheckedAttention> for AttentionWgmma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        dequantized::configs(op, |op| configs(op, info))
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        super::sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedAttention, config: &AttentionConfig) -> u64 {
        let attend = super::source_hash(config, source);
        match (op.mask, config.kernel.spec, config.kernel.variant) {
            (Some(_), Spec::Attention(spec), Some(variant)) => {
                let lists = tile_lists::source(tile_lists::spec_of(spec.rows, spec.keys), variant);
                attend ^ lists.source_hash().short().rotate_left(7)
            }
            _ => attend,
        }
    }
}

/// Launch sequence of a plan.
pub(super) fn sequence(
    op: &CheckedAttention,
    config: &AttentionConfig,
    info: &DeviceInfo,
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use AttentionOperand as O;
    let Spec::Attention(spec) = config.kernel.spec else { unreachable!("a configuration is of a kernel of attention") };
    let row_ctas = op.most_queries().div_ceil(spec.rows as usize) as u32;
    let (of_head, ctas) = (op.sequences as u32 * row_ctas, info.units.max(1));
    let rows = match op.places {
        KvAddressing::Table { page_size, .. } => piece_rows(page_size, spec.keys),
        _ => spec.keys,
    };
    let kv = || [Heads::keys(op, &op.k, op.qk_dim, rows), Heads::keys(op, &op.v, op.v_dim, rows)];
    let slices = op.v_dim.div_ceil(slice(&spec) as usize) as u32;
    let attention = AttentionParams::new(op, 1, config.part_keys, row_ctas);
    let heads_together = super::heads_together(op.heads, of_head, ctas);
    let (piece_shift, queries) = (rows.trailing_zeros(), Heads::queries(op));
    let kv = (spec.paging != KvPaging::Rows).then(kv);
    let attend = |params: Arc<dyn Params>, make: &mut MakeKernel<'_>| -> Result<LaunchStep, HalError> {
        let launch = KernelLaunch {
            id: config.kernel,
            spec: source(spec, variant),
            geometry: Geometry {
                grid: [(op.heads as u32 * of_head).min(ctas), slices, 1],
                threads: threads(&spec),
                shared_bytes: shared_bytes(&spec),
            },
            // The kernel calls `griddepcontrol_wait` itself (atoms/sync.cuh).
            starts_early: true,
            operands: O::ALL,
            updated: None,
            params,
        };
        Ok(launch.step::<O>(make)?.of_operation())
    };
    let name = format!("{NAME}_{}", op.dtype);
    let Some(mask) = op.mask else {
        let params = MappedAttention { attention, heads_together, piece_shift, queries, kv };
        return Ok(LaunchSequence::new::<O>(name, vec![attend(Arc::new(params), make)?.unbind(O::Workspace)]));
    };
    let lists = TileLists::new(op, mask, &spec);
    let listed = lists.params(op, mask, attention);
    let workspace = WorkspaceLayout::RESERVED..config.workspace_bytes;
    let first = lists.step(listed, variant, workspace.clone(), make)?;
    let params = MappedAttention { attention: listed, heads_together, piece_shift, queries, kv };
    let attend = attend(Arc::new(params), make)?.bind_part(O::Workspace, O::Workspace, workspace);
    Ok(LaunchSequence::new::<O>(name, vec![first, attend]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_divide_pages_and_tiles() {
        for (page_size, keys, rows) in [(16, 128, 16), (24, 128, 8), (256, 128, 128), (100, 128, 4), (1, 64, 1)] {
            assert_eq!(piece_rows(page_size, keys), rows);
            assert!(page_size.is_multiple_of(rows as usize) && keys.is_multiple_of(rows));
        }
    }

    #[test]
    fn identities_tell_all_axes() {
        let specs: Vec<_> = Step::all().map(|step| attend_spec(DType::F16, &TILES[0], step)).collect();
        assert_eq!(specs.len(), 12);
        for (step, spec) in Step::all().zip(&specs) {
            assert_eq!((spec.paging, spec.masked, spec.bounded), (step.paging, step.masked, step.bounded));
            assert_eq!(spec.to_string().parse(), Ok(*spec));
        }
        let unknown = specs[0].to_string().replace("paging=contiguous", "paging=folded");
        assert!(unknown.parse::<AttentionSpec>().is_err(), "{unknown}");
    }
}

//! `attention_wgmma`: many queries by Hopper's matrix instructions of a warpgroup, queries, keys and values by TMA. CTAs stay and take
//! rows of queries of a head in turn. Keys in pages come in pieces of a page, or row by row where those would be too small.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceInfo, Family,
    Geometry, HalError, KernelId, KvFormat, KvPlaces, KvRows, LaunchSequence, Name, Operand, Operands, Spec,
    Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, MakeKernel, Params, Places, load};
use super::super::launch_params::LaunchParams;
use super::super::prelude::{constant_line, macro_line};
use super::params::{AttentionParams, is_all};
use super::simt::ctas;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// Name of the family.
pub(super) const NAME: &str = "attention_wgmma";
/// Queries of a warpgroup.
const WARPGROUP_ROWS: u32 = 64;
/// Features of a box: the swizzle's 128 bytes.
const BOX: u32 = 64;
/// Warps that look at values.
const INSPECTORS: u32 = 3;
/// Most bytes from a row, a head or a page to the next (`cuTensorMapEncodeTiled`).
const MOST_STRIDE_BYTES: u64 = (1 << 40) - 16;
/// Least rows of a piece of a page: those of the swizzle's pattern.
const LEAST_PIECE: usize = 8;
/// Shares of the bandwidth and of the rate of matrix instructions that the kernels should reach, per mille; of those that copy pages row
/// by row an estimate.
const EFFICIENCY: (u32, u32) = (800, 550);
const EFFICIENCY_BY_ROWS: (u32, u32) = (750, 450);

/// How keys and values come to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// They lie one after another: a tile at a time.
    Tiles,
    /// They lie in pages: by TMA in pieces, which pages and tiles are made of.
    Pieces,
    /// They lie in pages: row by row.
    Rows,
}

impl Source {
    const ALL: [Source; 3] = [Source::Tiles, Source::Pieces, Source::Rows];

    /// For `op`, in tiles of so many keys.
    fn of(op: &CheckedAttention, keys: u32) -> Self {
        match op.places {
            KvPlaces::Table { page_size, .. } if piece_rows(page_size, keys) as usize >= LEAST_PIECE => Source::Pieces,
            KvPlaces::Table { .. } => Source::Rows,
            _ => Source::Tiles,
        }
    }

    /// The step of its kernels. `is_bounded`: exponents are not products times a positive factor, but bounded by a soft cap, or turned round.
    fn step(self, is_bounded: bool) -> &'static str {
        match (self, is_bounded) {
            (Source::Tiles, false) => "attend",
            (Source::Tiles, true) => "attend_bounded",
            (Source::Pieces, false) => "attend_pieces",
            (Source::Pieces, true) => "attend_pieces_bounded",
            (Source::Rows, false) => "attend_rows",
            (Source::Rows, true) => "attend_rows_bounded",
        }
    }
}

/// The largest power of two that divides pages and tiles.
fn piece_rows(page_size: usize, keys: u32) -> u32 {
    1 << page_size.trailing_zeros().min(keys.trailing_zeros())
}

/// What a kernel has room for.
#[derive(Clone, Copy, Debug)]
struct Tile {
    /// Features of queries and of values; others take the next larger ones.
    qk: u32,
    v: u32,
    /// Warpgroups of consumers.
    warpgroups: u32,
    keys: u32,
    stages: u32,
}

/// Two warpgroups have registers for 128 or 256 features, three for 64.
const TILES: [Tile; 4] = [
    Tile { qk: 64, v: 64, warpgroups: 3, keys: 128, stages: 4 },
    Tile { qk: 128, v: 128, warpgroups: 2, keys: 128, stages: 2 },
    Tile { qk: 192, v: 128, warpgroups: 2, keys: 128, stages: 2 },
    Tile { qk: 256, v: 256, warpgroups: 2, keys: 64, stages: 2 },
];

/// The family.
#[derive(Debug)]
pub(super) struct AttentionWgmma;

fn attend_spec(dtype: DType, tile: &Tile, source: Source, is_bounded: bool) -> AttentionSpec {
    let &Tile { qk, v, warpgroups, keys, .. } = tile;
    AttentionSpec {
        step: Name::new(source.step(is_bounded)),
        kv: KvFormat::Plain(dtype),
        qk,
        v,
        rows: warpgroups * WARPGROUP_ROWS,
        keys,
    }
}

/// How keys come to a kernel, and whether exponents are bounded.
fn step_of(spec: &AttentionSpec) -> (Source, bool) {
    let all = Source::ALL.into_iter().flat_map(|source| [(source, false), (source, true)]);
    let found = all.into_iter().find(|(source, is_bounded)| source.step(*is_bounded) == spec.step.as_str());
    found.unwrap_or((Source::Tiles, false))
}

fn warpgroups(spec: &AttentionSpec) -> u32 {
    spec.rows / WARPGROUP_ROWS
}

/// One of producers beside the consumers.
fn threads(spec: &AttentionSpec) -> u32 {
    (warpgroups(spec) + 1) * 128
}

fn stages(spec: &AttentionSpec) -> u32 {
    TILES.iter().find(|tile| (tile.qk, tile.v) == (spec.qk, spec.v)).map_or(0, |tile| tile.stages)
}

/// `AttentionRing` of `mainloop/sm90/attention_ring.cuh`.
fn shared_bytes(spec: &AttentionSpec) -> u32 {
    let tiles = spec.rows * spec.qk * 2 + stages(spec) * spec.keys * (spec.qk + spec.v) * 2;
    let barriers = (2 + 5 * stages(spec)) * 8;
    // Which keys have no page, a bit each, of twice as many tiles as there are stages.
    let absent = if step_of(spec).0 == Source::Tiles { 0 } else { 2 * stages(spec) * spec.keys / 8 };
    (tiles + barriers + stages(spec) * (INSPECTORS + 1) * 4 + absent).next_multiple_of(1024)
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm90_attention_wgmma_ws.cu";
    let KvFormat::Plain(dtype) = spec.kv else { unreachable!("keys are plain") };
    let (source, is_bounded) = step_of(&spec);
    let mut prelude = String::new();
    macro_line(&mut prelude, "QG_VARIANT", &variant.number().to_string());
    let constants = [
        ("QG_THREADS", threads(&spec)),
        ("QG_WARPGROUPS", warpgroups(&spec)),
        ("QG_KV", dtype_code(dtype)),
        ("QG_QK", spec.qk),
        ("QG_V", spec.v),
        ("QG_KEYS", spec.keys),
        ("QG_STAGES", stages(&spec)),
        ("QG_BOUNDED", is_bounded.into()),
        ("QG_SHARED_BYTES", shared_bytes(&spec)),
    ];
    for (name, value) in constants {
        constant_line(&mut prelude, name, value);
    }
    match source {
        Source::Tiles => {}
        Source::Pieces => macro_line(&mut prelude, "QG_PAGES", "1"),
        Source::Rows => macro_line(&mut prelude, "QG_PAGES", "2"),
    }
    let (name, symbol) = (id(spec, variant).to_string(), "qg_sm90_attention_wgmma_ws");
    KernelSpec { name, entry, text: crate::source::entry(entry), symbol, prelude, arch_specific: true }
}

/// Every kernel of the family on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let dtypes = [DType::F16, DType::BF16].into_iter().filter(move |_| variant == Variant::Sm90);
    let sources = || Source::ALL.into_iter().flat_map(|source| [(source, false), (source, true)]);
    let all = dtypes.flat_map(move |dtype| {
        TILES.iter().flat_map(move |tile| {
            sources().map(move |(source, is_bounded)| attend_spec(dtype, tile, source, is_bounded))
        })
    });
    all.map(move |spec| source(spec, variant))
}

/// Heads of tokens as TMA sees them: the contiguous features, tokens, heads, pages.
#[derive(Clone, Copy, Debug)]
struct Heads {
    dtype: DType,
    size: [u64; 4],
    /// Elements from a token, a head, a page to the next.
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

    /// Bytes from a token, a head, a page to the next: where there is only one, none is read behind it, whatever the stride says.
    fn stride_bytes(&self) -> [u64; 3] {
        let one = (self.size[0] * self.dtype.bytes() as u64).next_multiple_of(16);
        std::array::from_fn(|i| match self.size[i + 1] {
            1 => one,
            _ => self.strides[i].saturating_mul(self.dtype.bytes() as u64),
        })
    }

    /// Whether TMA can read them: coordinates are of 31 bits, sizes and strides are not 0.
    fn fit(&self) -> bool {
        self.size.iter().all(|&size| size > 0 && i32::try_from(size).is_ok())
            && self.stride_bytes().iter().all(|stride| (16..=MOST_STRIDE_BYTES).contains(stride))
    }

    /// Their map, where they begin at `address`.
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

/// A kernel's parameter, but for the maps.
#[derive(Debug)]
struct MappedAttention {
    attention: AttentionParams,
    heads_together: u32,
    piece_shift: u32,
    queries: Heads,
    /// Keys and values, where TMA copies them.
    kv: Option<[Heads; 2]>,
}

/// `TmaAttentionParams` in `mainloop/sm90/attention_ring.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TmaAttentionParams {
    attention: AttentionParams,
    heads_together: u32,
    piece_shift: u32,
    padding: [u64; 5],
    maps: [EncodedMap; 3],
}

impl Params for MappedAttention {
    fn with(&self, operands: &Operands<'_>, at: &Places<'_>) -> Result<LaunchParams, HalError> {
        let Self { attention, heads_together, piece_shift, queries, kv } = self;
        let attention = attention.at(operands, at)?;
        let mut maps = [(at.encode)(&queries.map(attention.at.q, 3))?, EncodedMap::default(), EncodedMap::default()];
        if let Some([keys, values]) = kv {
            maps[1] = (at.encode)(&keys.map(attention.at.k, 5))?;
            maps[2] = (at.encode)(&values.map(attention.at.v, 5))?;
        }
        Ok(LaunchParams::of(&TmaAttentionParams {
            attention,
            heads_together: *heads_together,
            piece_shift: *piece_shift,
            padding: [0; 5],
            maps,
        }))
    }
}

/// Rows of queries of all sequences and heads.
fn items(op: &CheckedAttention, spec: &AttentionSpec) -> Result<u32, Unsupported> {
    ctas(&[op.sequences, op.heads, op.most_queries().div_ceil(spec.rows as usize)])
}

/// The kernel for `op`, or why there is none.
pub(super) fn spec_of(op: &CheckedAttention, info: &DeviceInfo) -> Result<(AttentionSpec, Variant), Unsupported> {
    let variant = info.variant.filter(|&variant| variant == Variant::Sm90);
    let variant = variant.ok_or_else(|| Unsupported::new("runs on Hopper only, whose warpgroups multiply"))?;
    let dtype = [DType::F16, DType::BF16].into_iter().find(|&dtype| is_all(op, dtype));
    let dtype = dtype.ok_or_else(|| Unsupported::new("multiplies Q, K and V of one type of [f16, bf16]"))?;
    if op.most_queries() < super::LEAST_QUERIES {
        return Err(Unsupported::new(format!("leaves fewer than {} queries to others", super::LEAST_QUERIES)));
    }
    if op.mask.is_some() {
        return Err(Unsupported::new("takes no mask of bits, and leaves those to others"));
    }
    let tile = TILES.iter().find(|tile| tile.qk as usize >= op.qk_dim && tile.v as usize >= op.v_dim);
    let tile = tile.ok_or_else(|| Unsupported::new("has no kernel for so many features a head"))?;
    let source = Source::of(op, tile.keys);
    let mut by_tma = vec![Heads::queries(op)];
    if source != Source::Rows {
        by_tma.extend([Heads::keys(op, &op.k, op.qk_dim, 1), Heads::keys(op, &op.v, op.v_dim, 1)]);
    }
    if !op.q.aligned || !op.k.rows.aligned || !op.v.rows.aligned || !by_tma.iter().all(Heads::fit) {
        return Err(Unsupported::new(
            "reads Q, K and V with TMA: rows begin at multiples of 16 bytes, and strides are not 0",
        ));
    }
    let spec = attend_spec(dtype, tile, source, super::is_bounded(op));
    items(op, &spec)?;
    let (needs, has) = (shared_bytes(&spec), info.shared_bytes);
    if needs > has {
        return Err(Unsupported::new(format!("needs {needs} bytes of shared memory, of which the device has {has}")));
    }
    Ok((spec, variant))
}

impl Family<CheckedAttention> for AttentionWgmma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let (spec, variant) = spec_of(op, info)?;
        super::check_invariant(NAME, op, info)?;
        let efficiency = if step_of(&spec).0 == Source::Rows { EFFICIENCY_BY_ROWS } else { EFFICIENCY };
        Ok(vec![super::one_launch(op, id(spec, variant), &spec, efficiency)])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        super::attention_sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedAttention, config: &AttentionConfig) -> u64 {
        super::source_hash(config, source)
    }
}

/// The launches of a plan.
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
        KvPlaces::Table { page_size, .. } => piece_rows(page_size, spec.keys),
        _ => spec.keys,
    };
    let kv = || [Heads::keys(op, &op.k, op.qk_dim, rows), Heads::keys(op, &op.v, op.v_dim, rows)];
    let launch = KernelLaunch {
        id: config.kernel,
        spec: source(spec, variant),
        geometry: Geometry {
            grid: [(op.heads as u32 * of_head).min(ctas), 1, 1],
            threads: threads(&spec),
            shared_bytes: shared_bytes(&spec),
        },
        // The kernel waits where it must (`griddepcontrol_wait` in atoms/sync.cuh).
        starts_early: true,
        operands: O::ALL,
        updated: None,
        params: Arc::new(MappedAttention {
            attention: AttentionParams::new(op, 1, config.part_keys, row_ctas),
            heads_together: super::heads_together(op.heads, of_head, ctas),
            piece_shift: rows.trailing_zeros(),
            queries: Heads::queries(op),
            kv: (step_of(&spec).0 != Source::Rows).then(kv),
        }),
    };
    let step = launch.step::<O>(make)?.of_operation().unbind(O::Workspace);
    Ok(LaunchSequence::new::<O>(format!("{NAME}_{}", op.dtype), vec![step]))
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
    fn steps_say_how_keys_come() {
        for source in Source::ALL {
            for is_bounded in [false, true] {
                let spec = attend_spec(DType::F16, &TILES[0], source, is_bounded);
                assert_eq!(step_of(&spec), (source, is_bounded));
            }
        }
    }
}

//! `gemm`: any number of tokens. Each warp owns rows of W; X passes through shared memory, and from Ampere on W, too.

use std::sync::Arc;

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported, Variant,
};

use super::instance::{Engine, Instance, Ring, STAGED, Shape, class};
use super::{kernel, sliced_k, staging, sync_copy, warpgroup};

/// The family.
#[derive(Debug)]
pub(super) struct Gemm;

/// Threads of a block without rings.
const THREADS: u32 = 128;

/// A tile of the kernels with rings.
#[derive(Clone, Copy)]
struct Tile {
    tile_m: u32,
    ring: Ring,
    /// Shares of what `mma.sync` reaches on an H200, of the tensor rate on Hopper, and of bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, warps: u32, x_stages: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, ring: Ring { row_tiles: 2, warps, x_stages, staged: STAGED, fed: false }, efficiency }
}

const fn tight_tile(tile_m: u32, warps: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, ring: Ring { row_tiles: 2, warps, x_stages: 3, staged: 1, fed: false }, efficiency }
}

const fn fed_tile(tile_m: u32, warps: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, ring: Ring { row_tiles: 2, warps, x_stages: FED_STAGES.1, staged: STAGED, fed: true }, efficiency }
}

/// Stages of fed rings: fewest, and most, of which as many are taken as there is room for.
const FED_STAGES: (u32, u32) = (3, 6);

impl Tile {
    /// The rings that the tile may have, the best first.
    fn rings(&self) -> Vec<Ring> {
        if !self.ring.fed {
            return vec![self.ring];
        }
        let with_stages = (FED_STAGES.0..=FED_STAGES.1).rev().map(|x_stages| Ring { x_stages, ..self.ring });
        with_stages.chain([Ring { x_stages: FED_STAGES.0, staged: 1, ..self.ring }]).collect()
    }
}

/// Tokens up to which weights are not rounded: those of `gemm_sliced_k`.
const MOST_EXACT: usize = 16;
/// Rows of W from which on weights may be rounded.
const LEAST_ROUNDED_ROWS: usize = 32;

/// Eight warps with 32 rows each: every byte of X that a block copies meets 256 rows. What a warp does beside matrix
/// instructions costs as many cycles as it has instructions, so tiles have as many tokens as registers hold sums of.
const TILES: &[Tile] = &[tile(32, 8, 6, (345, 560)), tile(64, 8, 4, (545, 500)), tile(128, 8, 4, (685, 450))];
/// Large tiles with what rings and staging need at least, for formats whose others don't fit in 100 KiB (an RTX 3090, an RTX 4090),
/// or need more registers.
const TIGHT_TILES: &[Tile] = &[tight_tile(64, 8, (440, 450)), tight_tile(128, 8, (670, 420))];
/// For few features, and for formats whose others don't fit in 100 KiB.
const SMALL_TILES: &[Tile] = &[tile(64, 4, 3, (330, 400))];
/// Consumer Blackwell's, which has 100 KiB, too: of as many tokens the first that fits. Up to 16 tokens are `gemm_sliced_k`'s.
const FED_TILES: &[Tile] = &[
    fed_tile(32, 8, (460, 560)),
    fed_tile(64, 8, (640, 500)),
    fed_tile(64, 4, (510, 450)),
    fed_tile(128, 8, (760, 450)),
    fed_tile(128, 4, (620, 450)),
];
/// One of them, on a chip that can be had; warpgroups are faster there.
const HOPPER_TILES: &[Tile] = &[fed_tile(128, 8, (490, 450))];

/// Most dynamic shared memory of a block (CUDA C Programming Guide, "Technical Specifications per Compute Capability").
pub(super) fn most_shared(variant: Variant) -> u32 {
    match variant {
        Variant::Sm70 => 96 << 10,
        Variant::Sm75 => 64 << 10,
        Variant::Sm80 => 163 << 10,
        Variant::Sm90 => 227 << 10,
        Variant::Sm89 | Variant::Sm120 => 99 << 10,
    }
}

/// Every kernel of the family for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant) -> Vec<Instance> {
    let sync_copy = sync_copy::instances(format, x, variant);
    if !sync_copy.is_empty() {
        return sync_copy;
    }
    let engine = Engine::of(format, x, variant);
    let Some(layout) = PackedLayout::new(format, class(variant)) else { return Vec::new() };
    if engine == Engine::Mma && variant >= Variant::Sm80 {
        let mut all = sliced_k::instances(format, x, variant, &layout);
        all.extend(rings(format, x, variant, &layout));
        if variant == Variant::Sm90 {
            all.extend(warpgroup::instances(format, x, &layout));
        }
        return all;
    }
    fma_tiles(layout.slab_k)
        .iter()
        .map(|&(tile_m, row_tiles)| Instance {
            format,
            x,
            variant,
            engine,
            tile_m,
            threads: THREADS,
            blocks_per_sm: 2,
            shape: Shape::Gemm { row_tiles },
            layout: layout.clone(),
            efficiency: (350, 450),
        })
        .collect()
}

/// The kernels with rings that fit the variant's shared memory.
fn rings(format: Format, x: DType, variant: Variant, layout: &PackedLayout) -> Vec<Instance> {
    let shaped = |tile: &Tile, ring: Ring| Instance {
        format,
        x,
        variant,
        engine: Engine::Mma,
        tile_m: tile.tile_m,
        threads: ring.threads(),
        blocks_per_sm: 1,
        shape: Shape::Ring(ring),
        layout: layout.clone(),
        efficiency: tile.efficiency,
    };
    let fits = |instance: &Instance| instance.shared_bytes() <= most_shared(variant);
    let tiles: Vec<&Tile> = match variant {
        Variant::Sm90 => HOPPER_TILES.iter().collect(),
        Variant::Sm120 => FED_TILES.iter().collect(),
        // An A100 has room for the large tiles; other chips of its variant have not.
        _ => {
            let shaped = |tile: &Tile| shaped(tile, tile.ring);
            let fits_all = |instance: &Instance| instance.shared_bytes() <= most_shared(Variant::Sm89);
            let replaces = |tight: &Tile, large: &Instance| {
                !fits(large) || spills(large) || !fits_all(large) && fits_all(&shaped(tight))
            };
            let serves =
                |tight: &&Tile| TILES.iter().any(|tile| tile.tile_m == tight.tile_m && replaces(tight, &shaped(tile)));
            TILES.iter().chain(TIGHT_TILES.iter().filter(serves)).chain(SMALL_TILES).collect()
        }
    };
    let best = |tile: &Tile| tile.rings().into_iter().map(|ring| shaped(tile, ring)).find(fits);
    let mut all: Vec<_> = tiles.into_iter().filter_map(best).filter(|instance| !spills(instance)).collect();
    if variant == Variant::Sm120 {
        all.dedup_by_key(|instance| instance.tile_m);
    }
    all
}

/// Whether sums of 128 tokens leave too few registers for what the kernel makes weights of (`kernels.lock` shows no spills of the
/// others).
fn spills(instance: &Instance) -> bool {
    const ALWAYS: &[&str] = &["int3_g128", "q2_k", "q3_k"];
    const WITH_F16: &[&str] = &["iq4_xs", "q4_1", "q4_k", "q5_1"];
    const TIGHT_F16: &[&str] = &["q4_k"];
    const HOPPER_ALWAYS: &[&str] = &["int3_g32", "int3_g64", "int3_g128"];
    const HOPPER_F16: &[&str] = &["q5_1"];
    const HOPPER_BF16: &[&str] = &["int8_g128"];
    if instance.tile_m < 128 {
        return false;
    }
    let name = instance.format.name;
    let is_f16 = instance.x == DType::F16;
    match instance.variant {
        // The feeding warpgroup's registers suffice.
        Variant::Sm120 => false,
        Variant::Sm90 => HOPPER_ALWAYS.contains(&name) || if is_f16 { HOPPER_F16 } else { HOPPER_BF16 }.contains(&name),
        _ if matches!(instance.shape, Shape::Ring(ring) if ring.is_tight()) => is_f16 && TIGHT_F16.contains(&name),
        _ => ALWAYS.contains(&name) || name.ends_with("_block128") || is_f16 && WITH_F16.contains(&name),
    }
}

/// (tokens, row tiles a warp) of the kernels without matrix instructions: the largest that keep all sums in registers
/// (`kernels.lock` shows no spills).
fn fma_tiles(slab_k: usize) -> &'static [(u32, u32)] {
    // All columns of a slab are unrolled for all tokens: with 256 columns, 16 tokens take the compiler 2 s.
    if slab_k > 128 { &[(8, 1)] } else { &[(16, 1)] }
}

/// Whether the kernel computes the weight within its limits. Few tokens, whose time the weight's bytes decide, get exact
/// weights where these are no slower: one token always, and more before Hopper, whose warpgroups take 32 tokens of some formats
/// in less time than others take two. Nor are there many values in a narrow output for roundings to cancel out. F16 has no room for every
/// weight.
fn is_in_range(instance: &Instance, op: &CheckedGemm) -> bool {
    let most_exact = if matches!(instance.shape, Shape::Warpgroup(_)) { 1 } else { MOST_EXACT };
    let in_f16 = op.weight_fits_f16 || instance.x != DType::F16;
    !instance.rounds_weights() || (in_f16 && op.m > most_exact && op.n >= LEAST_ROUNDED_ROWS)
}

/// Whether the kernel can address the weight: threads that copy reckon in 32 bits from a tile of rows to the next.
fn reaches(instance: &Instance, op: &CheckedGemm) -> bool {
    let slabs = op.stored_k.div_ceil(instance.layout.slab_k);
    let tile_bytes = slabs.saturating_mul(instance.layout.slab_bytes);
    !matches!(instance.shape, Shape::Ring(Ring { fed: false, .. })) || u32::try_from(tile_bytes).is_ok()
}

/// Most blocks along the grid's y axis (CUDA C Programming Guide, "Technical Specifications per Compute Capability").
const MAX_GRID_Y: usize = 65_535;

/// Loads of X that a group of eight columns takes where its elements are not neighbours, instead of one.
const GATHER_LOADS: u32 = 8;

/// The configurations for `op`: kernels that read X as it lies, and those for a copy of it.
fn configs(op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
    let variant = kernel::variant(info)?;
    kernel::check_class(op, variant)?;
    let mut direct = serving(op, op.x.dtype, op.x.aligned16 && !op.k_order, variant, info);
    let Some(staged) = staging::staged_x(op, variant) else { return direct };
    if staging::gathers(op) {
        for config in direct.iter_mut().flatten() {
            config.efficiency.0 = (config.efficiency.0 / GATHER_LOADS).max(1);
        }
    }
    let copy = serving(op, staged.dtype, true, variant, info);
    let copy = copy.into_iter().flatten().map(|config| TileConfig { staged_x: Some(staged), ..config });
    let all: Vec<_> = direct.iter().flatten().copied().chain(copy).collect();
    if all.is_empty() { direct } else { Ok(all) }
}

/// The kernels that take activations of type `x`, whose rows are aligned and in the order of the weight's columns if
/// `in_order` says so.
fn serving(
    op: &CheckedGemm,
    x: DType,
    in_order: bool,
    variant: Variant,
    info: &DeviceInfo,
) -> Result<Vec<TileConfig>, Unsupported> {
    let mut all = instances(op.format, x, variant);
    let copies = |i: &Instance| matches!(i.shape, Shape::SlicedK { .. } | Shape::Ring(_) | Shape::Warpgroup(_));
    all.retain(|i| is_in_range(i, op) && reaches(i, op) && (in_order || !copies(i)));
    // A persistent grid has one dimension.
    let rows = |i: &Instance| if matches!(i.shape, Shape::Ring(_)) { usize::MAX } else { MAX_GRID_Y };
    let most = all.iter().map(|i| (i.tile_m as usize).saturating_mul(rows(i))).max().unwrap_or(0);
    all.retain(|i| op.m.div_ceil(i.tile_m as usize) <= rows(i));
    if all.is_empty() {
        return Err(Unsupported::new(format!("serves at most {most} tokens, not {}", op.m)));
    }
    all.retain(|i| kernel::check_shared(i, info).is_ok());
    if all.is_empty() {
        return Err(Unsupported::new("needs more shared memory than the device has"));
    }
    Ok(all.iter().map(Instance::config).collect())
}

impl KernelFamily for Gemm {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        configs(op, info).map(drop)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        configs(op, info).unwrap_or_default()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        kernel::prepare(self.name(), device, op, plan)
    }
}

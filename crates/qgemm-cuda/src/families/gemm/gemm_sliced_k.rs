//! `gemm` main loop for few tokens on Ampere and newer. A
//! CTA has few rows, and slices of its warps split K.
//! Each slice has cp.async rings for W and X.

use qgemm_formats::{DType, Encoding};
use qgemm_hal::{Schedule, Variant};

use super::super::prelude::Prelude;
use super::common;
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{EarlyPrefetch, MainLoop, MainLoopKind, SegmentTile, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = LOOP;

/// The main loop for one token: one row of X is
/// broadcast to the eight tokens of a tile.
static ONE_ROW: MainLoop =
    MainLoop { kind: MainLoopKind::GemmSlicedKOneRow, normalizes_x: true, normalizes_f32: true, ..LOOP };

const LOOP: MainLoop = MainLoop {
    schedule: Schedule::Grid,
    most_m_tiles: MOST_GRID_Y,
    expert_prefetch: EarlyPrefetch::WithIndex,
    segments: &[SegmentTile { variants: &Variant::ALL, tokens: 8, serves: 1..=16 }],
    ..MainLoop::new(MainLoopKind::GemmSlicedK, ("entry/gemm_sliced_k.cu", "qg_gemm_sliced_k"), XAccess::AlignedRows)
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { experts_tiles, for_experts, for_projections, ..InstanceLists::new(&MAIN_LOOP, instances) };

/// Split of a CTA's work.
#[derive(Clone, Copy, PartialEq)]
struct Division {
    /// Row tiles of a warp, and warps of a slice.
    row_tiles: u32,
    warps: u32,
    slices: u32,
    ctas_per_sm: u32,
}

const fn division(row_tiles: u32, warps: u32, slices: u32, ctas_per_sm: u32) -> Division {
    Division { row_tiles, warps, slices, ctas_per_sm }
}

/// CTAs of eight warps, in the order in which they are
/// tried. Two CTAs on an SM hide each other's prologue and
/// epilogue; more rows share the activations of a CTA.
const EIGHT_WARPS: [Division; 5] =
    [division(4, 1, 8, 2), division(2, 2, 4, 2), division(1, 2, 4, 2), division(4, 1, 8, 1), division(2, 2, 4, 1)];
/// CTAs for 16 tokens. Activations are half of the copied bytes,
/// so the first choice is one warp per slice with more
/// rows, which needs no synchronization.
const FOR_16: [Division; 6] =
    [WARP_PER_SLICE, EIGHT_WARPS[0], EIGHT_WARPS[1], EIGHT_WARPS[2], EIGHT_WARPS[3], EIGHT_WARPS[4]];
const WARP_PER_SLICE: Division = division(4, 1, 4, 2);
/// For weights with at least two such CTAs per SM.
/// Registers suffice for four warps with 112 rows each,
/// and six warps with 64 rows.
const MANY_ROWS: [Division; 2] = [division(7, 1, 4, 2), division(4, 2, 3, 2)];

/// A token tile with its candidate splits.
struct Tile {
    tile_m: u32,
    divisions: &'static [Division],
    /// Shares of the `mma.sync` rate and of the
    /// bandwidth, per mille (H200).
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, divisions: &'static [Division], efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, divisions, efficiency }
}

const TILES: [Tile; 2] = [tile(8, &EIGHT_WARPS, (273, 920)), tile(16, &FOR_16, (273, 840))];
/// For weights of up to six bits and many rows, on Hopper, where they were
/// measured: a CTA reads no more weight bytes than activation bytes.
const MANY_ROWS_TILES: [Tile; 2] = [tile(8, &MANY_ROWS, (242, 950)), tile(16, &MANY_ROWS, (258, 920))];
/// For nested scales, which need instructions and registers beside their
/// codes: eight warps per SM before sixteen, and four when shared
/// memory is small (100 KiB on Ada and consumer Blackwell). Efficiencies
/// are those of Q4_K; other formats have `arithmetic_share` of them.
const NESTED_TILES: [Tile; 2] = [tile(8, &NESTED, (250, 920)), tile(16, &NESTED_16, (280, 800))];
const NESTED: [Division; 8] = [
    WARP_PER_SLICE,
    division(2, 1, 4, 2),
    EIGHT_WARPS[0],
    EIGHT_WARPS[1],
    EIGHT_WARPS[2],
    EIGHT_WARPS[3],
    EIGHT_WARPS[4],
    division(2, 1, 4, 1),
];
const NESTED_16: [Division; 4] =
    [division(2, 2, 3, 2), division(2, 2, 2, 2), division(2, 2, 2, 1), division(1, 4, 2, 1)];
/// For nested scales and many rows: three CTAs per SM
/// for 8 tokens; for 16 tokens CTAs of 128 rows, which
/// read half of the activations.
const NESTED_MANY_ROWS_TILES: [Tile; 2] =
    [tile(8, &[division(2, 1, 4, 3)], (277, 855)), tile(16, &[division(4, 2, 2, 2)], (318, 900))];

/// For nested scales beside a table of operands. Two
/// CTAs of an SM would each have its 32 KiB, so large
/// ones are faster.
const NESTED_LOOKUP_TILES: [Tile; 2] =
    [tile(8, &[division(4, 2, 4, 1)], (277, 855)), tile(16, &[division(2, 2, 2, 2)], (280, 800))];
const NESTED_LOOKUP_MANY_ROWS_TILES: [Tile; 2] =
    [tile(8, &[division(2, 1, 4, 2)], (277, 900)), tile(16, &[division(4, 4, 2, 1)], (318, 900))];
/// Bytes of a table beside which the other divisions are no better.
const LARGE_TABLE: u32 = 16 << 10;

/// For experts: more CTAs on an SM keep it busy while
/// one looks up its expert, waits for its first
/// k-tiles or reduces its slices.
const OF_EXPERTS: Tile = tile(8, &[division(4, 1, 4, 4), division(4, 1, 4, 3)], (273, 950));
/// Further MoE kernels on Hopper, for weights of at least
/// four bits. Three slices split six k-tiles of 128 columns
/// evenly. Longer rings suit few CTAs, which then request
/// most of their weights at once.
const THREE_SLICES: Tile = tile(8, &[division(4, 1, 3, 5)], (265, 900));
const LONGER_RINGS: Tile = tile(8, &[division(4, 1, 4, 3)], (174, 880));

/// Maximum and minimum k-tiles of a ring. The longest that fits
/// is used, also because an extra resident CTA hurts: CTAs of
/// the next kernel start early and crowd on some SMs.
const STAGES: (u32, u32) = (8, 2);

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    // A table that leaves no room for rings is left out.
    let looked_up = types.looks_up_operands().then(|| listed(types, Beside::RingsAndOperands, fits_registers));
    looked_up.filter(|all| !all.is_empty()).unwrap_or_else(|| listed(types, Beside::Rings, fits_registers))
}

/// The first division of each tile that fits.
fn listed(types: &Types, beside: Beside, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let instance = |tile: &Tile| {
        let divided =
            |division: &Division| tile.with_longest_rings(types, division, beside, fewest_stages(types, division));
        tile.divisions.iter().filter_map(divided).find(fits_registers)
    };
    // Only Hopper's chips have room for
    // CTAs of so many warps.
    let has_large_table = beside == Beside::RingsAndOperands
        && types.variant == Variant::Sm90
        && common::operand_table_bytes(types) >= LARGE_TABLE;
    let (tiles, many_rows): (&[_], &[_]) = match (types.has_nested_scales(), types.is_narrow()) {
        (true, _) if has_large_table => (&NESTED_LOOKUP_TILES, &NESTED_LOOKUP_MANY_ROWS_TILES),
        (true, _) => (&NESTED_TILES, &NESTED_MANY_ROWS_TILES),
        (false, true) if types.variant == Variant::Sm90 => (&TILES, &MANY_ROWS_TILES),
        (false, _) => (&TILES, &[]),
    };
    tiles.iter().chain(many_rows).filter_map(instance).collect()
}

/// Minimum k-tiles of a ring. f16 operands take so few instructions
/// that a longer ring gains more than more rows.
fn fewest_stages(types: &Types, division: &Division) -> u32 {
    let needs_long = !types.has_nested_scales() && [WARP_PER_SLICE, MANY_ROWS[1]].contains(division)
        || types.x == DType::F16 && *division == EIGHT_WARPS[0];
    if needs_long { STAGES.1 + 1 } else { STAGES.1 }
}

/// On Hopper the MoE-only kernels are faster, and
/// `wgmma` serves 16 rows, too.
fn experts_tiles(types: &Types) -> &'static [u32] {
    match types.variant == Variant::Sm90 {
        true if has_own_for_experts(types) => &[],
        true => &[8],
        false => &[8, 16],
    }
}

fn has_own_for_experts(types: &Types) -> bool {
    serves(types) && !types.has_nested_scales() && types.is_narrow()
}

fn for_experts(types: &Types) -> Vec<Instance> {
    if !has_own_for_experts(types) {
        return Vec::new();
    }
    let tiles: &[Tile] = match (types.variant == Variant::Sm90 && has_four_bits(types), types.tile_k() < 128) {
        (false, _) => &[OF_EXPERTS],
        (true, true) => &[OF_EXPERTS, LONGER_RINGS],
        (true, false) => &[OF_EXPERTS, THREE_SLICES, LONGER_RINGS],
    };
    let with_room =
        |tile: &Tile| tile.divisions.iter().find_map(|d| tile.with_longest_rings(types, d, Beside::Rings, STAGES.1));
    let mut all: Vec<Instance> = Vec::new();
    for instance in tiles.iter().filter_map(with_room) {
        if !all.iter().any(|other| other.id() == instance.id()) {
            all.push(instance);
        }
    }
    all
}

/// Contents of a CTA's shared memory beside the rings of W.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    /// Rings of k-tiles of X, one for each slice.
    Rings,
    /// The same, and a table of operands (`dequant/operand_table.cuh`).
    RingsAndOperands,
    /// The first `k_blocks` k-blocks of one row of X.
    Row { k_blocks: u32 },
}

/// Resident k-blocks of a row of X; the
/// larger is used if it fits.
const RESIDENT: [u32; 2] = [128, 64];

/// One-token kernel with a fused norm and output segments.
///
/// None when another main loop serves these types, nor for
/// weights of at least seven bits or with a codebook, where
/// a separate norm launch is as fast. None with programmatic
/// dependent launch either: there a separate norm takes one
/// to three microseconds less (H200, all narrow formats).
fn for_projections(types: &Types, fits: FitsRegisters<'_>) -> Vec<Instance> {
    let is_codebook = matches!(types.format.encoding, Encoding::Codebook(_));
    if !serves(types) || types.variant >= Variant::Sm90 || !types.is_narrow() || is_codebook {
        return Vec::new();
    }
    let tiles: &[&Tile] = match types.has_nested_scales() {
        // Three CTAs per SM are best for one
        // token, whatever the rows.
        true => &[&NESTED_MANY_ROWS_TILES[0], &NESTED_TILES[0]],
        false => &[&TILES[0]],
    };
    let resident = |&k_blocks: &u32| {
        let all = tiles.iter().flat_map(|tile| tile.divisions.iter().map(move |division| (tile, division)));
        all.filter_map(move |(tile, division)| {
            let beside = Beside::Row { k_blocks };
            tile.with_longest_rings(types, division, beside, fewest_stages(types, division))
        })
    };
    RESIDENT.iter().flat_map(resident).find(fits).into_iter().collect()
}

fn serves(types: &Types) -> bool {
    types.engine.is_mma() && types.variant >= Variant::Sm80
}

/// Whether a weight has at least four bits. With fewer bits,
/// rings are long enough anyway.
fn has_four_bits(types: &Types) -> bool {
    types.layout.k_tile_bytes * 8 >= 4 * types.layout.tile_rows * types.layout.k_tile
}

impl Tile {
    /// The instance with the longest rings that fit;
    /// `None` below `fewest` k-tiles.
    fn with_longest_rings(&self, types: &Types, division: &Division, beside: Beside, fewest: u32) -> Option<Instance> {
        // The system reserves 1 KiB of shared memory for each CTA.
        let has_room = |i: &Instance| (i.shared_bytes + 1024) * i.ctas_per_sm <= most_shared(types.variant) + 1024;
        (fewest..=STAGES.0).rev().map(|stages| self.instance(types, division, beside, stages)).find(has_room)
    }

    fn instance(&self, types: &Types, division: &Division, beside: Beside, stages: u32) -> Instance {
        let Division { row_tiles, warps, slices, ctas_per_sm } = *division;
        let rows = row_tiles * types.tile_rows();
        let w = row_tiles * types.k_tile_bytes();
        let ring = (stages * w).max(common::warp_sums(self.tile_m, rows));
        let of_warps = warps * slices * (ring + common::scale_table_bytes(types, rows));
        let looks_up = beside == Beside::RingsAndOperands;
        let mut constants = Prelude {
            row_tiles: Some(row_tiles),
            warps_n: Some(warps),
            stages: Some(stages),
            operand_table: Some(looks_up.into()),
            ..Prelude::PRODUCT
        };
        let of_table = if looks_up { common::operand_table_bytes(types) } else { 0 };
        let (main_loop, of_x) = match beside {
            Beside::Rings | Beside::RingsAndOperands => {
                (&MAIN_LOOP, stages * slices * self.tile_m * types.tile_k() * types.engine.x_bytes())
            }
            Beside::Row { k_blocks } => {
                constants.x_blocks = Some(k_blocks);
                let statistics = common::row_statistics(1, warps * slices).next_multiple_of(common::ALIGNMENT);
                (&ONE_ROW, k_blocks * common::x_stage(types, 1) + statistics)
            }
        };
        Instance {
            ctas_per_sm,
            stages,
            integer_operands: types.has_integer_operands(),
            one_row: matches!(beside, Beside::Row { .. }),
            constants,
            warps_n: warps,
            k_groups: slices,
            efficiency: (self.efficiency.0 * arithmetic_share(types, looks_up, self.tile_m) / 100, self.efficiency.1),
            shares: Shares::OfMmaSync,
            ..Instance::new(Parts {
                main_loop,
                types,
                tile: [self.tile_m, warps * rows],
                threads: warps * slices * 32,
                shared_bytes: of_table + of_x + of_warps + common::FLAG,
            })
        }
    }
}

/// Reached percentage of INT4's arithmetic, or of Q4_K's with nested
/// scales. Two-plane and codebook formats, and twice the scales, take more
/// instructions (fitted on an H200).
///
/// Formats of eight bits and more with eight tokens are derated,
/// because an SM with a single CTA is slower.
fn arithmetic_share(types: &Types, looks_up: bool, tile_m: u32) -> u32 {
    let format = types.format;
    match () {
        () if !types.is_narrow() && tile_m == 8 => 60,
        () if looks_up && format.sub_block == 16 => 75,
        () if looks_up => 85,
        () if !types.has_nested_scales() && matches!(format.encoding, Encoding::Codebook(_)) => 48,
        () if !types.has_nested_scales() => 100,
        () if !format.encoding.is_integer() => 60,
        () if format.code_planes.len() > 1 || format.sub_block == 16 => 85,
        () => 100,
    }
}

//! The main loop of `gemm` for a few tokens on Ampere and newer: a CTA is few rows, whose K dimension slices of its warps
//! share. W and X pass through rings of the slices' own.

use qgemm_formats::{DType, Encoding};
use qgemm_hal::{Schedule, Variant};

use super::common;
use super::instance::{FitsRegisters, Instance, MOST_GRID_Y, MainLoop, Parts, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = LOOP;

/// The same with one row of X, of which those of a tile of eight tokens are copies: for one token.
static ONE_ROW: MainLoop = MainLoop { name: "gemm_sliced_k_one_row", ..LOOP };

const LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "gemm_sliced_k",
    entry: "entry/gemm_sliced_k.cu",
    symbol: "qg_gemm_sliced_k",
    arch_specific: false,
    schedule: Schedule::Grid,
    x_access: XAccess::AlignedRows,
    rounds_beyond: None,
    experts_tiles,
    for_experts: Some(for_experts),
    most_m_tiles: MOST_GRID_Y,
    most_tile_bytes: usize::MAX,
    instances,
};

/// How a CTA divides its work.
#[derive(Clone, Copy, PartialEq)]
struct Division {
    /// Tiles of rows of a warp, and warps of a slice.
    row_tiles: u32,
    warps: u32,
    slices: u32,
    ctas_per_sm: u32,
}

const fn division(row_tiles: u32, warps: u32, slices: u32, ctas_per_sm: u32) -> Division {
    Division { row_tiles, warps, slices, ctas_per_sm }
}

/// CTAs of eight warps, in the order in which they are tried for room. Two on an SM hide each other's beginnings and ends;
/// more rows share the activations that a CTA reads.
const EIGHT_WARPS: [Division; 5] =
    [division(4, 1, 8, 2), division(2, 2, 4, 2), division(1, 2, 4, 2), division(4, 1, 8, 1), division(2, 2, 4, 1)];
/// The same for 16 tokens, of which activations are half of what is copied, and half of the arithmetic is done for all rows
/// alike: first one warp per slice with more rows, which waits for no other.
const FOR_16: [Division; 6] =
    [WARP_PER_SLICE, EIGHT_WARPS[0], EIGHT_WARPS[1], EIGHT_WARPS[2], EIGHT_WARPS[3], EIGHT_WARPS[4]];
const WARP_PER_SLICE: Division = division(4, 1, 4, 2);
/// For weights that have so many rows that there are two such CTAs for every SM. There are registers for four warps that
/// have 112 rows each, and for six of 64.
const MANY_ROWS: [Division; 2] = [division(7, 1, 4, 2), division(4, 2, 3, 2)];

/// A tile of tokens, and the divisions that may serve it.
struct Tile {
    tile_m: u32,
    divisions: &'static [Division],
    /// Shares of what `mma.sync` reaches on an H200, and of its bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, divisions: &'static [Division], efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, divisions, efficiency }
}

const TILES: [Tile; 2] = [tile(8, &EIGHT_WARPS, (273, 920)), tile(16, &FOR_16, (273, 840))];
/// For weights of up to six bits, of which a CTA reads no more than of activations: INT4 of 28672 x 8192 took an H200 34.2 µs
/// for 36.3 with 8 tokens, 36.2 for 40.9 with 16. Q8_0 with 16 tokens took 64.5 for 62.4.
const MANY_ROWS_TILES: [Tile; 2] = [tile(8, &MANY_ROWS, (242, 950)), tile(16, &MANY_ROWS, (258, 920))];
/// For nested scales, which take instructions and registers beside their codes: eight warps an SM before
/// sixteen, and four where shared memory has room for no more (100 KiB: Ada, consumer Blackwell). The shares are Q4_K's; others
/// have `arithmetic_share` of them.
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
/// For weights that have many more rows (28672 x 8192, Q4_K, on an H200): three CTAs an SM for 8 tokens, and for 16 CTAs of 128
/// rows, which read half of the activations (43 for 50 µs).
const NESTED_MANY_ROWS_TILES: [Tile; 2] =
    [tile(8, &[division(2, 1, 4, 3)], (277, 855)), tile(16, &[division(4, 2, 2, 2)], (318, 900))];

/// For experts: the more CTAs there are on an SM, the less is it idle when one finds its expert, waits for its first k-tiles or adds up
/// what its slices have (INT4, 128 experts of 1536x2048, 32 tokens to eight each: 54.0 for 66.0 us).
const OF_EXPERTS: Tile = tile(8, &[division(4, 1, 4, 4), division(4, 1, 4, 3)], (273, 950));
/// On Hopper beside it, for weights of four bits and more: three slices share six k-tiles of 128 columns evenly (2048x768, 32 tokens: 33.7
/// for 37.3 us), and longer rings are for few CTAs, which may all ask for most of their weights at once (2688x2048, one token: 10.4 for
/// 11.4 us, with a settled index 7.6 for 9.0).
const THREE_SLICES: Tile = tile(8, &[division(4, 1, 3, 5)], (265, 900));
const LONGER_RINGS: Tile = tile(8, &[division(4, 1, 4, 3)], (174, 880));

/// K-tiles in the rings: most, and fewest. As many as there is room for, also because a CTA more on an SM than was meant is
/// slower: the next kernel's CTAs, which start early, then crowd on some SMs (measured on an H200: 16.4 for 11.9 µs).
const STAGES: (u32, u32) = (8, 2);

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    let instance = |tile: &Tile| {
        let divided = |division: &Division| tile.with_longest_rings(types, division, fewest_stages(types, division));
        tile.divisions.iter().filter_map(divided).find(fits_registers)
    };
    let (tiles, many_rows): (&[_], &[_]) = match (types.has_nested_scales(), types.is_narrow()) {
        (true, _) => (&NESTED_TILES, &NESTED_MANY_ROWS_TILES),
        (false, true) => (&TILES, &MANY_ROWS_TILES),
        (false, false) => (&TILES, &[]),
    };
    tiles.iter().chain(many_rows).filter_map(instance).collect()
}

/// Fewest k-tiles in the rings. Operands in f16 take so few instructions that a longer ring gains more than more rows (measured on an
/// H200).
fn fewest_stages(types: &Types, division: &Division) -> u32 {
    let needs_long = !types.has_nested_scales() && [WARP_PER_SLICE, MANY_ROWS[1]].contains(division)
        || types.x == DType::F16 && *division == EIGHT_WARPS[0];
    if needs_long { STAGES.1 + 1 } else { STAGES.1 }
}

/// On Hopper those of experts alone are faster, and its matrix instructions serve 16 rows, too.
fn experts_tiles(types: &Types) -> &'static [u32] {
    if types.variant == Variant::Sm90 && has_own_for_experts(types) { &[] } else { &[8, 16] }
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
        |tile: &Tile| tile.divisions.iter().find_map(|division| tile.with_longest_rings(types, division, STAGES.1));
    let mut all: Vec<Instance> = Vec::new();
    for instance in tiles.iter().filter_map(with_room) {
        if !all.iter().any(|other| other.id() == instance.id()) {
            all.push(instance);
        }
    }
    all
}

/// Whether a kernel with experts waits for the work before it only once it has asked for W, where it knows the experts by then, and lets the
/// next launch begin after that (`QG_TAKE_PROBLEM_EARLY`).
pub(in crate::families) fn settles(instance: &Instance) -> bool {
    instance.main_loop.name == LOOP.name
}

/// The constant that says how many k-blocks of X a CTA keeps.
pub(super) const X_BLOCKS: &str = "QG_X_BLOCKS";

/// What a CTA has of X in shared memory.
#[derive(Clone, Copy)]
enum XMemory {
    /// The k-tiles of a slice's ring.
    Rings,
    /// So many k-blocks of one row, from the beginning on.
    Row { k_blocks: u32 },
}

/// K-blocks of a row of X that a CTA keeps, where there is room for most.
const RESIDENT: [u32; 2] = [128, 64];

/// The kernel for one token that normalizes it and writes segments where they belong. None where another main loop serves these types, nor
/// for weights of seven bits and more or a table, which take as long as with a launch before (one token of 6144 x 4096 on an H200: Q8_0
/// 13.6 for 11.2 µs, MXFP4 12.6 for 11.9, where INT4 takes 7.6 for 10.0).
pub(super) fn for_projections(types: &Types, fits: FitsRegisters<'_>) -> Option<Instance> {
    if !serves(types) || !types.is_narrow() || matches!(types.format.encoding, Encoding::Codebook(_)) {
        return None;
    }
    // Where a launch begins while the one before ends, that of a norm takes less time than scales of every 32 columns take the kernel more
    // (the same of Q4_0, Q4_1, Q5_0, INT4 g32: 7.3, 7.6, 8.4, 8.0 with a launch before, 8.2, 8.9, 9.6, 9.2 without).
    if types.variant >= Variant::Sm90 && !types.has_nested_scales() && types.format.sub_block <= 32 {
        return None;
    }
    let tiles: &[&Tile] = match types.has_nested_scales() {
        // Three CTAs an SM are best for one token whatever the rows.
        true => &[&NESTED_MANY_ROWS_TILES[0], &NESTED_TILES[0]],
        false => &[&TILES[0]],
    };
    let resident = |&k_blocks: &u32| {
        let all = tiles.iter().flat_map(|tile| tile.divisions.iter().map(move |division| (tile, division)));
        all.filter_map(move |(tile, division)| {
            let x = XMemory::Row { k_blocks };
            tile.with_longest_rings_beside(x, types, division, fewest_stages(types, division))
        })
    };
    RESIDENT.iter().flat_map(resident).find(fits)
}

fn serves(types: &Types) -> bool {
    types.engine.is_mma() && types.variant >= Variant::Sm80
}

/// Whether a weight has at least four bits; of fewer, rings are long as they are.
fn has_four_bits(types: &Types) -> bool {
    types.layout.k_tile_bytes * 8 >= 4 * types.layout.tile_rows * types.layout.k_tile
}

impl Tile {
    /// With as many k-tiles in the rings as SMs have memory for; none where that is less than `fewest`.
    fn with_longest_rings(&self, types: &Types, division: &Division, fewest: u32) -> Option<Instance> {
        self.with_longest_rings_beside(XMemory::Rings, types, division, fewest)
    }

    /// The same where this is in memory of X.
    fn with_longest_rings_beside(
        &self,
        x: XMemory,
        types: &Types,
        division: &Division,
        fewest: u32,
    ) -> Option<Instance> {
        // A CTA's memory counts with the 1 KiB that the system keeps of it.
        let has_room = |i: &Instance| (i.shared_bytes + 1024) * i.ctas_per_sm <= most_shared(types.variant) + 1024;
        (fewest..=STAGES.0).rev().map(|stages| self.instance(types, division, stages, x)).find(has_room)
    }

    fn instance(&self, types: &Types, division: &Division, stages: u32, x: XMemory) -> Instance {
        let Division { row_tiles, warps, slices, ctas_per_sm } = *division;
        let rows = row_tiles * types.tile_rows();
        let w = row_tiles * types.k_tile_bytes();
        let ring = (stages * w).max(common::warp_sums(self.tile_m, rows));
        let of_warps = warps * slices * (ring + common::scale_table_bytes(types, rows));
        let mut constants = vec![("QG_ROW_TILES", row_tiles), ("QG_WARPS_N", warps), ("QG_STAGES", stages)];
        let (main_loop, of_x) = match x {
            XMemory::Rings => (&MAIN_LOOP, stages * slices * self.tile_m * types.tile_k() * types.engine.x_bytes()),
            XMemory::Row { k_blocks } => {
                constants.push((X_BLOCKS, k_blocks));
                let statistics = common::row_statistics(1, warps * slices).next_multiple_of(common::ALIGNMENT);
                (&ONE_ROW, k_blocks * common::x_stage(types, 1) + statistics)
            }
        };
        Instance {
            ctas_per_sm,
            stages,
            integer_operands: types.has_integer_operands(),
            one_row: matches!(x, XMemory::Row { .. }),
            constants,
            warps_n: warps,
            k_groups: slices,
            efficiency: (self.efficiency.0 * arithmetic_share(types, self.tile_m) / 100, self.efficiency.1),
            shares: Shares::OfMmaSync,
            ..Instance::new(Parts {
                main_loop,
                types,
                tile: [self.tile_m, warps * rows],
                threads: warps * slices * 32,
                shared_bytes: of_x + of_warps + common::FLAG,
            })
        }
    }
}

/// What kernels reach of the arithmetic of INT4's, or of nested scales of Q4_K's, per cent: codes of two planes or looked up, and twice
/// the scales, take more instructions (measured on an H200). Of eight bits and more, eight tokens, 289 problems there took 2.4 % longer than the
/// best way with all of it, 18 of them more than 10 %, and 1.3 % and 7 with this: the multiprocessors that have a CTA alone are slower.
fn arithmetic_share(types: &Types, tile_m: u32) -> u32 {
    let format = types.format;
    match () {
        () if !types.is_narrow() && tile_m == 8 => 60,
        () if !types.has_nested_scales() && matches!(format.encoding, Encoding::Codebook(_)) => 48,
        () if !types.has_nested_scales() => 100,
        () if !format.encoding.is_integer() => 60,
        () if format.code_planes.len() > 1 || format.sub_block == 16 => 85,
        () => 100,
    }
}

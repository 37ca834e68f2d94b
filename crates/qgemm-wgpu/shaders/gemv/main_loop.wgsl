// Few tokens: a workgroup computes the outputs of four tiles of W for TILE_M tokens. An invocation has a row of each tile, and
// every SLICES-th unit of UNIT columns of them. X is in workgroup memory, CHUNK_UNITS units at a time. The sums of the slices
// are added by `reduce_*.wgsl`, always in the same order.

const TILE_N: u32 = 4u * TILE_ROWS;
const SLICES: u32 = THREADS / TILE_ROWS;
// A unit of a token is followed by a vector that is not used, so that units which are read at once lie in different banks.
const UNIT_PITCH: u32 = UNIT / 4u + 1u;
const TOKEN_PITCH: u32 = CHUNK_UNITS * UNIT_PITCH;

// (TILE_M, CHUNK_UNITS, UNIT_PITCH) of X; then (SLICES, TILE_M, TILE_ROWS) of sums.
var<workgroup> tile: array<vec4<f32>, TILE_VECTORS>;

// Four rows of a unit.
struct Unit {
    #for j LOW_WORDS
    low$j: vec4<u32>,
    #end
    #for j HIGH_WORDS
    high$j: vec4<u32>,
    #end
    #for s SPANS
    affine$s: Affine,
    #end
}

fn unit_of(rows: Rows, unit: u32) -> Unit {
    var w: Unit;
    #for j LOW_WORDS
    w.low$j = code_word(rows, LOW_PLANE, unit * LOW_WORDS + $ju);
    #end
    #for j HIGH_WORDS
    w.high$j = code_word(rows, HIGH_PLANE, unit * HIGH_WORDS + $ju);
    #end
    #for s SPANS
    w.affine$s = affine(rows, (unit * SPANS + $su) / SPANS_A_SUB);
    #end
    return w;
}

// Of row `row` of `tiles`, counted along all slabs.
fn unit_at(tiles: vec4<u32>, row: u32, unit: u32) -> Unit {
    let slab = unit / SLAB_UNITS * (SLAB_VECTORS * 4u);
    return unit_of(Rows(tiles + vec4<u32>(slab), row), unit % SLAB_UNITS);
}

// Brings X from column `s0` on.
fn load_x(m0: u32, s0: u32, thread: u32) {
    let eights = CHUNK_UNITS * (UNIT / 8u);
    for (var i = thread; i < TILE_M * eights; i += THREADS) {
        let m = i / eights;
        let eight = i % eights;
        let values = x8(min(m0 + m, p.shape.m - 1u), s0 + eight * 8u);
        let at = m * TOKEN_PITCH + eight / (UNIT / 8u) * UNIT_PITCH + eight % (UNIT / 8u) * 2u;
        tile[at] = values.lo;
        tile[at + 1u] = values.hi;
    }
}

fn tokens(m0: u32, n0: u32, thread: u32) {
    let row = thread % TILE_ROWS;
    let slice = thread / TILE_ROWS;
    let tiles = tiles_of(n0);
    let units = p.shape.k_slabs * SLAB_UNITS;
    var sums: Sums;
    for (var first = 0u; first < units; first += CHUNK_UNITS) {
        workgroupBarrier();
        load_x(m0, first * UNIT, thread);
        workgroupBarrier();
        let end = min(CHUNK_UNITS, units - first);
        for (var unit = slice; unit < end; unit += SLICES) {
            multiply(unit_at(tiles, row, first + unit), unit * UNIT_PITCH, &sums);
        }
    }
    workgroupBarrier();
    reduce(row, slice, &sums);

    // Eight rows of a tile an invocation: four, and those eight behind them.
    if (thread < TILE_M * 8u) {
        let m = thread / 8u;
        let of_tile = thread / 2u % 4u;
        let first = thread % 2u * 4u;
        let first_row = n0 + of_tile * TILE_ROWS + first;
        if (m0 + m < p.shape.m && first_row < p.shape.n) {
            let at = m * TILE_ROWS + first;
            store8(m0 + m, first_row, four_rows(at, of_tile), four_rows(at + 8u, of_tile));
        }
    }
}

// Adds the sums of all parts in `tile`, of which there are a power of two up to SLICES; invocations that lead have written those of
// `part` from `at` on. All invocations of the workgroup call it.
fn add_parts(at: u32, part: u32, parts: u32, leads: bool) {
    workgroupBarrier();
    for (var half = SLICES / 2u; half > 0u; half /= 2u) {
        if (leads && half < parts && part < half) {
            for (var t = 0u; t < TILE_M; t++) {
                tile[at + t * TILE_ROWS] += tile[at + (half * TILE_M + t) * TILE_ROWS];
            }
        }
        workgroupBarrier();
    }
}

// The sums of four rows of a tile.
fn four_rows(at: u32, of_tile: u32) -> vec4<f32> {
    return vec4<f32>(tile[at][of_tile], tile[at + 1u][of_tile], tile[at + 2u][of_tile], tile[at + 3u][of_tile]);
}

// Few tokens: a workgroup computes TILE_N outputs for TILE_M tokens. An invocation has four rows of W, and every SLICES-th unit
// of UNIT columns of them; beside it others have the next rows. X is in workgroup memory, CHUNK_UNITS units at a time. The
// sums of the slices are added by `reduce_*.wgsl`, always in the same order.

const ROW_GROUPS: u32 = TILE_N / 4u;
const SLICES: u32 = THREADS / ROW_GROUPS;
// A unit of a token is followed by a vector that is not used, so that units which are read at once lie in different banks.
const UNIT_PITCH: u32 = UNIT / 4u + 1u;
const TOKEN_PITCH: u32 = CHUNK_UNITS * UNIT_PITCH;

// (TILE_M, CHUNK_UNITS, UNIT_PITCH) of X; then (SLICES, TILE_M, ROW_GROUPS) of sums.
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

// Of the rows from `row` on, counted along all slabs.
fn unit_at(row: u32, unit: u32) -> Unit {
    return unit_of(rows_of(row, unit / SLAB_UNITS), unit % SLAB_UNITS);
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
    let group = thread % ROW_GROUPS;
    let slice = thread / ROW_GROUPS;
    let row = n0 + group * 4u;
    let units = p.shape.k_slabs * SLAB_UNITS;
    var sums: Sums;
    // A unit is loaded while the one before it is multiplied; the first, while X is brought.
    var next = unit_at(row, min(slice, units - 1u));
    for (var first = 0u; first < units; first += CHUNK_UNITS) {
        workgroupBarrier();
        load_x(m0, first * UNIT, thread);
        workgroupBarrier();
        let end = min(CHUNK_UNITS, units - first);
        for (var unit = slice; unit < end; unit += SLICES) {
            let current = next;
            next = unit_at(row, min(first + unit + SLICES, units - 1u));
            multiply(current, unit * UNIT_PITCH, &sums);
        }
    }
    workgroupBarrier();
    reduce(group, slice, &sums);

    let i = thread;
    if (i < TILE_M * ROW_GROUPS / 2u) {
        let m = i / (ROW_GROUPS / 2u);
        let pair = i % (ROW_GROUPS / 2u);
        let low = pair / 2u * 4u + pair % 2u;
        let first_row = n0 + low * 4u;
        if (m0 + m < p.shape.m && first_row < p.shape.n) {
            store8(m0 + m, first_row, tile[m * ROW_GROUPS + low], tile[m * ROW_GROUPS + low + 2u]);
        }
    }
}

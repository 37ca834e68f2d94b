// GEMV for few tokens.
// A workgroup computes TILE_N outputs for TILE_M tokens.
// An invocation has four rows of W; LANES neighbouring
// invocations have all rows.
// It multiplies every SLICES-th unit of UNIT columns.
// X is in workgroup memory, CHUNK_UNITS units at a
// time (`x_*.wgsl`).
// `reduce_*.wgsl` adds the slices in a fixed order.

const LANES: u32 = TILE_N / 4u;
const SLICES: u32 = THREADS / LANES;
const TOKEN_PITCH: u32 = CHUNK_UNITS * UNIT_PITCH;

// X bits (TILE_M, CHUNK_UNITS, UNIT_PITCH); later accumulators
// (SLICES, TILE_M, LANES).
var<workgroup> tile: array<vec4<u32>, TILE_VECTORS>;

fn tile_of_d(n0: u32, m0: u32, thread: u32) {
    let lane = thread % LANES;
    let slice = thread / LANES;
    let rows = rows_of_lane(n0, lane);
    let units = end_k_tile() * PACKED_UNITS;
    var sums: Accumulators;
    for (var first = first_k_tile() * PACKED_UNITS; first < units; first += CHUNK_UNITS) {
        workgroupBarrier();
        let end = min(CHUNK_UNITS, units - first);
        load_x(m0, first * UNIT, end, thread);
        workgroupBarrier();
        for (var unit = slice; unit < end; unit += SLICES) {
            // Counted over all k-tiles.
            let at = first + unit;
            multiply(unit_of(in_k_tile(rows, at / PACKED_UNITS), at % PACKED_UNITS), unit * UNIT_PITCH, &sums);
        }
    }
    workgroupBarrier();
    reduce(lane, slice, &sums);

    // An invocation has four rows of 16, and the four
    // rows eight further.
    if (thread < TILE_M * TILE_N / 8u) {
        let m = thread / (TILE_N / 8u);
        let tile_of_n = thread / 2u % (TILE_N / TILE_ROWS);
        let first = thread % 2u * 4u;
        let first_row = n0 + tile_of_n * TILE_ROWS + first;
        if (m0 + m < tokens() && first_row < p.shape.stored_rows) {
            store8(m0 + m, first_row, finished(m, tile_of_n, first), finished(m, tile_of_n, first + 8u));
        }
    }
}

// Adds the accumulators of all parts in `tile`.
// The number of parts is a power of two up to SLICES.
// Leading invocations have written `part` from `at` on.
// All invocations of the workgroup call it.
fn add_parts(at: u32, part: u32, parts: u32, leads: bool) {
    workgroupBarrier();
    for (var half = SLICES / 2u; half > 0u; half /= 2u) {
        if (leads && half < parts && part < half) {
            for (var t = 0u; t < TILE_M; t++) {
                let own = bitcast<vec4<f32>>(tile[at + t * LANES]);
                let other = bitcast<vec4<f32>>(tile[at + (half * TILE_M + t) * LANES]);
                tile[at + t * LANES] = bitcast<vec4<u32>>(own + other);
            }
        }
        workgroupBarrier();
    }
}

// Accumulators of four rows from `first` on in a tile of W.
fn finished(m: u32, tile_of_n: u32, first: u32) -> vec4<f32> {
    if (LANES_BESIDE) {
        return bitcast<vec4<f32>>(tile[m * LANES + tile_of_n * 4u + first / 4u]);
    }
    let at = m * LANES + first;
    return bitcast<vec4<f32>>(
        vec4<u32>(tile[at][tile_of_n], tile[at + 1u][tile_of_n], tile[at + 2u][tile_of_n], tile[at + 3u][tile_of_n]),
    );
}

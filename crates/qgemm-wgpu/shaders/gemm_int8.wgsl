// INT8 GEMM for many tokens.
// A workgroup computes TILE_N outputs for TILE_M tokens.
// An invocation has four rows of W and TOKENS tokens.
// LANES neighbouring invocations have all rows of equal
// tokens, so one load of X serves all of them.
// X is in workgroup memory, CHUNK_UNITS units at a time.
// The next unit of W is loaded while one is multiplied.
// Products are added in order of K.

const LANES: u32 = TILE_N / 4u;
const TOKEN_PITCH: u32 = CHUNK_UNITS * UNIT_PITCH;

// X bits (TILE_M, CHUNK_UNITS, UNIT_PITCH); later accumulators
// (TILE_M / TOKENS, LANES).
var<workgroup> tile: array<vec4<u32>, TILE_VECTORS>;

alias Accumulators = array<vec4<f32>, TOKENS>;

// Multiplies a unit by X; `x` is its vector of each token.
// Codes are unpacked once.
fn multiply(w: Unit, x: u32, sums: ptr<function, Accumulators>) {
    #for s SPANS
    #for q SPAN_QUADS
    let codes$s_$q = #quad($s, $q);
    #end
    #end
    #for t TOKENS
    {
        let low = tile[x + $tu * TOKEN_PITCH];
        let high = tile[x + $tu * TOKEN_PITCH + 1u];
        let factors = bitcast<vec4<f32>>(tile[x + $tu * TOKEN_PITCH + 2u]);
        #for s SPANS
        {
            var dots: vec4<i32>;
            #for q SPAN_QUADS
            dots += dot4(codes$s_$q, x_quad(low, high, $su * SPAN_QUADS + $qu));
            #end
            (*sums)[$t] += scaled(vec4<f32>(dots) * factors.x, factors[$s + 1], w.affine$s);
        }
        #end
    }
    #end
}

fn tile_of_d(n0: u32, m0: u32, thread: u32) {
    let lane = thread % LANES;
    let first_token = thread / LANES * TOKENS;
    let rows = rows_of_lane(n0, lane);
    let begin = first_k_tile() * PACKED_UNITS;
    let units = end_k_tile() * PACKED_UNITS;
    var sums: Accumulators;
    var w = unit_of(in_k_tile(rows, first_k_tile()), 0u);
    for (var first = begin; first < units; first += CHUNK_UNITS) {
        workgroupBarrier();
        let end = min(CHUNK_UNITS, units - first);
        load_x(m0, first * UNIT, end, thread);
        workgroupBarrier();
        for (var unit = 0u; unit < end; unit++) {
            // Counted over all k-tiles.
            let at = min(first + unit + 1u, units - 1u);
            let next = unit_of(in_k_tile(rows, at / PACKED_UNITS), at % PACKED_UNITS);
            multiply(w, first_token * TOKEN_PITCH + unit * UNIT_PITCH, &sums);
            w = next;
        }
    }

    // One token per iteration, to keep one copy of the epilogue
    // code; the next token's sums move up.
    // Half of the invocations have the first four of eight rows
    // and get the others from a neighbour.
    let row = n0 + lane * 4u;
    for (var m = m0 + first_token; m < m0 + first_token + TOKENS; m++) {
        workgroupBarrier();
        tile[thread] = bitcast<vec4<u32>>(sums[0]);
        workgroupBarrier();
        if (row % TILE_ROWS < 8u && m < tokens() && row < p.shape.stored_rows) {
            store8(m, row, sums[0], bitcast<vec4<f32>>(tile[thread + 2u]));
        }
        #for t MOVES
        sums[$t] = sums[$t+1];
        #end
    }
}

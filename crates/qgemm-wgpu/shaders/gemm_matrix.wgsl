// GEMM on cooperative matrices, for many tokens.
// A workgroup computes a TILE_N × TILE_M tile of D, a subgroup
// NS × MS matrices of SIDE × SIDE; W is on the left.
// Each k-block goes to workgroup memory:
// a TILE_N × TILE_K tile of W, dequantized to f16, and a
// TILE_M × TILE_K tile of X.
// The next k-block is loaded meanwhile.
// No invocation returns early:
// all invocations must reach cooperative operations.

// X in f16, as the X prologue writes it.
// Rows are whole k-blocks, aligned to eight elements.
// A second way to read X, even unused, slows the kernel.
@group(0) @binding(0) var<storage, read> x_halves: array<vec4<f16>>;

// Pitches in vectors of four.
// A pitch is eight halves more than the tile,
// against bank conflicts.
const W_PITCH: u32 = TILE_N / 4u + 2u;
const X_PITCH: u32 = TILE_K / 4u + 2u;
const PIECE_COLUMNS: u32 = PIECE_QUADS * 4u;
const W_BUFFER: u32 = TILE_K * W_PITCH;
const X_BUFFER: u32 = TILE_M * X_PITCH;
const SUBGROUPS_N: u32 = TILE_N / (NS * SIDE);
// Accumulator vectors per epilogue step of a subgroup:
// 16 rows of W (two halves of 8) by 16 tokens.
const SUMS: u32 = 64u;

var<workgroup> w_tile: array<vec4<f16>, BUFFERS * W_BUFFER>;    // (BUFFERS, TILE_K, W_PITCH)
var<workgroup> x_tile: array<vec4<f16>, BUFFERS * X_BUFFER>;    // (BUFFERS, TILE_M, X_PITCH)
var<workgroup> sums: array<vec4<f32>, SUBGROUPS * SUMS>;        // (SUBGROUPS, 16 tokens, 16 rows of W)

// A few columns of four rows of W.
struct WPiece {
    #for q PIECE_QUADS
    quad$q: QuadWords,
    #end
    affine: Affine,
}

// Eight columns of a token.
struct XPiece {
    lo: vec4<f16>,
    hi: vec4<f16>,
}

// An invocation's loads of a k-block.
struct Step {
    #for i W_PIECES
    w$i: WPiece,
    #end
    #for i X_PIECES
    x$i: XPiece,
    #end
}

fn step_of(n0: u32, m0: u32, s0: u32, thread: u32) -> Step {
    var step: Step;
    #for i W_PIECES
    step.w$i = w_piece(n0, s0, thread + $iu * THREADS);
    #end
    #for i X_PIECES
    step.x$i = x_piece(m0, s0, thread + $iu * THREADS);
    #end
    return step;
}

fn w_piece(n0: u32, s0: u32, i: u32) -> WPiece {
    let rows = rows_of(n0 + i % (TILE_N / 4u) * 4u, s0 / PACKED_K);
    let column = s0 % PACKED_K + i / (TILE_N / 4u) * PIECE_COLUMNS;
    var piece: WPiece;
    #for q PIECE_QUADS
    piece.quad$q = quad_words(rows, column / 4u + $qu);
    #end
    piece.affine = affine(rows, column / SUB_BLOCK);
    return piece;
}

fn x_piece(m0: u32, s0: u32, i: u32) -> XPiece {
    let m = min(m0 + i / (TILE_K / 8u), p.shape.m - 1u);
    let vector = (p.x_base + m * p.x_row + s0) / 4u + i % (TILE_K / 8u) * 2u;
    return XPiece(x_halves[vector], x_halves[vector + 1u]);
}

fn store_w(buffer: u32, i: u32, w: WPiece) {
    let at = buffer * W_BUFFER + i / (TILE_N / 4u) * PIECE_COLUMNS * W_PITCH + i % (TILE_N / 4u);
    #for q PIECE_QUADS
    store_quad(at + $qu * 4u * W_PITCH, numbers_of(w.quad$q), w.affine);
    #end
}

fn store_quad(at: u32, numbers: Quad, affine: Affine) {
    w_tile[at] = vec4<f16>(scaled(numbers.a, 1.0, affine));
    w_tile[at + W_PITCH] = vec4<f16>(scaled(numbers.b, 1.0, affine));
    w_tile[at + 2u * W_PITCH] = vec4<f16>(scaled(numbers.c, 1.0, affine));
    w_tile[at + 3u * W_PITCH] = vec4<f16>(scaled(numbers.d, 1.0, affine));
}

fn store_x(buffer: u32, i: u32, x: XPiece) {
    let at = buffer * X_BUFFER + i / (TILE_K / 8u) * X_PITCH + i % (TILE_K / 8u) * 2u;
    x_tile[at] = x.lo;
    x_tile[at + 1u] = x.hi;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let n0 = first_row(group, groups);
    let m0 = group.y * TILE_M;
    // Offsets of the subgroup in the tile.
    let part_n = subgroup % SUBGROUPS_N * (NS * SIDE);
    let part_m = subgroup / SUBGROUPS_N * (MS * SIDE);
    begin(thread);

    #for j MS
    #for i NS
    var sums$i_$j: Accumulators;
    #end
    #end
    var next = step_of(n0, m0, 0u, thread);
    var buffer = 0u;
    let last = (p.shape.stored_k - 1u) / TILE_K * TILE_K;
    for (var s0 = 0u; s0 <= last; s0 += TILE_K) {
        #for i W_PIECES
        store_w(buffer, thread + $iu * THREADS, next.w$i);
        #end
        #for i X_PIECES
        store_x(buffer, thread + $iu * THREADS, next.x$i);
        #end
        workgroupBarrier();
        next = step_of(n0, m0, min(s0 + TILE_K, last), thread);
        for (var k = 0u; k < TILE_K; k += SIDE) {
            let w_at = buffer * W_BUFFER + k * W_PITCH + part_n / 4u;
            let x_at = buffer * X_BUFFER + part_m * X_PITCH + k / 4u;
            #for i NS
            let w$i = coopLoad<Left>(&w_tile[w_at + $iu * (SIDE / 4u)], W_PITCH);
            #end
            #for j MS
            let x$j = coopLoad<Right>(&x_tile[x_at + $ju * SIDE * X_PITCH], X_PITCH);
            #for i NS
            sums$i_$j = coopMultiplyAdd(w$i, x$j, sums$i_$j);
            #end
            #end
        }
        if (BUFFERS == 1u) {
            workgroupBarrier();
        }
        buffer = (buffer + 1u) % BUFFERS;
    }

    // 16 rows × 16 tokens per iteration, to keep one copy of the
    // epilogue code; the next accumulators move up.
    for (var j = 0u; j < MS / BLOCK; j++) {
        for (var i = 0u; i < NS / BLOCK; i++) {
            #for b BLOCK
            #for a BLOCK
            coopStore(sums$a_$b, &sums[subgroup * SUMS + $bu * SIDE * 4u + $au * (SIDE / 4u)], 4u);
            #end
            #end
            workgroupBarrier();
            finish(n0 + part_n + i * 16u, m0 + part_m + j * 16u, subgroup, lane);
            workgroupBarrier();
            #for a BLOCK
            #for b BLOCK
            #for i NS_MOVES
            sums$i_$b = sums$i+1_$b;
            #end
            #end
            #end
        }
        #for b BLOCK
        #for j MS_MOVES
        #for i NS
        sums$i_$j = sums$i_$j+1;
        #end
        #end
        #end
    }
}

// Stores the subgroup's outputs:
// rows of W from `n` on, tokens from `m0` on.
fn finish(n: u32, m0: u32, subgroup: u32, lane: u32) {
    for (var i = lane; i < SUMS / 2u; i += THREADS / SUBGROUPS) {
        let m = m0 + i / 2u;
        let row = n + i % 2u * 4u;
        let at = subgroup * SUMS + i / 2u * 4u + i % 2u;
        if (m < p.shape.m && row < p.shape.stored_rows) {
            let factor = x_factor(m);
            store8(m, row, sums[at] * factor, sums[at + 2u] * factor);
        }
    }
}

// Inverse of the factor that scaled token m of X.
// Converted X is in natural column order, so binding 3
// holds the factors.
fn x_factor(m: u32) -> f32 {
    if (has(FLAG_X_FACTOR)) {
        return bitcast<f32>(k_order[p.k_order_base + m]);
    }
    return 1.0;
}

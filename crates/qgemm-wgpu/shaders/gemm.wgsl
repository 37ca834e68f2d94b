// GEMM for many tokens.
// A workgroup computes a TILE_N × TILE_M tile of D.
// An invocation has eight rows of W and four times
// THREAD_M_VECTORS tokens.
// Each k-block goes to workgroup memory:
// a TILE_N × TILE_K tile of W, dequantized to f32, and a
// TILE_M × TILE_K tile of X.
// Products are added in order of K, so the bits do not depend
// on the tile size.

// Vectors per column of each tile.
// W columns are split in halves, so that vectors that
// invocations read at once are adjacent.
const W_VECTORS: u32 = TILE_N / 4u;
const W_HALF: u32 = W_VECTORS / 2u;
const X_VECTORS: u32 = TILE_M / 4u;
const THREADS_N: u32 = TILE_N / 8u;
const THREADS_M: u32 = THREADS / THREADS_N;

var<workgroup> w_tile: array<vec4<f32>, TILE_K * W_VECTORS>;  // (TILE_K, TILE_N)
var<workgroup> x_tile: array<vec4<f32>, TILE_K * X_VECTORS>;  // (TILE_K, TILE_M)

// The first half of a column has rows 0..7 of each W tile, the
// second half rows 8..15.
fn load_w(n0: u32, s0: u32, thread: u32) {
    for (var i = thread; i < W_VECTORS * (TILE_K / 4u); i += THREADS) {
        let group = i % W_VECTORS;
        let column = i / W_VECTORS * 4u;
        let rows = rows_of(n0 + group * 4u, s0 / PACKED_K);
        let in_k_tile = s0 % PACKED_K + column;
        let numbers = numbers_of(quad_words(rows, in_k_tile / 4u));
        let affine = affine(rows, in_k_tile / SUB_BLOCK);
        let at = column * W_VECTORS + group % 4u / 2u * W_HALF + group / 4u * 2u + group % 2u;
        w_tile[at] = scaled(numbers.a, 1.0, affine);
        w_tile[at + W_VECTORS] = scaled(numbers.b, 1.0, affine);
        w_tile[at + 2u * W_VECTORS] = scaled(numbers.c, 1.0, affine);
        w_tile[at + 3u * W_VECTORS] = scaled(numbers.d, 1.0, affine);
    }
}

fn load_x(m0: u32, s0: u32, thread: u32) {
    for (var i = thread; i < TILE_M * (TILE_K / 8u); i += THREADS) {
        let m = i % TILE_M;
        let column = i / TILE_M * 8u;
        let values = x8(min(m0 + m, tokens() - 1u), s0 + column);
        let at = column * X_VECTORS + m / 4u;
        #for j 4
        x_tile[at + $ju * X_VECTORS][m % 4u] = values.lo[$j];
        x_tile[at + (4u + $ju) * X_VECTORS][m % 4u] = values.hi[$j];
        #end
    }
}

fn tile_of_d(n0: u32, m0: u32, thread: u32) {
    let tn = thread % THREADS_N;
    let tm = thread / THREADS_N;

    // Accumulators of token i of vector v:
    // the first four rows, and the second four.
    #for v THREAD_M_VECTORS
    #for i 4
    var low$v_$i: vec4<f32>;
    var high$v_$i: vec4<f32>;
    #end
    #end
    let end = min(p.shape.stored_k, end_k_tile() * PACKED_K);
    for (var s0 = first_k_tile() * PACKED_K; s0 < end; s0 += TILE_K) {
        load_w(n0, s0, thread);
        load_x(m0, s0, thread);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k++) {
            let w_low = w_tile[k * W_VECTORS + tn];
            let w_high = w_tile[k * W_VECTORS + W_HALF + tn];
            #for v THREAD_M_VECTORS
            let x$v = x_tile[k * X_VECTORS + $vu * THREADS_M + tm];
            #end
            #for v THREAD_M_VECTORS
            #for i 4
            low$v_$i = fma(w_low, vec4<f32>(x$v[$i]), low$v_$i);
            high$v_$i = fma(w_high, vec4<f32>(x$v[$i]), high$v_$i);
            #end
            #end
        }
        workgroupBarrier();
    }

    let row = n0 + tn / 2u * 16u + tn % 2u * 4u;
    if (row >= p.shape.stored_rows) {
        return;
    }
    // An array and a loop, to keep one copy of the epilogue code.
    var sums: array<vec4<f32>, THREAD_M_VECTORS * 8u>;
    #for v THREAD_M_VECTORS
    #for i 4
    sums[$v * 8 + $i * 2] = low$v_$i;
    sums[$v * 8 + $i * 2 + 1] = high$v_$i;
    #end
    #end
    for (var i = 0u; i < THREAD_M_VECTORS * 4u; i++) {
        let m = m0 + (i / 4u * THREADS_M + tm) * 4u + i % 4u;
        if (m < tokens()) {
            store8(m, row, sums[i * 2u], sums[i * 2u + 1u]);
        }
    }
}

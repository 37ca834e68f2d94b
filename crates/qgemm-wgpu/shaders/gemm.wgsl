// Many tokens: a workgroup computes a TILE_N x TILE_M tile of D, each invocation 4 x 4 of it. Every step along K
// decodes a TILE_N x TILE_K tile of W to f32 and copies a TILE_M x TILE_K tile of X, both into workgroup memory.
// Every sum is added in the order of K, so its bits do not depend on the tile sizes.

const STEPS: u32 = TILE_K / 8u;
const THREADS_N: u32 = TILE_N / 4u;
// The padding spreads the stores of one column over the banks of workgroup memory.
const W_PITCH: u32 = TILE_N + 1u;
const X_PITCH: u32 = TILE_M + 1u;

var<workgroup> w_tile: array<f32, TILE_K * W_PITCH>;  // (TILE_K, TILE_N)
var<workgroup> x_tile: array<f32, TILE_K * X_PITCH>;  // (TILE_K, TILE_M)

fn load_w(n0: u32, s0: u32, thread: u32) {
    for (var i = thread; i < TILE_N * STEPS; i += THREADS) {
        let column = (i % STEPS) * 8u;
        let row = i / STEPS;
        let values = w8(min(n0 + row, p.shape.n - 1u), s0 + column);
        var lo = values.lo;
        var hi = values.hi;
        for (var j = 0u; j < 4u; j++) {
            w_tile[(column + j) * W_PITCH + row] = lo[j];
            w_tile[(column + 4u + j) * W_PITCH + row] = hi[j];
        }
    }
}

fn load_x(m0: u32, s0: u32, thread: u32) {
    for (var i = thread; i < TILE_M * STEPS; i += THREADS) {
        let column = (i % STEPS) * 8u;
        let row = i / STEPS;
        let values = x8(min(m0 + row, p.shape.m - 1u), s0 + column);
        var lo = values.lo;
        var hi = values.hi;
        for (var j = 0u; j < 4u; j++) {
            x_tile[(column + j) * X_PITCH + row] = lo[j];
            x_tile[(column + 4u + j) * X_PITCH + row] = hi[j];
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    // Tiles along N that exceed one grid dimension continue along z.
    let n0 = (group.x + group.z * groups.x) * TILE_N;
    if (n0 >= p.shape.n) {
        return;
    }
    let m0 = group.y * TILE_M;
    let tn = (thread % THREADS_N) * 4u;
    let tm = (thread / THREADS_N) * 4u;

    var sums: array<vec4<f32>, 4>;  // (token, output)
    for (var s0 = 0u; s0 < p.shape.stored_k; s0 += TILE_K) {
        load_w(n0, s0, thread);
        load_x(m0, s0, thread);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k++) {
            let w_at = k * W_PITCH + tn;
            let w = vec4<f32>(w_tile[w_at], w_tile[w_at + 1u], w_tile[w_at + 2u], w_tile[w_at + 3u]);
            let x_at = k * X_PITCH + tm;
            for (var i = 0u; i < 4u; i++) {
                sums[i] += x_tile[x_at + i] * w;
            }
        }
        workgroupBarrier();
    }

    for (var i = 0u; i < 4u; i++) {
        let m = m0 + tm + i;
        if (m < p.shape.m && n0 + tn < p.shape.n) {
            store4(m, n0 + tn, sums[i]);
        }
    }
}

// Few tokens: a workgroup computes TILE_N outputs for TILE_M tokens. Its invocations take turns along K, eight
// columns at a time, and add their sums through workgroup memory, always in the same order.

const STEP: u32 = 8u;
const SUMS: u32 = TILE_N * TILE_M;

var<workgroup> partial: array<f32, SUMS * THREADS>;

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

    var sums: array<f32, SUMS>;
    for (var s = thread * STEP; s < p.shape.stored_k; s += THREADS * STEP) {
        var x: array<Eight, TILE_M>;
        for (var m = 0u; m < TILE_M; m++) {
            x[m] = x8(min(m0 + m, p.shape.m - 1u), s);
        }
        for (var n = 0u; n < TILE_N; n++) {
            let w = w8(min(n0 + n, p.shape.n - 1u), s);
            for (var m = 0u; m < TILE_M; m++) {
                sums[m * TILE_N + n] += dot(w.lo, x[m].lo) + dot(w.hi, x[m].hi);
            }
        }
    }

    for (var i = 0u; i < SUMS; i++) {
        partial[i * THREADS + thread] = sums[i];
    }
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) {
            for (var i = 0u; i < SUMS; i++) {
                partial[i * THREADS + thread] += partial[i * THREADS + thread + half];
            }
        }
        workgroupBarrier();
    }

    if (thread < TILE_M && m0 + thread < p.shape.m) {
        var total: vec4<f32>;
        for (var n = 0u; n < TILE_N; n++) {
            total[n] = partial[(thread * TILE_N + n) * THREADS];
        }
        store4(m0 + thread, n0, total);
    }
}

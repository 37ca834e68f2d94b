// Copies X for matrix instructions, a token a workgroup: in f16, in the order in which W stores its columns, rounded
// after the token was multiplied by a power of two that brings its largest finite magnitude to [2^14, 2^15).

// The copy, rows of `d_row` halves from half `d_base` on, by vectors of eight. From word `token_scale_base` on, the
// inverse of what each token was multiplied with.
@group(0) @binding(8) var<storage, read_write> staged: array<vec4<u32>>;

var<workgroup> largest: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let m = group.x + group.y * groups.x;
    if (m >= p.shape.m) {
        return;
    }
    var factor = 1.0;
    if (has(FLAG_X_FACTOR)) {
        var own = 0u;
        for (var s = thread * 8u; s < p.shape.stored_k; s += THREADS * 8u) {
            let x = x8(m, s);
            own = max(own, max(largest_finite(x.lo), largest_finite(x.hi)));
        }
        largest[thread] = own;
        for (var half = THREADS / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if (thread < half) {
                largest[thread] = max(largest[thread], largest[thread + half]);
            }
        }
        workgroupBarrier();
        // Of 2^(14 - exponent), 2^126 at most: those of it and of its inverse are of normal numbers.
        let exponent = min(268u - (largest[0] >> 23u), 253u);
        factor = bitcast<f32>(exponent << 23u);
        if (thread == 0u) {
            let word = p.token_scale_base + m;
            staged[word / 4u][word % 4u] = (254u - exponent) << 23u;
        }
    }
    for (var s = thread * 8u; s < p.d_row; s += THREADS * 8u) {
        let x = x8(m, s);
        let lo = x.lo * factor;
        let hi = x.hi * factor;
        let halves = vec4<u32>(pair(lo.x, lo.y), pair(lo.z, lo.w), pair(hi.x, hi.y), pair(hi.z, hi.w));
        staged[(p.d_base + m * p.d_row + s) / 8u] = halves;
    }
}

// The bits of the largest magnitude that is neither infinite nor NaN.
fn largest_finite(x: vec4<f32>) -> u32 {
    let magnitudes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    let finite = select(vec4<u32>(), magnitudes, magnitudes < vec4<u32>(0x7f800000u));
    return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

fn pair(low: f32, high: f32) -> u32 {
    return f32_to_f16(low) | (f32_to_f16(high) << 16u);
}

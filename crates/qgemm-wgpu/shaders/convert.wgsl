// A matrix in another element type, with its rows in order: an invocation converts eight columns of a row at a time. With
// FLAG_X_FACTOR every row is multiplied by the power of two that brings its largest finite magnitude to [2^14, 2^15),
// 2^126 at most, before it is rounded, and `row_factors` gets the inverse; a workgroup then has all columns of its rows.

var<workgroup> largest: array<u32, THREADS>;  // (columns, rows_together)

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let rows = p.rows_together;
    let lanes = THREADS / rows;
    let beside = p.rows_beside == 1u;
    let row_of_group = select(thread / lanes, thread % rows, beside);
    let lane = select(thread % lanes, thread / rows, beside);
    let row = (group.y + group.z * groups.y) * rows + row_of_group;
    let first = (group.x * lanes + lane) * 8u;
    let step = groups.x * lanes * 8u;
    // No invocation may return before the barriers.
    let end = select(0u, p.shape.d_columns, row < p.shape.rows);
    // The exponent of the factor, as f32 has it.
    var exponent = 127u;
    if (has(FLAG_X_FACTOR)) {
        var own = 0u;
        // X's columns in their own order, those that D leaves out among them.
        for (var s = first; s < select(0u, x_columns(), row < p.shape.rows); s += step) {
            let x = x8_of(row, s, x_columns(), false);
            own = max(own, max(largest_finite(x.lo), largest_finite(x.hi)));
        }
        let at = lane * rows + row_of_group;
        largest[at] = own;
        for (var half = lanes / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if (lane < half) {
                largest[at] = max(largest[at], largest[at + half * rows]);
            }
        }
        workgroupBarrier();
        // 253 is that of 2^126: factor and inverse are normal numbers.
        exponent = min(268u - (largest[row_of_group] >> 23u), 253u);
        if (lane == 0u && row < p.shape.rows) {
            row_factors[p.factor_base + row] = (254u - exponent) << 23u;
        }
    }
    for (var s = first; s < end; s += step) {
        let x = x8(row, s);
        store_eight(row, s, converted(x.lo, exponent), converted(x.hi, exponent));
    }
}

// The bits of the largest magnitude that is neither infinite nor NaN.
fn largest_finite(x: vec4<f32>) -> u32 {
    let magnitudes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    let finite = select(vec4<u32>(), magnitudes, magnitudes < vec4<u32>(0x7f800000u));
    return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

// Four values before they are rounded. Without a factor no arithmetic touches them, for which adapters may take subnormal
// numbers for 0.
fn converted(x: vec4<f32>, exponent: u32) -> vec4<f32> {
    var value = x;
    if (has(FLAG_X_FACTOR)) {
        let bits = bitcast<vec4<u32>>(x);
        // Subnormal numbers are their mantissa times 2^-149. Where that times the factor is none, it vanishes in f16, too.
        let mantissa = vec4<f32>(bits & vec4<u32>(0x7fffffu));
        let tiny = bitcast<vec4<u32>>(mantissa * bitcast<f32>((max(exponent, 150u) - 149u) << 23u));
        let signed = bitcast<vec4<f32>>(tiny | (bits & vec4<u32>(0x80000000u)));
        let is_subnormal = (bits & vec4<u32>(0x7f800000u)) == vec4<u32>();
        value = select(x * bitcast<f32>(exponent << 23u), signed, is_subnormal);
    }
    if (d_dtype() == BF16) {
        // f32's largest numbers would become infinite: bf16's largest finite one is as near.
        let bits = bitcast<vec4<u32>>(value);
        let magnitude = bits & vec4<u32>(0x7fffffffu);
        let beyond = (magnitude > vec4<u32>(0x7f7f0000u)) & (magnitude < vec4<u32>(0x7f800000u));
        let most = (bits & vec4<u32>(0x80000000u)) | vec4<u32>(0x7f7f0000u);
        value = bitcast<vec4<f32>>(select(bits, most, beyond));
    }
    return value;
}

// Type conversion, rows in order.
// An invocation converts eight columns of a row at a time.
// With FLAG_X_FACTOR each row is scaled by a power of two, at
// most 2^126, before it is rounded. The power brings the row's
// largest finite magnitude to [2^14, 2^15).
// `row_factors` gets its inverse.
// A workgroup then has all columns of its rows.

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
    // f32 exponent of the factor.
    var exponent = 127u;
    if (has(FLAG_X_FACTOR)) {
        var own = 0u;
        // All columns of X in natural order, including columns
        // that D leaves out.
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
        // 253 is 2^126: the factor and its inverse are normal numbers.
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

// Bits of the largest finite magnitude.
fn largest_finite(x: vec4<f32>) -> u32 {
    let magnitudes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    let finite = select(vec4<u32>(), magnitudes, magnitudes < vec4<u32>(0x7f800000u));
    return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

// Four values before rounding.
// Without a factor they bypass arithmetic:
// adapters may flush subnormal numbers to 0.
fn converted(x: vec4<f32>, exponent: u32) -> vec4<f32> {
    var value = x;
    if (has(FLAG_X_FACTOR)) {
        let bits = bitcast<vec4<u32>>(x);
        // A subnormal number is its mantissa times 2^-149.
        // If its scaled value is subnormal too, it is 0 in f16 anyway.
        let mantissa = vec4<f32>(bits & vec4<u32>(0x7fffffu));
        let tiny = bitcast<vec4<u32>>(mantissa * bitcast<f32>((max(exponent, 150u) - 149u) << 23u));
        let signed = bitcast<vec4<f32>>(tiny | (bits & vec4<u32>(0x80000000u)));
        let is_subnormal = (bits & vec4<u32>(0x7f800000u)) == vec4<u32>();
        value = select(x * bitcast<f32>(exponent << 23u), signed, is_subnormal);
    }
    if (d_dtype() == BF16) {
        // f32's largest numbers would become infinite; bf16's largest
        // finite number is as near.
        let bits = bitcast<vec4<u32>>(value);
        let magnitude = bits & vec4<u32>(0x7fffffffu);
        let beyond = (magnitude > vec4<u32>(0x7f7f0000u)) & (magnitude < vec4<u32>(0x7f800000u));
        let most = (bits & vec4<u32>(0x80000000u)) | vec4<u32>(0x7f7f0000u);
        value = bitcast<vec4<f32>>(select(bits, most, beyond));
    }
    return value;
}

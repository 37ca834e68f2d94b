// Quantization of X.
// An invocation has eight columns per iteration.
// A workgroup has part of a row, or, with per-token scales or
// factors, the whole row.
// quantize_codes.wgsl quantizes each column group.

var<workgroup> largest: array<u32, THREADS>;
var<workgroup> byte_scales: array<u32, THREADS>;
var<workgroup> code_sums: array<i32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group.y + group.z * groups.y;
    // No invocation may return before the barriers.
    let end = select(0u, p.shape.stored_columns, row < p.shape.rows);
    let step = groups.x * THREADS * 8u;
    var of_all = 0u;
    if (OF_TOKEN == 1u) {
        var own = 0u;
        for (var column = thread * 8u; column < end; column += THREADS * 8u) {
            let x = x8_of(row, column, x_columns(), false);
            own = max(own, max(largest_of(x.lo), largest_of(x.hi)));
        }
        largest[thread] = own;
        for (var half = THREADS / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if (thread < half) {
                largest[thread] = max(largest[thread], largest[thread + half]);
            }
        }
        workgroupBarrier();
        of_all = largest[0];
        workgroupBarrier();
    }
    // Bits of the inverse factor; 0 if it is invalid.
    var inverse_factor = ONE;
    if (FACTOR == FACTOR_GIVEN) {
        let bits = factor[p.factor_base];
        let is_fit = bits >= SMALLEST && bits <= 0x7e800000u;
        inverse_factor = select(0u, reciprocal(select(ONE, bits, is_fit)), is_fit);
    } else if (FACTOR == FACTOR_PER_TOKEN) {
        let bits = divided(of_all, 3u, 2u, 11u);
        inverse_factor = reciprocal(bits);
        if (thread == 0u && end > 0u) {
            token_factors[p.token_factors_base + row] = bits;
        }
    }
    for (var base = group.x * THREADS * 8u; base < end; base += step) {
        let column = base + thread * 8u;
        let x = x8_of(row, column, x_columns(), false);
        var of_block = of_all;
        if (BLOCK > 0u) {
            largest[thread] = max(magnitude_of(x.lo), magnitude_of(x.hi));
            workgroupBarrier();
            let lanes = max(BLOCK / 8u, 1u);
            let first = thread / lanes * lanes;
            of_block = 0u;
            for (var lane = first; lane < first + lanes; lane++) {
                of_block = max(of_block, largest[lane]);
            }
        }
        let scale = nearest_scale(thread, x.lo, x.hi, of_block, inverse_factor);
        var low = vec4<u32>();
        var high = vec4<u32>();
        if (SCALE == SCALE_NONE) {
            low = given_codes(x.lo, inverse_factor);
            high = given_codes(x.hi, inverse_factor);
        } else if (scale.is_number) {
            low = codes_of(x.lo, inverse_factor, scale.inverse);
            high = codes_of(x.hi, inverse_factor, scale.inverse);
        }
        if (column < end) {
            if (CODE == E2M1) {
                codes[p.codes_base + row * p.codes_row + column / 8u] = nibbles(low) | (nibbles(high) << 16u);
            } else {
                let at = p.codes_base + row * p.codes_row + column / 4u;
                codes[at] = bytes(low);
                codes[at + 1u] = bytes(high);
            }
        }
        let scales_at = p.scales_base + row * p.scales_row;
        if (SCALE == SCALE_F32) {
            let is_first = select(column % max(BLOCK, 1u) == 0u, column == 0u, BLOCK == 0u);
            if (is_first && column < end) {
                scales[scales_at + select(column / max(BLOCK, 1u), 0u, BLOCK == 0u)] = scale.stored;
            }
        }
        if (SCALE == SCALE_E8M0 || SCALE == SCALE_E4M3) {
            // Four scales form a word.
            byte_scales[thread] = scale.stored;
            workgroupBarrier();
            let lanes = max(BLOCK / 8u, 1u);
            if (column % (4u * max(BLOCK, 1u)) == 0u && column < end) {
                var word = 0u;
                for (var i = 0u; i < 4u; i++) {
                    word |= byte_scales[thread + i * lanes] << (8u * i);
                }
                scales[scales_at + column / (4u * max(BLOCK, 1u))] = word;
            }
        }
        if (SUM_SPAN > 0u) {
            code_sums[thread] = sum_of(low) + sum_of(high);
            workgroupBarrier();
            let span = max(SUM_SPAN, 1u);
            if (column % span == 0u && column < end) {
                var total = 0;
                for (var lane = thread; lane < thread + span / 8u; lane++) {
                    total += code_sums[lane];
                }
                let sum = f32(total) * bitcast<f32>(scale.stored);
                sums[p.sums_base + row * p.sums_row + column / span] = select(NAN, bitcast<u32>(sum), scale.is_number);
            }
        }
        workgroupBarrier();
    }
}

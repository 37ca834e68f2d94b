// Norm epilogue: quantized output.
// An invocation has eight columns per iteration.
// Invocations that share a scale compare maximums in workgroup
// memory, as in quantize.wgsl.

fn four(n: RowNorm, column: u32) -> vec4<f32> {
    return vec4<f32>(
        normalized(n, column),
        normalized(n, column + 1u),
        normalized(n, column + 2u),
        normalized(n, column + 3u),
    );
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = norm_of_row(group, groups, thread);
    let row = n.row;
    let is_there = row < p.shape.rows;
    let end = p.shape.d_columns;
    let step = p.shape.row_threads * 8u;
    // Other invocations have written the sum's columns that are
    // not in workgroup memory.
    storageBarrier();
    var of_all = 0u;
    if (OF_TOKEN == 1u) {
        var own = 0u;
        for (var column = n.lane * 8u; column < end; column += step) {
            own = max(own, max(largest_of(four(n, column)), largest_of(four(n, column + 4u))));
        }
        of_all = row_max(thread, n.lane, own);
        workgroupBarrier();
    }
    // Bits of the inverse factor; 0 if it is invalid.
    var inverse_factor = ONE;
    if (FACTOR == FACTOR_GIVEN) {
        let bits = others[p.others_base];
        let is_fit = bits >= SMALLEST && bits <= 0x7e800000u;
        inverse_factor = select(0u, reciprocal(select(ONE, bits, is_fit)), is_fit);
    } else if (FACTOR == FACTOR_PER_TOKEN) {
        let bits = divided(of_all, 3u, 2u, 11u);
        inverse_factor = reciprocal(bits);
        if (n.lane == 0u && is_there) {
            others[p.others_base + row * p.others_row] = bits;
        }
    }
    let scales_at = p.scales_base + row * p.scales_row;
    // No invocation may leave the loop before the barriers.
    for (var base = 0u; base < end; base += step) {
        let column = base + n.lane * 8u;
        let stores = is_there && column < end;
        let lo = four(n, column);
        let hi = four(n, column + 4u);
        var of_block = of_all;
        if (BLOCK > 0u) {
            largest[thread] = max(magnitude_of(lo), magnitude_of(hi));
            workgroupBarrier();
            let lanes = max(BLOCK / 8u, 1u);
            let first = thread / lanes * lanes;
            of_block = 0u;
            for (var lane = first; lane < first + lanes; lane++) {
                of_block = max(of_block, largest[lane]);
            }
            workgroupBarrier();
        }
        let scale = nearest_scale(thread, lo, hi, of_block, inverse_factor);
        var low = vec4<u32>();
        var high = vec4<u32>();
        if (SCALE == SCALE_NONE) {
            low = given_codes(lo, inverse_factor);
            high = given_codes(hi, inverse_factor);
        } else if (scale.is_number) {
            low = codes_of(lo, inverse_factor, scale.inverse);
            high = codes_of(hi, inverse_factor, scale.inverse);
        }
        if (stores) {
            if (CODE == E2M1) {
                codes[p.codes_base + row * p.codes_row + column / 8u] = nibbles(low) | (nibbles(high) << 16u);
            } else {
                let at = p.codes_base + row * p.codes_row + column / 4u;
                codes[at] = bytes(low);
                codes[at + 1u] = bytes(high);
            }
        }
        if (SCALE == SCALE_F32) {
            let is_first = select(column % max(BLOCK, 1u) == 0u, column == 0u, BLOCK == 0u);
            if (is_first && stores) {
                scales[scales_at + select(column / max(BLOCK, 1u), 0u, BLOCK == 0u)] = scale.stored;
            }
        }
        if (SCALE == SCALE_E8M0 || SCALE == SCALE_E4M3) {
            // Four scales form a word.
            largest[thread] = scale.stored;
            workgroupBarrier();
            let lanes = max(BLOCK / 8u, 1u);
            if (column % (4u * max(BLOCK, 1u)) == 0u && stores) {
                var word = 0u;
                for (var i = 0u; i < 4u; i++) {
                    word |= largest[thread + i * lanes] << (8u * i);
                }
                scales[scales_at + column / (4u * max(BLOCK, 1u))] = word;
            }
            workgroupBarrier();
        }
        if (SUM_SPAN > 0u) {
            largest[thread] = bitcast<u32>(sum_of(low) + sum_of(high));
            workgroupBarrier();
            let span = max(SUM_SPAN, 1u);
            if (column % span == 0u && stores) {
                var total = 0;
                for (var lane = thread; lane < thread + span / 8u; lane++) {
                    total += bitcast<i32>(largest[lane]);
                }
                let sum = f32(total) * bitcast<f32>(scale.stored);
                others[p.others_base + row * p.others_row + column / span] =
                    select(NAN, bitcast<u32>(sum), scale.is_number);
            }
            workgroupBarrier();
        }
    }
}

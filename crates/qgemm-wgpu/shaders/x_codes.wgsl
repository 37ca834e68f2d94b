// Quantized X with given codes and scales.
// Codes are s8; rows are `p.x_row` words apart.
// An f32 scale covers SCALE_BLOCK columns, or the whole token
// if SCALE_BLOCK is 0.
// Scales use the binding of the column order; their rows are
// `x_scale_row()` words apart.

// Loads `units` units of X from column `s0` on.
// Rows of codes are whole units.
fn load_x(m0: u32, s0: u32, units: u32, thread: u32) {
    for (var i = thread; i < CHUNK; i += THREADS) {
        let unit = i % CHUNK_UNITS;
        if (unit < units) {
            let at = i * UNIT_PITCH;
            let column = s0 + unit * UNIT;
            let m = min(m0 + i / CHUNK_UNITS, tokens() - 1u);
            var codes: array<vec4<u32>, 2>;
            var d = 0u;
            if (column < x_columns()) {
                let row = x_row_of(m);
                let word = x_first() + row * p.x_row + column / 4u;
                #for e 2
                codes[$e] = in_order(vec4<u32>(
                    x_word(word + $eu * 4u),
                    x_word(word + $eu * 4u + 1u),
                    x_word(word + $eu * 4u + 2u),
                    x_word(word + $eu * 4u + 3u),
                ));
                #end
                let block = select(0u, column / max(SCALE_BLOCK, 1u), SCALE_BLOCK != 0u);
                d = k_order[x_scales_first() + row * x_scale_row() + block];
            }
            let sums = vec2<i32>(sum_of(codes[0]), sum_of(codes[1]));
            let scale = bitcast<f32>(d);
            var spans = vec2<f32>(sums) * scale;
            if (SPANS == 1u) {
                spans.x = f32(sums.x + sums.y) * scale;
            }
            tile[at] = codes[0];
            tile[at + 1u] = codes[1];
            tile[at + 2u] = vec4<u32>(d, bitcast<u32>(spans.x), bitcast<u32>(spans.y), 0u);
        }
    }
}

// Words of four columns with columns 1 and 2 swapped.
fn in_order(words: vec4<u32>) -> vec4<u32> {
    let outer = words & vec4<u32>(0xff0000ffu);
    return outer | ((words >> vec4<u32>(8u)) & vec4<u32>(0xff00u)) | ((words << vec4<u32>(8u)) & vec4<u32>(0xff0000u));
}

fn sum_of(codes: vec4<u32>) -> i32 {
    let one = 0x01010101u;
    return dot4I8Packed(codes.x, one) + dot4I8Packed(codes.y, one) + dot4I8Packed(codes.z, one)
        + dot4I8Packed(codes.w, one);
}

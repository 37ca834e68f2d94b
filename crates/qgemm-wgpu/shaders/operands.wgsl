// X by token and stored column of W.

// The columns of row `m` of X for the stored columns `s .. s + 8` of W. `s` is a multiple of eight. Columns outside X
// are 0.
fn x8(m: u32, s: u32) -> Eight {
    let row = p.x_base + m * p.x_row;
    if (p.x_col == 1u && s + 8u <= p.shape.stored_k && !has(FLAG_K_ORDER)) {
        return x_eight(row + s);
    }
    // Column by column, in a loop that drivers cannot unroll.
    var values = Eight();
    for (var i = 0u; i < min(8u, max(p.shape.stored_k, s) - s); i++) {
        let value = vec4<f32>(x_at(row, s + i));
        values.lo = select(values.lo, value, vec4<u32>(i) == vec4<u32>(0u, 1u, 2u, 3u));
        values.hi = select(values.hi, value, vec4<u32>(i) == vec4<u32>(4u, 5u, 6u, 7u));
    }
    return values;
}

fn x_at(row: u32, s: u32) -> f32 {
    var column = s;
    if (has(FLAG_K_ORDER)) {
        column = k_order[p.k_order_base + s];
        if (column == NO_COLUMN) {
            return 0.0;
        }
    }
    let index = row + column * p.x_col;
    return element(x_word(word_of(index, p.shape.x_dtype)), index, p.shape.x_dtype);
}

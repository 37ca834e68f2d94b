// X by token and stored column of W.
// For `convert`: by row and column of D.

// Eight stored columns of row `m` of X, 0 outside X.
// `s` is a multiple of eight.
fn x8(m: u32, s: u32) -> Eight {
    return x8_of(m, s, stored_columns(), has(FLAG_K_ORDER));
}

// `x8` for `end` columns; gathered columns if `gathers`.
fn x8_of(m: u32, s: u32, end: u32, gathers: bool) -> Eight {
    let row = x_first() + x_row_of(m) * p.x_row;
    if (x_col() == 1u && s + 8u <= end && !gathers) {
        return x_eight(row + s);
    }
    // Column by column; drivers cannot unroll this loop.
    var values = Eight();
    for (var i = 0u; i < min(8u, max(end, s) - s); i++) {
        let value = vec4<f32>(x_at(row, s + i, gathers));
        values.lo = select(values.lo, value, vec4<u32>(i) == vec4<u32>(0u, 1u, 2u, 3u));
        values.hi = select(values.hi, value, vec4<u32>(i) == vec4<u32>(4u, 5u, 6u, 7u));
    }
    return values;
}

fn x_at(row: u32, s: u32, gathers: bool) -> f32 {
    var column = s;
    if (gathers) {
        column = k_order[k_order_first() + s];
    }
    if (column >= x_columns()) {
        return 0.0;
    }
    let index = row + column * x_col();
    return element(x_word(word_of(index, x_dtype())), index, x_dtype());
}

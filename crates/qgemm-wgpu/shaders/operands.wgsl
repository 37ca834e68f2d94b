// X by token and stored column of W.

// What row `m` of X holds for the stored columns `s .. s + 8` of W, `s` being a multiple of eight; 0 where it holds
// nothing.
fn x8(m: u32, s: u32) -> Eight {
    let row = p.x_base + m * p.x_row;
    if (p.x_col == 1u && s + 8u <= x_columns() && !has(FLAG_K_ORDER)) {
        return x_eight(row + s);
    }
    // One by one, in a loop that drivers cannot write out eight times.
    var values = Eight();
    for (var i = 0u; i < min(8u, max(x_columns(), s) - s); i++) {
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
    return element(x_word(word_of(index, x_dtype())), index, x_dtype());
}

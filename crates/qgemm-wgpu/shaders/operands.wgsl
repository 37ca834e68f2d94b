// X by token and stored column of W.

// What row `m` of X holds for the stored columns `s .. s + 8` of W, `s` being a multiple of eight; 0 where it holds nothing.
fn x8(m: u32, s: u32) -> Eight {
    let row = p.x_base + m * p.x_row;
    if (p.x_col == 1u && s + 8u <= p.shape.stored_k && !has(FLAG_K_ORDER)) {
        return x_eight(row + s);
    }
    var values: array<f32, 8>;
    for (var i = 0u; i < 8u; i++) {
        values[i] = x_at(row, s + i);
    }
    return Eight(
        vec4<f32>(values[0], values[1], values[2], values[3]),
        vec4<f32>(values[4], values[5], values[6], values[7]),
    );
}

fn x_at(row: u32, s: u32) -> f32 {
    if (s >= p.shape.stored_k) {
        return 0.0;
    }
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

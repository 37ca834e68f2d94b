// X by token and stored column of W.

// What row `m` of X holds for the stored columns `s .. s + 8` of W, `s` being a multiple of eight; 0 where it holds nothing.
fn x8(m: u32, s: u32) -> Eight {
    let row = p.x_base + m * p.x_row;
    if (p.x_col == 1u && s + 8u <= p.shape.stored_k && !has(FLAG_K_ORDER)) {
        return x_eight(row + s);
    }
    return Eight(
        vec4<f32>(x_at(row, s), x_at(row, s + 1u), x_at(row, s + 2u), x_at(row, s + 3u)),
        vec4<f32>(x_at(row, s + 4u), x_at(row, s + 5u), x_at(row, s + 6u), x_at(row, s + 7u)),
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
    return element(x_word(word_of(index, X_DTYPE)), index, X_DTYPE);
}

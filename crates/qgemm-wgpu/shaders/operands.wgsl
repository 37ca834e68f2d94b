// W and X by row and stored column.

// Columns `s .. s + 8` of the row of W at `position`; 0 beyond the stored columns, where blocks may hold anything.
fn w8(position: u32, s: u32) -> Eight {
    let row = p.w_base + row_at(position) * p.w_row;
    let values = dequant8(row + (s / BLOCK_LEN) * BLOCK_BYTES, s % BLOCK_LEN);
    if (s + 8u <= p.shape.stored_k) {
        return values;
    }
    let left = vec4<u32>(p.shape.stored_k - min(s, p.shape.stored_k));
    let zero = vec4<f32>(0.0);
    return Eight(
        select(zero, values.lo, vec4<u32>(0u, 1u, 2u, 3u) < left),
        select(zero, values.hi, vec4<u32>(4u, 5u, 6u, 7u) < left),
    );
}

// What row `m` of X holds for the stored columns `s .. s + 8` of W; 0 where it holds nothing.
fn x8(m: u32, s: u32) -> Eight {
    let row = p.x_base + m * p.x_row;
    if (p.x_col == 1u && s + 8u <= p.shape.stored_k && !has(FLAG_K_ORDER)) {
        return Eight(x_contiguous4(row + s), x_contiguous4(row + s + 4u));
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
    return element(x_words[word_of(index, X_DTYPE)], index, X_DTYPE);
}

fn x_contiguous4(index: u32) -> vec4<f32> {
    if (X_DTYPE == F32) {
        return bitcast<vec4<f32>>(
            vec4<u32>(x_words[index], x_words[index + 1u], x_words[index + 2u], x_words[index + 3u]),
        );
    }
    let word = index >> 1u;
    let low = x_words[word];
    let middle = x_words[word + 1u];
    if ((index & 1u) == 0u) {
        return four_halves(low, middle, X_DTYPE);
    }
    let high = x_words[word + 2u];
    return four_halves((low >> 16u) | (middle << 16u), (middle >> 16u) | (high << 16u), X_DTYPE);
}

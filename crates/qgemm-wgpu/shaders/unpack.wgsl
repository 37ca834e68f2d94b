// Dequantized columns of W:
// D[i, n] = W[n, first + i].
// An invocation decodes four rows by four columns of W.
// The X parameters locate D in W:
// `x_row` is the input feature of D's first row, `x_col` the
// stored column where tiles start, a multiple of four.
// A gated pair has the gate columns, then the up columns.

// Row of D for a stored column.
// A result ≥ D's number of rows means none.
fn written_row(stored: u32) -> u32 {
    if (!has(FLAG_K_ORDER)) {
        return stored - p.x_row;
    }
    // The order has no entries past `stored_k`.
    if (stored >= p.shape.stored_k) {
        return 0xffffffffu;
    }
    return k_order[k_order_first() + stored] - p.x_row;
}

// Feature of a row of W, a multiple of four.
fn feature_of(row: u32) -> u32 {
    return select(row, row / 16u * 8u + row % 8u, has(FLAG_GATED));
}

fn column_of(row: u32) -> u32 {
    return feature_of(row) + select(0u, p.shape.out_features, has(FLAG_GATED) && row % 16u >= 8u);
}

fn put(stored: u32, row: u32, count: u32, factors: vec4<f32>, values: vec4<f32>) {
    let d_row = written_row(stored);
    if (d_row < tokens()) {
        store4(d_row, column_of(row), count, values * factors);
    }
}

fn tile_of_d(n0: u32, m0: u32, thread: u32) {
    let row = n0 + thread % (TILE_N / 4u) * 4u;
    let stored = p.x_col + m0 + thread / (TILE_N / 4u) * 4u;
    if (row >= p.shape.stored_rows || feature_of(row) >= p.shape.out_features || stored >= k_tiles() * PACKED_K) {
        return;
    }
    let rows = rows_of(row, stored / PACKED_K);
    let column = stored % PACKED_K;
    let numbers = numbers_of(quad_words(rows, column / 4u));
    let affine = affine(rows, column / SUB_BLOCK);
    let count = min(4u, p.shape.out_features - feature_of(row));
    var factors = vec4<f32>(1.0);
    if (has(FLAG_ROW_SCALE)) {
        let at = four(row_scale_first() + row, count);
        factors = vec4<f32>(row_scale[at.x], row_scale[at.y], row_scale[at.z], row_scale[at.w]);
    }
    put(stored, row, count, factors, scaled(numbers.a, 1.0, affine));
    put(stored + 1u, row, count, factors, scaled(numbers.b, 1.0, affine));
    put(stored + 2u, row, count, factors, scaled(numbers.c, 1.0, affine));
    put(stored + 3u, row, count, factors, scaled(numbers.d, 1.0, affine));
}

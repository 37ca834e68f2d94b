// RMSNorm and LayerNorm statistics of rows.
// `row_threads` invocations share a row, in column pairs.
// Workgroup memory keeps the first columns; each pass
// rereads the others.
// A power-of-two scale keeps squares in f32's range.
// Infinity and NaN are tested by bits, because adapters may
// assume that they do not occur.

var<workgroup> kept: array<f32, KEPT>;
var<workgroup> sums: array<vec2<f32>, THREADS>;
var<workgroup> largest: array<u32, THREADS>;

// Element of an operand. A row of the kernel is a group of
// features of a row.
fn at(row: u32, stride: u32, column: u32) -> u32 {
    if (p.feature_groups == 1u) {
        return row * stride + column;
    }
    return row / p.feature_groups * stride + first_of(row) + column;
}

// First column of a group.
fn first_of(row: u32) -> u32 {
    return row % p.feature_groups * p.shape.columns;
}

// Activation of the gate. z has the place of the residual.
fn gate_at(row: u32, column: u32) -> f32 {
    let index = p.residual_base + at(row, p.residual_row, column);
    let dtype = type_of(TYPE_RESIDUAL);
    let z = element(residual_words[word_of(index, dtype)], index, dtype);
    let x = clamp(z, -100.0, 100.0);
    let e = exp(-abs(x));
    let sigmoid = select(1.0, e, x < 0.0) / (1.0 + e);
    return select(z * sigmoid, sigmoid, has(FLAG_SIGMOID));
}

// Stored value at row `row`, column `column` of X.
fn x_at(row: u32, column: u32) -> f32 {
    let dtype = type_of(TYPE_X);
    if (has(FLAG_X_IN_D)) {
        return x_in_d(row, column, dtype);
    }
    if (has(FLAG_X_IN_SUM)) {
        return load_sum(p.sum_base + row * p.sum_row + column, dtype);
    }
    let index = p.x_base + at(row, p.x_row, column);
    return element(x_words[word_of(index, dtype)], index, dtype);
}

fn residual_at(row: u32, column: u32) -> f32 {
    let dtype = type_of(TYPE_RESIDUAL);
    if (has(FLAG_RESIDUAL_IN_SUM)) {
        return load_sum(p.sum_base + row * p.sum_row + column, dtype);
    }
    let index = p.residual_base + row * p.residual_row + column;
    return element(residual_words[word_of(index, dtype)], index, dtype);
}

// Value of X, with its gate.
fn gated_x_at(row: u32, column: u32) -> f32 {
    let value = x_at(row, column);
    if (has(FLAG_GATE_BEFORE)) {
        return value * gate_at(row, column);
    }
    return value;
}

// Input value that is not in workgroup memory.
fn source_at(row: u32, column: u32) -> f32 {
    if (has(FLAG_RESIDUAL)) {
        return load_sum(p.sum_base + row * p.sum_row + column, type_of(TYPE_SUM));
    }
    return gated_x_at(row, column);
}

// Input value; 0 past X's columns.
// `first_kept` is the row's offset in workgroup memory.
fn value_at(row: u32, column: u32, first_kept: u32) -> f32 {
    if (column >= p.shape.columns) {
        return 0.0;
    }
    if (column < p.shape.kept_columns) {
        return kept[first_kept + column];
    }
    return source_at(row, column);
}

// Row sums in a fixed order.
// All invocations of a workgroup take part.
fn row_sums(thread: u32, lane: u32, value: vec2<f32>) -> vec2<f32> {
    workgroupBarrier();
    sums[thread] = value;
    for (var half = p.shape.row_threads / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) {
            sums[thread] += sums[thread + half];
        }
    }
    workgroupBarrier();
    return sums[thread - lane];
}

fn row_max(thread: u32, lane: u32, value: u32) -> u32 {
    largest[thread] = value;
    for (var half = p.shape.row_threads / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) {
            largest[thread] = max(largest[thread], largest[thread + half]);
        }
    }
    workgroupBarrier();
    return largest[thread - lane];
}

// Statistics of a row.
struct RowNorm {
    row: u32,
    lane: u32,
    first_kept: u32,
    columns: u32,  // 0 for a row past the end
    scale: f32,
    mean: f32,
    correction: f32,
    inverse: f32,
    is_nan: bool,
}

// Reads the invocation's row and computes its statistics.
// All invocations of a workgroup take part.
fn norm_of_row(group: vec3<u32>, groups: vec3<u32>, thread: u32) -> RowNorm {
    let row_threads = p.shape.row_threads;
    let row_of_group = thread / row_threads;
    let lane = thread % row_threads;
    let row = (group.x + group.y * groups.x) * (THREADS / row_threads) + row_of_group;
    let first_kept = row_of_group * p.shape.kept_columns;
    let step = row_threads * 2u;
    // No invocation may return before the barriers.
    let columns = select(0u, p.shape.columns, row < p.shape.rows);

    var magnitude = bitcast<u32>(sqrt(p.shape.eps));
    for (var column = lane * 2u; column < columns; column += step) {
        let count = min(2u, columns - column);
        var pair = vec2<f32>();
        for (var i = 0u; i < count; i++) {
            pair[i] = gated_x_at(row, column + i);
            if (has(FLAG_RESIDUAL)) {
                pair[i] = rounded_to(pair[i] + residual_at(row, column + i), type_of(TYPE_SUM));
            }
            if (column + i < p.shape.kept_columns) {
                kept[first_kept + column + i] = pair[i];
            }
            let bits = bitcast<u32>(pair[i]) & 0x7fffffffu;
            magnitude = max(magnitude, select(0u, bits, bits < 0x7f800000u));
        }
        if (has(FLAG_RESIDUAL)) {
            store_sum(p.sum_base + row * p.sum_row + column, count, type_of(TYPE_SUM), pair);
        }
    }
    magnitude = row_max(thread, lane, magnitude);
    // Scaled values are below 4.
    // The factor and its inverse are normal numbers.
    let scale = bitcast<f32>((254u - clamp(magnitude >> 23u, 1u, 253u)) << 23u);

    let divisor = f32(p.shape.columns);
    var mean = 0.0;
    if (has(FLAG_CENTERED)) {
        var own = 0.0;
        for (var column = lane * 2u; column < columns; column += step) {
            own += value_at(row, column, first_kept) * scale;
            own += value_at(row, column + 1u, first_kept) * scale;
        }
        mean = row_sums(thread, lane, vec2<f32>(own, 0.0)).x / divisor;
    }
    // Sum and sum of squares of deviations from the mean.
    // The sum corrects the rounding error of the mean.
    var own = vec2<f32>();
    for (var column = lane * 2u; column < columns; column += step) {
        for (var i = 0u; i < min(2u, columns - column); i++) {
            let beside = value_at(row, column + i, first_kept) * scale - mean;
            own += vec2<f32>(beside, beside * beside);
        }
    }
    let moments = row_sums(thread, lane, own) / divisor;
    let correction = select(0.0, moments.x, has(FLAG_CENTERED));
    let inverse = 1.0 / sqrt(max(moments.y - correction * correction, 0.0) + p.shape.eps * scale * scale);
    // `max` may drop a NaN, which must reach all values of the row.
    let is_nan = (bitcast<u32>(moments.y) & 0x7fffffffu) > 0x7f800000u;
    return RowNorm(row, lane, first_kept, columns, scale, mean, correction, inverse, is_nan);
}

// Normalized value before rounding; 0 past X's columns.
fn normalized(n: RowNorm, column: u32) -> f32 {
    if (column >= n.columns) {
        return 0.0;
    }
    var value = (value_at(n.row, column, n.first_kept) * n.scale - n.mean - n.correction) * n.inverse;
    if (has(FLAG_GAMMA)) {
        let index = p.gamma_base + first_of(n.row) + column;
        let dtype = type_of(TYPE_GAMMA);
        value *= element(gamma_words[word_of(index, dtype)], index, dtype);
    }
    if (has(FLAG_BETA)) {
        let index = p.beta_base + first_of(n.row) + column;
        let dtype = type_of(TYPE_BETA);
        value += element(beta_words[word_of(index, dtype)], index, dtype);
    }
    if (has(FLAG_GATE) && !has(FLAG_GATE_BEFORE)) {
        value *= gate_at(n.row, column);
    }
    return select(value, bitcast<f32>(0x7fc00000u + (n.row & 0u)), n.is_nan);
}

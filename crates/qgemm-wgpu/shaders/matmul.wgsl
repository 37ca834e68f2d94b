// Matmul: D = A * B of matrices of any type and layout.
// A workgroup computes a TILE_M x TILE_N tile of D,
// an invocation eight rows of four columns.
// Workgroup memory holds TILE_K values along K, in f32.
// Products are added in the order of K: the bits do not
// depend on the tile.
// Split-K: one dispatch computes partial sums of K parts,
// the next adds them in the order of parts.

const M_VECTORS: u32 = TILE_M / 4u;
const N_VECTORS: u32 = TILE_N / 4u;

// K range of the workgroup: all of K, but for grouped K
// and split-K.
var<private> k_first: u32;
var<private> k_end: u32;
// End of the product's rows: that of A, but for grouped rows.
var<private> m_end: u32;

var<workgroup> a_tile: array<vec4<f32>, TILE_K * M_VECTORS>;  // (TILE_K, TILE_M)
var<workgroup> b_tile: array<vec4<f32>, TILE_K * N_VECTORS>;  // (TILE_K, TILE_N)

// Factor formats that are not element types.
// E4M3_BLOCK: BLOCK values along K share a scale.
const E4M3: u32 = 3u;
const E4M3_BLOCK: u32 = 4u;
const BLOCK: u32 = 128u;

// Index of the word that holds a factor's element.
fn factor_word(index: u32, format: u32) -> u32 {
    return select(word_of(index, format), index >> 2u, format >= E4M3);
}

fn factor_element(word: u32, index: u32, format: u32) -> f32 {
    if (format < E4M3) {
        return element(word, index, format);
    }
    return e4m3_to_f32(vec4<u32>((word >> ((index & 3u) * 8u)) & 0xffu)).x;
}

// Adjacent invocations read adjacent elements.
fn load_a(m0: u32, k0: u32, thread: u32) {
    let has_scales = mode(X_MODE) == E4M3_BLOCK;
    let first = p.a_base + select(a_matrix * p.a_batch, 0u, has_scales);
    for (var i = thread; i < TILE_M * TILE_K; i += THREADS) {
        let m = select(i % TILE_M, i / TILE_K, p.a_col == 1u);
        let k = select(i / TILE_M, i % TILE_K, p.a_col == 1u);
        var value = 0.0;
        if (m0 + m < m_end && k0 + k < k_end) {
            let index = first + (m0 + m) * p.a_row + (k0 + k) * p.a_col;
            value = factor_element(a_words[factor_word(index, mode(X_MODE))], index, mode(X_MODE));
            if (has_scales) {
                value *= a_scale[(p.scale_bases & 0xffffu) + (m0 + m) * p.a_batch + (k0 + k) / BLOCK];
            }
        }
        a_tile[k * M_VECTORS + m / 4u][m % 4u] = value;
    }
}

fn load_b(n0: u32, k0: u32, thread: u32) {
    let has_scales = mode(RESIDUAL_MODE) == E4M3_BLOCK;
    let first = p.b_base + select(product * p.b_batch, 0u, has_scales);
    for (var i = thread; i < TILE_N * TILE_K; i += THREADS) {
        let n = select(i / TILE_K, i % TILE_N, p.b_col == 1u);
        let k = select(i % TILE_K, i / TILE_N, p.b_col == 1u);
        var value = 0.0;
        if (n0 + n < p.shape.n && k0 + k < k_end) {
            let index = first + (k0 + k) * p.b_row + (n0 + n) * p.b_col;
            value = factor_element(b_words[factor_word(index, mode(RESIDUAL_MODE))], index, mode(RESIDUAL_MODE));
            if (has_scales) {
                value *= b_scale[(p.scale_bases >> 16u) + (n0 + n) * p.b_batch + (k0 + k) / BLOCK];
            }
        }
        b_tile[k * N_VECTORS + n / 4u][n % 4u] = value;
    }
}

// Derivative of the activation. Beyond ±64 it is 0 or 1 in f32.
fn slope(at: vec4<f32>) -> vec4<f32> {
    let v = clamp(at, vec4<f32>(-64.0), vec4<f32>(64.0));
    var x = v;
    var dx = vec4<f32>(1.0);
    switch mode(ACTIVATION_MODE) {
        case ACTIVATION_RELU: { return select(vec4<f32>(), vec4<f32>(1.0), at > vec4<f32>()); }
        case ACTIVATION_RELU_SQUARED: { return select(2.0 * at, vec4<f32>(), at < vec4<f32>()); }
        case ACTIVATION_GELU_ERF: { return normal_cdf(v) + v * 0.398942280 * exp(-0.5 * v * v); }
        case ACTIVATION_SILU: {}
        case ACTIVATION_GELU_TANH: {
            x = 1.59576912 * (v + 0.044715 * v * v * v);
            dx = 1.59576912 + 0.214064449 * v * v;
        }
        default: { return vec4<f32>(1.0); }
    }
    // d/dv of v * sigmoid(x), with dx the derivative of x.
    return sigmoid(x) + v * dx * sigmoid(x) * sigmoid(-x);
}

// alpha times the per-tensor scales of A and B.
fn alpha() -> f32 {
    var factor = p.shape.alpha;
    if (has(FLAG_A_SCALE)) {
        factor *= a_scale[p.scale_bases & 0xffffu];
    }
    if (has(FLAG_B_SCALE)) {
        factor *= b_scale[p.scale_bases >> 16u];
    }
    return factor;
}

// Split-K: the first `count` of four adjacent outputs, summed
// over all parts.
fn sums_of_parts(m: u32, n: u32, count: u32) -> vec4<f32> {
    let parts = k_parts();
    var sums = vec4<f32>();
    for (var part = 0u; part < parts; part++) {
        let first = p.a_base + ((product * parts + part) * p.shape.m + m) * p.shape.n + n;
        for (var i = 0u; i < count; i++) {
            sums[i] += bitcast<f32>(a_words[first + i]);
        }
    }
    return sums;
}

// Epilogue of the first `count` of four adjacent outputs.
fn store_outputs(m: u32, n: u32, count: u32, sums: vec4<f32>) {
    var value = alpha() * sums;
    var before_activation = vec4<f32>();
    for (var i = 0u; i < count; i++) {
        if (has(FLAG_C)) {
            let index = p.c_base + a_matrix * p.c_batch + m * p.c_row + n + i;
            let c = element(c_words[word_of(index, mode(C_MODE))], index, mode(C_MODE));
            if (has(FLAG_SLOPE)) {
                before_activation[i] = c;
            } else {
                value[i] += p.shape.beta * c;
            }
        }
        if (has(FLAG_ACCUMULATES)) {
            let index = d_first() + m * p.d_row + n + i;
            value[i] += p.shape.beta * element(atomicLoad(&d[word_of(index, d_dtype())]), index, d_dtype());
        }
        if (has(FLAG_BIAS)) {
            let index = p.bias_base + n + i;
            value[i] += element(bias_words[word_of(index, mode(BIAS_MODE))], index, mode(BIAS_MODE));
        }
    }
    if (has(FLAG_SLOPE)) {
        value *= slope(before_activation);
    } else {
        value = activate(value);
    }
    store4(m, n, count, value);
}

// Offset `i` relative to the dispatch's first row, clamped to
// the dispatch's rows.
fn row_of_offset(i: u32) -> u32 {
    let offset = offsets[p.offsets_base + i];
    return min(max(offset, p.d_batch) - p.d_batch, p.shape.m);
}

// Grouped rows: sets the product and `m_end` of row tile
// `place`, and returns its first row.
// Past the last tile it returns `m`, with `m_end` 0.
// The running maximum makes offsets monotonic, so products
// never overlap.
fn find_rows(place: u32) -> u32 {
    var reached = row_of_offset(0u);
    for (var i = 1u; i <= p.c_batch; i++) {
        reached = max(reached, row_of_offset(i));
    }
    var left = place;
    for (var i = 0u; i < p.a_batch; i++) {
        let first = reached;
        reached = max(reached, row_of_offset(p.c_batch + i + 1u));
        let tiles = (reached - first + TILE_M - 1u) / TILE_M;
        if (left < tiles) {
            product = i;
            m_end = reached;
            return first + left * TILE_M;
        }
        left -= tiles;
    }
    m_end = 0u;
    return p.shape.m;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let parts = k_parts();
    d_matrix = group.z;
    product = select(group.z, group.z / parts, phase() == PHASE_PARTS);
    a_matrix = product;
    var m0 = group.y * TILE_M;
    m_end = p.shape.m;
    if (phase() == PHASE_ROWS) {
        m0 = find_rows(group.y);
    }
    let n0 = group.x * TILE_N;
    let tn = thread % N_VECTORS;
    let tm = thread / N_VECTORS;
    var sums: array<vec4<f32>, 8>;
    k_first = 0u;
    k_end = p.shape.k;
    if (has(FLAG_K_GROUPED)) {
        // Offsets are clamped to K.
        k_first = min(offsets[p.offsets_base + product], p.shape.k);
        k_end = min(offsets[p.offsets_base + product + 1u], p.shape.k);
    }
    if (phase() == PHASE_PARTS) {
        // Parts are whole steps of TILE_K. The last parts may
        // be shorter or empty.
        let steps = (max(k_end, k_first) - k_first + TILE_K - 1u) / TILE_K;
        let of_part = (steps + parts - 1u) / parts * TILE_K;
        k_first = min(k_first + group.z % parts * of_part, k_end);
        k_end = min(k_first + of_part, k_end);
    }
    if (phase() == PHASE_SUM || m0 >= m_end) {
        k_end = k_first;
    }
    for (var k0 = k_first; k0 < k_end; k0 += TILE_K) {
        load_a(m0, k0, thread);
        load_b(n0, k0, thread);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k++) {
            let b = b_tile[k * N_VECTORS + tn];
            let low = a_tile[k * M_VECTORS + 2u * tm];
            let high = a_tile[k * M_VECTORS + 2u * tm + 1u];
            sums[0] = fma(vec4<f32>(low.x), b, sums[0]);
            sums[1] = fma(vec4<f32>(low.y), b, sums[1]);
            sums[2] = fma(vec4<f32>(low.z), b, sums[2]);
            sums[3] = fma(vec4<f32>(low.w), b, sums[3]);
            sums[4] = fma(vec4<f32>(high.x), b, sums[4]);
            sums[5] = fma(vec4<f32>(high.y), b, sums[5]);
            sums[6] = fma(vec4<f32>(high.z), b, sums[6]);
            sums[7] = fma(vec4<f32>(high.w), b, sums[7]);
        }
        workgroupBarrier();
    }
    let n = n0 + tn * 4u;
    if (n >= p.shape.n) {
        return;
    }
    for (var i = 0u; i < 8u; i++) {
        let m = m0 + tm * 8u + i;
        if (m < m_end) {
            let count = min(4u, p.shape.n - n);
            var value = sums[i];
            if (phase() == PHASE_SUM) {
                value = sums_of_parts(m, n, count);
            }
            store_outputs(m, n, count, value);
        }
    }
}

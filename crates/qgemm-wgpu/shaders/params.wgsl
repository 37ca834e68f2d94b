// Parameters of GEMM kernels.
// A binding starts at a multiple of the adapter's
// offset alignment.
// `*_base` is the distance from there to the first element
// (for W, vector) of the operand.

struct Params {
    shape: GemmShape,     // of this dispatch: `m` tokens; `stored_rows` ends its rows of W
    modes: u32,           // `mode()` reads it, and `splits()`
    x_row: u32,           // elements between rows of X
    x_col: u32,           // elements between columns of X; quantized X: words between scale rows
    c_row: u32,           // elements between rows of C; bits of a clamped SwiGLU's alpha
    d_row: u32,           // elements between rows of D
    residual_row: u32,    // elements between rows of the residual
    n_first: u32,         // first row of W in the dispatch and binding, a multiple of 16
    x_base: u32,
    w_base: u32,          // vectors of four words
    row_scale_base: u32,
    k_order_base: u32,
    c_base: u32,          // or bits of a clamped SwiGLU's limit
    bias_base: u32,
    token_scale_base: u32,
    residual_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

// Binding 0 is X (`x.wgsl`), binding 1 is W (`rows_*.wgsl`),
// binding 3 the column order (`modes.wgsl`).
@group(0) @binding(2) var<storage, read> row_scale: array<f32>;
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> token_scale: array<f32>;
@group(0) @binding(7) var<storage, read> residual_words: array<u32>;
// Binding 8 is D (`store.wgsl`).

// Origin of a workgroup's problem: here the dispatch's origin.
// `experts_params.wgsl` defines others.
fn tokens() -> u32 {
    return p.shape.m;
}

fn rows_first() -> u32 {
    return p.n_first;
}

// Row of X for row `m`.
fn x_row_of(m: u32) -> u32 {
    return m;
}

fn x_first() -> u32 {
    return p.x_base;
}

fn x_col() -> u32 {
    return p.x_col;
}

// Quantized X: offset of its scales, and words between rows.
fn x_scales_first() -> u32 {
    return p.k_order_base;
}

fn x_scale_row() -> u32 {
    return p.x_col;
}

fn w_first() -> u32 {
    return p.w_base;
}

fn row_scale_first() -> u32 {
    return p.row_scale_base;
}

fn k_order_first() -> u32 {
    return p.k_order_base;
}

fn c_first() -> u32 {
    return p.c_base;
}

fn c_row() -> u32 {
    return p.c_row;
}

// A gated pair has no C.
// Its fields hold the numbers of a clamped SwiGLU.
fn swiglu_alpha() -> f32 {
    return bitcast<f32>(p.c_row);
}

fn swiglu_limit() -> f32 {
    return bitcast<f32>(p.c_base);
}

fn bias_first() -> u32 {
    return p.bias_base;
}

fn token_scale_of(m: u32) -> f32 {
    return token_scale[p.token_scale_base + m];
}

fn residual_first() -> u32 {
    return p.residual_base;
}

// Row of D, C and the residual for row `m` of the tile;
// NO_ROW if it has none.
fn d_row_of(m: u32) -> u32 {
    return m;
}

fn d_first() -> u32 {
    return p.d_base;
}

// Columns of X.
fn x_columns() -> u32 {
    return p.shape.k;
}

// Columns in W's stored order.
fn stored_columns() -> u32 {
    return p.shape.stored_k;
}

// K splits; their number minus 1 is above the modes.
fn splits() -> u32 {
    return (p.modes >> 24u) + 1u;
}

// Packed k-tiles of a row of W.
fn k_tiles() -> u32 {
    return (p.shape.stored_k + PACKED_K - 1u) / PACKED_K;
}

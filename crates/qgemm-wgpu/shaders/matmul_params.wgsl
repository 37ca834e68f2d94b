// Parameters of `matmul` kernels.
// `*_base` offsets count elements (see `params.wgsl`).

struct Params {
    shape: MatmulShape,  // of this dispatch; `m` counts its rows
    modes: u32,          // `mode()`; X is A, the residual's mode is B's, maybe `E4M3[_BLOCK]`
    a_row: u32,          // elements between rows of A
    a_col: u32,          // elements between columns of A
    a_batch: u32,        // elements between matrices; block-scaled: between rows of scales
    b_row: u32,
    b_col: u32,
    b_batch: u32,
    c_row: u32,
    c_batch: u32,
    d_row: u32,
    d_batch: u32,
    a_base: u32,
    b_base: u32,
    c_base: u32,
    bias_base: u32,
    d_base: u32,
    offsets_base: u32,   // of products with grouped K
    scale_bases: u32,    // scale offsets of A (lower half) and B (upper half)
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a_words: array<u32>;
@group(0) @binding(1) var<storage, read> b_words: array<u32>;
@group(0) @binding(2) var<storage, read> a_scale: array<f32>;
@group(0) @binding(3) var<storage, read> b_scale: array<f32>;
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> offsets: array<u32>;
// Binding 8 is D (`store.wgsl`).

// Split-K phases: partial sums in f32 are D of one dispatch
// and A of the next. The phase is above all modes.
const PHASE_PARTS: u32 = 1u;
const PHASE_SUM: u32 = 2u;
// Grouped rows: products share the rows of one A, C and D, `m`
// of them in this dispatch.
// The batch strides of A, C and D then hold the number of
// products, the first product and the first row.
const PHASE_ROWS: u32 = 3u;

fn phase() -> u32 {
    return p.modes >> 28u;
}

// K splits of each product, a power of two.
fn k_parts() -> u32 {
    return 1u << mode(FORM_MODE);
}

// The workgroup's product, and the matrices of A
// and C, and of D.
var<private> product: u32;
var<private> a_matrix: u32;
var<private> d_matrix: u32;

fn d_first() -> u32 {
    return p.d_base + d_matrix * p.d_batch;
}

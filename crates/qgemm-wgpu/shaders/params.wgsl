// The parameter of every GEMM kernel. Bindings begin at a multiple of the adapter's offset alignment, so each operand
// also has the distance (`*_base`) from there to its own first element, or vector for W.

struct Params {
    shape: GemmShape,     // of this launch: `m` counts its tokens, `n` ends its rows of W, `k_slabs` are W's k-tiles
    x_row: u32,           // elements between rows of X
    x_col: u32,           // elements between columns of X
    c_row: u32,           // elements between rows of C
    d_row: u32,           // elements between rows of D
    residual_row: u32,    // elements between rows of the residual
    n_first: u32,         // the launch's first row of W, and the first that is bound: a multiple of 16
    x_base: u32,
    w_base: u32,          // vectors of four words
    row_scale_base: u32,
    k_order_base: u32,
    c_base: u32,
    bias_base: u32,
    token_scale_base: u32,
    residual_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

// Binding 0 is X: `x.wgsl` declares it. Binding 1 is W: `rows_*.wgsl`.
@group(0) @binding(2) var<storage, read> row_scale: array<f32>;
@group(0) @binding(3) var<storage, read> k_order: array<u32>;
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> token_scale: array<f32>;
@group(0) @binding(7) var<storage, read> residual_words: array<u32>;
// Binding 8 is D: `store.wgsl` declares it.

// The entry of `k_order` for a stored column that has no input feature.
const NO_COLUMN: u32 = 0xffffffffu;

fn has(flag: u32) -> bool {
    return (p.shape.flags & flag) != 0u;
}

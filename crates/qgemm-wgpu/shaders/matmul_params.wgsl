// The parameter of products of two matrices in device memory; distances (`*_base`) as in `params.wgsl`, in elements.

struct Params {
    shape: MatmulShape,  // of this dispatch: `m` counts its rows
    modes: u32,          // `mode()` reads it: X is A, and the residual's type is that of B
    a_row: u32,          // elements between rows of A
    a_col: u32,          // elements between columns of A
    a_batch: u32,        // elements between matrices
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
    offsets_base: u32,   // of products with parts of K of their own
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a_words: array<u32>;
@group(0) @binding(1) var<storage, read> b_words: array<u32>;
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> offsets: array<u32>;
// Binding 8 is D: `store.wgsl` declares it.

// The product that the workgroup computes a tile of.
var<private> product: u32;

fn d_first() -> u32 {
    return p.d_base + product * p.d_batch;
}

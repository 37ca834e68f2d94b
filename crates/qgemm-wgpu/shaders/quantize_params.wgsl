// Parameters of the quantization kernel.
// `*_base` offsets of X count elements, all others words
// (see `params.wgsl`).

struct Params {
    shape: QuantizeShape,  // of this dispatch
    modes: u32,            // `mode()` reads it
    x_row: u32,            // elements between rows of X
    x_col: u32,            // elements between columns of X
    codes_row: u32,        // words between rows of codes
    scales_row: u32,       // words between rows of scales
    sums_row: u32,         // words between rows of sums
    x_base: u32,
    factor_base: u32,
    codes_base: u32,
    scales_base: u32,
    token_factors_base: u32,
    sums_base: u32,
}

var<immediate> p: Params;

// Binding 0 is X (`x.wgsl`).
// Binding 3, the column order of `modes.wgsl`, is unused here.
@group(0) @binding(1) var<storage, read> factor: array<u32>;
@group(0) @binding(4) var<storage, read_write> codes: array<u32>;
@group(0) @binding(5) var<storage, read_write> scales: array<u32>;
@group(0) @binding(6) var<storage, read_write> token_factors: array<u32>;
@group(0) @binding(7) var<storage, read_write> sums: array<u32>;

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

fn k_order_first() -> u32 {
    return 0u;
}

fn x_columns() -> u32 {
    return p.shape.columns;
}

fn stored_columns() -> u32 {
    return p.shape.columns;
}

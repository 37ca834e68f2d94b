// Parameters of `convert` kernels.
// `*_base` offsets count elements (see `params.wgsl`).

struct Params {
    shape: ConvertShape,  // of this dispatch
    modes: u32,           // `mode()` reads it
    rows_together: u32,   // rows per workgroup, a power of two
    rows_beside: u32,     // 1: neighbouring invocations have neighbouring rows; 0: columns
    x_row: u32,           // elements between rows of X
    x_col: u32,           // elements between columns of X
    d_row: u32,           // elements between rows of D
    x_base: u32,
    k_order_base: u32,
    d_base: u32,
    factor_base: u32,
}

var<immediate> p: Params;

// Binding 0 is X (`x.wgsl`), binding 3 the column order
// (`modes.wgsl`), binding 8 is D.
@group(0) @binding(9) var<storage, read_write> row_factors: array<u32>;

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
    return p.k_order_base;
}

fn d_first() -> u32 {
    return p.d_base;
}

// Columns of X.
fn x_columns() -> u32 {
    return p.shape.columns;
}

// Columns of D that exist in X.
fn stored_columns() -> u32 {
    return select(min(p.shape.columns, p.shape.d_columns), p.shape.d_columns, has(FLAG_K_ORDER));
}

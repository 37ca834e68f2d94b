// Parameters of the unquantized `norm` kernel.
// `*_base` offsets count elements (see `params.wgsl`).

struct Params {
    shape: NormShape,  // of this dispatch
    x_row: u32,        // elements between rows of X
    residual_row: u32,
    sum_row: u32,
    x_base: u32,
    residual_base: u32,
    gamma_base: u32,
    beta_base: u32,
    sum_base: u32,
    feature_groups: u32,
    d_row: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> d: array<atomic<u32>>;

// X in place: the result overwrites it.
fn x_in_d(row: u32, column: u32, dtype: u32) -> f32 {
    return load_d(p.d_base + at(row, p.d_row, column), dtype);
}

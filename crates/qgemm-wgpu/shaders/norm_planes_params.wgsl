// Parameters of quantizing `norm` kernels.
// `*_base` offsets count elements, of planes words
// (see `params.wgsl`).

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
    codes_row: u32,    // words between rows of codes
    scales_row: u32,
    others_row: u32,
    codes_base: u32,
    scales_base: u32,
    others_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> codes: array<u32>;
@group(0) @binding(6) var<storage, read_write> scales: array<u32>;
// Sums or token factors; no format has both.
// Or the given factor, which is read only.
@group(0) @binding(7) var<storage, read_write> others: array<u32>;

// Quantized output never overwrites X.
fn x_in_d(row: u32, column: u32, dtype: u32) -> f32 {
    return 0.0;
}

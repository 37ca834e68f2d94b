// The parameter of every `norm` kernel; distances (`*_base`) as in `params.wgsl`, in elements.

struct Params {
    shape: NormShape,  // of this dispatch
    x_row: u32,        // elements between rows of X
    residual_row: u32,
    sum_row: u32,
    d_row: u32,
    x_base: u32,
    residual_base: u32,
    gamma_base: u32,
    beta_base: u32,
    sum_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x_words: array<u32>;
@group(0) @binding(1) var<storage, read> residual_words: array<u32>;
@group(0) @binding(2) var<storage, read> gamma_words: array<u32>;
@group(0) @binding(3) var<storage, read> beta_words: array<u32>;
@group(0) @binding(4) var<storage, read_write> sum: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> d: array<atomic<u32>>;

// Places in `p.shape.types`.
const TYPE_X: u32 = 0u;
const TYPE_RESIDUAL: u32 = 1u;
const TYPE_SUM: u32 = 2u;
const TYPE_D: u32 = 3u;
const TYPE_GAMMA: u32 = 4u;
const TYPE_BETA: u32 = 5u;

fn has(flag: u32) -> bool {
    return (p.shape.flags & flag) != 0u;
}

fn type_of(place: u32) -> u32 {
    return (p.shape.types >> (4u * place)) & 15u;
}

// Bits of a value in a type of 16 bits.
fn half_of(value: f32, dtype: u32) -> u32 {
    if (dtype == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}

// The value as its type has it.
fn rounded_to(value: f32, dtype: u32) -> f32 {
    if (dtype == F32) {
        return value;
    }
    let half = half_of(value, dtype);
    if (dtype == F16) {
        return f16_scalar(half);
    }
    return bitcast<f32>(half << 16u);
}

struct GemmShape {
    m: u32,
    n: u32,
    k: u32,
    stored_k: u32,
    k_slabs: u32,
    splits: u32,
    flags: u32,
    activation: u32,
    d_dtype: u32,
    c_dtype: u32,
    bias_dtype: u32,
    x_dtype: u32,
    alpha: f32,
    beta: f32,
    reserved0: u32,
    reserved1: u32,
}

const FLAG_ROW_SCALE: u32 = 1u;
const FLAG_K_ORDER: u32 = 2u;
const FLAG_C: u32 = 4u;
const FLAG_BIAS: u32 = 8u;
const FLAG_X_ALIGNED16: u32 = 16u;

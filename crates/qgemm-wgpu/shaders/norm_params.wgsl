// Inputs of `norm` kernels, and the sum output.
// norm_d_params.wgsl or norm_planes_params.wgsl defines `p`.

@group(0) @binding(0) var<storage, read> x_words: array<u32>;
@group(0) @binding(1) var<storage, read> residual_words: array<u32>;
@group(0) @binding(2) var<storage, read> gamma_words: array<u32>;
@group(0) @binding(3) var<storage, read> beta_words: array<u32>;
@group(0) @binding(4) var<storage, read_write> sum: array<atomic<u32>>;

// Positions in `p.shape.types`.
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

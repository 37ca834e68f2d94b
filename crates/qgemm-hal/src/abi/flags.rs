//! Bits of the kernels' flags. Operations whose kernels have none in common use the same bits.

#[cfg(doc)]
use super::{AttentionShape, ConvertShape, GemmShape, MatmulShape, NormShape, OptimizerShape, RoutingShape};

/// [`GemmShape::flags`]: W has row factors.
pub const FLAG_ROW_SCALE: u32 = 1;
/// [`GemmShape::flags`]: W's columns are permuted.
pub const FLAG_K_ORDER: u32 = 2;
/// [`GemmShape::flags`]: C is read.
pub const FLAG_C: u32 = 4;
/// [`GemmShape::flags`]: a bias is added.
pub const FLAG_BIAS: u32 = 8;
/// [`GemmShape::flags`]: every row of X begins at a multiple of 16 bytes.
pub const FLAG_X_ALIGNED16: u32 = 16;
/// [`GemmShape::flags`]: every token has a factor.
pub const FLAG_TOKEN_SCALE: u32 = 32;
/// [`GemmShape::flags`]: a residual is added last.
pub const FLAG_RESIDUAL: u32 = 64;
/// [`GemmShape::flags`]: W is a gated pair.
pub const FLAG_GATED: u32 = 128;
/// [`GemmShape::flags`]: every row of D begins at a multiple of 16 bytes.
pub const FLAG_D_ALIGNED16: u32 = 256;
/// [`GemmShape::flags`]: every row of C begins at a multiple of 16 bytes.
pub const FLAG_C_ALIGNED16: u32 = 512;
/// [`GemmShape::flags`]: every row of the residual begins at a multiple of 16 bytes.
pub const FLAG_RESIDUAL_ALIGNED16: u32 = 1024;
/// [`GemmShape::flags`]: the bias, of a gated pair both, begins at a multiple of 16 bytes.
pub const FLAG_BIAS_ALIGNED16: u32 = 2048;
/// [`GemmShape::flags`]: tokens have a factor each; of `convert`, rows get one.
pub const FLAG_X_FACTOR: u32 = 4096;
/// [`ConvertShape::flags`]: a CTA keeps its row of X in shared memory.
pub const FLAG_ROW_IN_SHARED: u32 = 8192;

/// [`RoutingShape::flags`]: scores are sigmoids of the logits, else their softmax.
pub const FLAG_SIGMOID: u32 = 1 << 14;
/// [`RoutingShape::flags`]: weights are divided by their sum.
pub const FLAG_RENORMALIZE: u32 = 1 << 15;
/// [`RoutingShape::flags`]: offsets, counts and rows are written.
pub const FLAG_LISTS: u32 = 1 << 16;
/// [`RoutingShape::flags`]: the chunks' counts go to the workspace.
pub const FLAG_COUNTS: u32 = 1 << 17;
/// [`RoutingShape::flags`]: ids are the caller's.
pub const FLAG_GIVEN_IDS: u32 = 1 << 18;
/// [`MatmulShape::flags`]: what D held is added to.
pub const FLAG_ACCUMULATES: u32 = 1 << 19;
/// [`MatmulShape::flags`]: C is what the activation was applied to, whose derivative there multiplies the product.
pub const FLAG_SLOPE: u32 = 1 << 20;
/// [`MatmulShape::flags`]: offsets say which part of K each product has.
pub const FLAG_K_GROUPED: u32 = 1 << 21;
/// [`MatmulShape::flags`]: all of A has a factor.
pub const FLAG_A_SCALE: u32 = 1 << 22;
/// [`MatmulShape::flags`]: all of B has one.
pub const FLAG_B_SCALE: u32 = 1 << 23;

/// [`OptimizerShape::flags`]: every operand begins at a multiple of 16 bytes.
pub const FLAG_ALIGNED16: u32 = 1 << 19;
/// [`OptimizerShape::flags`]: the parameters are written in 16 bits, too.
pub const FLAG_COPY: u32 = 1 << 20;

/// [`AttentionShape::flags`]: a query sees no later keys.
pub const FLAG_CAUSAL: u32 = 1 << 19;
/// [`AttentionShape::flags`]: products are bounded.
pub const FLAG_SOFT_CAP: u32 = 1 << 20;
/// [`AttentionShape::flags`]: offsets say which queries a sequence has.
pub const FLAG_Q_OFFSETS: u32 = 1 << 21;
/// [`AttentionShape::flags`]: offsets say which rows of keys a sequence has.
pub const FLAG_KV_OFFSETS: u32 = 1 << 22;
/// [`AttentionShape::flags`]: lengths say how many keys a sequence has.
pub const FLAG_KV_LENGTHS: u32 = 1 << 23;
/// [`AttentionShape::flags`]: the log-sum-exp is written.
pub const FLAG_LSE: u32 = 1 << 24;
/// [`AttentionShape::flags`]: eight features of Q are loaded at once.
pub const FLAG_Q_ALIGNED: u32 = 1 << 25;
/// [`AttentionShape::flags`]: eight features of K and of V are loaded at once.
pub const FLAG_KV_ALIGNED: u32 = 1 << 26;
/// [`AttentionShape::flags`]: eight features of D are stored at once.
pub const FLAG_D_ALIGNED: u32 = 1 << 27;

/// [`NormShape::flags`]: the mean of a row is taken from it (LayerNorm).
pub const FLAG_CENTERED: u32 = 1 << 19;
/// [`NormShape::flags`]: columns have factors.
pub const FLAG_GAMMA: u32 = 1 << 20;
/// [`NormShape::flags`]: something is added to columns.
pub const FLAG_BETA: u32 = 1 << 21;
/// [`NormShape::flags`]: every row of the sum begins at a multiple of 16 bytes.
pub const FLAG_SUM_ALIGNED16: u32 = 1 << 22;
/// [`NormShape::flags`]: gamma begins at a multiple of 16 bytes.
pub const FLAG_GAMMA_ALIGNED16: u32 = 1 << 23;
/// [`NormShape::flags`]: beta begins at a multiple of 16 bytes.
pub const FLAG_BETA_ALIGNED16: u32 = 1 << 24;
/// [`NormShape::flags`]: the result takes the place of X, on wgpu.
pub const FLAG_X_IN_D: u32 = 1 << 25;
/// [`NormShape::flags`]: the sum takes the place of X, on wgpu.
pub const FLAG_X_IN_SUM: u32 = 1 << 26;
/// [`NormShape::flags`]: the sum takes the place of the residual, on wgpu.
pub const FLAG_RESIDUAL_IN_SUM: u32 = 1 << 27;

/// Every flag that a product may have: an epilogue's fast path takes those that it lists away, and serves no other.
pub const GEMM_FLAGS: u32 = 2 * FLAG_X_FACTOR - 1;

/// Every flag with its name, for the generators.
pub const FLAGS: &[(&str, u32)] = &[
    ("ROW_SCALE", FLAG_ROW_SCALE),
    ("K_ORDER", FLAG_K_ORDER),
    ("C", FLAG_C),
    ("BIAS", FLAG_BIAS),
    ("X_ALIGNED16", FLAG_X_ALIGNED16),
    ("TOKEN_SCALE", FLAG_TOKEN_SCALE),
    ("RESIDUAL", FLAG_RESIDUAL),
    ("GATED", FLAG_GATED),
    ("D_ALIGNED16", FLAG_D_ALIGNED16),
    ("C_ALIGNED16", FLAG_C_ALIGNED16),
    ("RESIDUAL_ALIGNED16", FLAG_RESIDUAL_ALIGNED16),
    ("BIAS_ALIGNED16", FLAG_BIAS_ALIGNED16),
    ("X_FACTOR", FLAG_X_FACTOR),
    ("ROW_IN_SHARED", FLAG_ROW_IN_SHARED),
    ("SIGMOID", FLAG_SIGMOID),
    ("RENORMALIZE", FLAG_RENORMALIZE),
    ("LISTS", FLAG_LISTS),
    ("COUNTS", FLAG_COUNTS),
    ("GIVEN_IDS", FLAG_GIVEN_IDS),
    ("ACCUMULATES", FLAG_ACCUMULATES),
    ("SLOPE", FLAG_SLOPE),
    ("K_GROUPED", FLAG_K_GROUPED),
    ("A_SCALE", FLAG_A_SCALE),
    ("B_SCALE", FLAG_B_SCALE),
    ("ALIGNED16", FLAG_ALIGNED16),
    ("COPY", FLAG_COPY),
    ("CAUSAL", FLAG_CAUSAL),
    ("SOFT_CAP", FLAG_SOFT_CAP),
    ("Q_OFFSETS", FLAG_Q_OFFSETS),
    ("KV_OFFSETS", FLAG_KV_OFFSETS),
    ("KV_LENGTHS", FLAG_KV_LENGTHS),
    ("LSE", FLAG_LSE),
    ("Q_ALIGNED", FLAG_Q_ALIGNED),
    ("KV_ALIGNED", FLAG_KV_ALIGNED),
    ("D_ALIGNED", FLAG_D_ALIGNED),
    ("CENTERED", FLAG_CENTERED),
    ("GAMMA", FLAG_GAMMA),
    ("BETA", FLAG_BETA),
    ("SUM_ALIGNED16", FLAG_SUM_ALIGNED16),
    ("GAMMA_ALIGNED16", FLAG_GAMMA_ALIGNED16),
    ("BETA_ALIGNED16", FLAG_BETA_ALIGNED16),
    ("X_IN_D", FLAG_X_IN_D),
    ("X_IN_SUM", FLAG_X_IN_SUM),
    ("RESIDUAL_IN_SUM", FLAG_RESIDUAL_IN_SUM),
];

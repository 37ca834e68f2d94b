//! Bits of the kernels' flags. Operations without common
//! kernels reuse the same bits.

#[cfg(doc)]
use super::{
    AttentionShape, ConvertShape, GemmShape, LinearAttentionShape, MatmulShape, NormShape, OptimizerShape,
    RoutingShape, ShortConvShape,
};

/// [`GemmShape::flags`]: W has row scales.
pub const FLAG_ROW_SCALE: u32 = 1;
/// [`GemmShape::flags`]: W's columns are permuted (act-order).
pub const FLAG_K_ORDER: u32 = 2;
/// [`GemmShape::flags`]: C is read.
pub const FLAG_C: u32 = 4;
/// [`GemmShape::flags`]: a bias is added.
pub const FLAG_BIAS: u32 = 8;
/// [`GemmShape::flags`]: rows of X are 16-byte aligned.
pub const FLAG_X_ALIGNED16: u32 = 16;
/// [`GemmShape::flags`]: every token has a scale.
pub const FLAG_TOKEN_SCALE: u32 = 32;
/// [`GemmShape::flags`]: a residual is added last.
pub const FLAG_RESIDUAL: u32 = 64;
/// [`GemmShape::flags`]: W is a gated pair.
pub const FLAG_GATED: u32 = 128;
/// [`GemmShape::flags`]: rows of D are 16-byte aligned.
pub const FLAG_D_ALIGNED16: u32 = 256;
/// [`GemmShape::flags`]: rows of C are 16-byte aligned.
pub const FLAG_C_ALIGNED16: u32 = 512;
/// [`GemmShape::flags`]: rows of the residual are 16-byte aligned.
pub const FLAG_RESIDUAL_ALIGNED16: u32 = 1024;
/// [`GemmShape::flags`]: the bias is 16-byte aligned (for a gated pair, both biases).
pub const FLAG_BIAS_ALIGNED16: u32 = 2048;
/// [`GemmShape::flags`]: accumulators are multiplied with token factors; in `convert`, row factors are written.
pub const FLAG_X_FACTOR: u32 = 4096;
/// [`ConvertShape::flags`]: a CTA caches its row of X in shared memory.
pub const FLAG_ROW_IN_SHARED: u32 = 8192;

/// [`RoutingShape::flags`]: scores are the sigmoid of the logits; with neither this flag nor
/// `SQRT_SOFTPLUS` their softmax. [`NormShape::flags`]: the gate's activation is the sigmoid.
/// [`LinearAttentionShape::flags`]: β is the sigmoid of its operand.
pub const FLAG_SIGMOID: u32 = 1 << 14;
/// [`RoutingShape::flags`]: weights are divided by their sum.
pub const FLAG_RENORMALIZE: u32 = 1 << 15;
/// [`RoutingShape::flags`]: offsets, counts and rows are written.
pub const FLAG_LISTS: u32 = 1 << 16;
/// [`RoutingShape::flags`]: chunk counts are written to the workspace.
pub const FLAG_COUNTS: u32 = 1 << 17;
/// [`RoutingShape::flags`]: ids are given by the caller.
pub const FLAG_GIVEN_IDS: u32 = 1 << 18;
/// [`RoutingShape::flags`]: scores are the root of the logits' softplus.
pub const FLAG_SQRT_SOFTPLUS: u32 = 1 << 20;
/// [`MatmulShape::flags`]: the old contents of D are added.
pub const FLAG_ACCUMULATES: u32 = 1 << 19;
/// [`MatmulShape::flags`]: C is the input of the activation; its derivative there multiplies the product.
pub const FLAG_SLOPE: u32 = 1 << 20;
/// [`MatmulShape::flags`]: products have K ranges given by offsets.
pub const FLAG_K_GROUPED: u32 = 1 << 21;
/// [`MatmulShape::flags`]: A has one factor.
pub const FLAG_A_SCALE: u32 = 1 << 22;
/// [`MatmulShape::flags`]: B has one factor.
pub const FLAG_B_SCALE: u32 = 1 << 23;

/// [`OptimizerShape::flags`]: every operand is 16-byte aligned.
pub const FLAG_ALIGNED16: u32 = 1 << 19;
/// [`OptimizerShape::flags`]: a 16-bit copy of the parameters is written.
pub const FLAG_COPY: u32 = 1 << 20;

/// [`ShortConvShape::flags`]: the activation is SiLU.
pub const FLAG_SILU: u32 = 1 << 20;
/// [`ShortConvShape::flags`]: sequences start from zeros, whatever the state is.
pub const FLAG_FROM_ZEROS: u32 = 1 << 22;
/// [`ShortConvShape::flags`]: the tokens that enter the state are counted; wgpu only.
pub const FLAG_ADVANCE: u32 = 1 << 23;
/// [`ShortConvShape::flags`]: X has a gate; wgpu only.
pub const FLAG_INPUT_GATE: u32 = 1 << 24;
/// [`ShortConvShape::flags`]: the result has a gate; wgpu only.
pub const FLAG_OUTPUT_GATE: u32 = 1 << 25;

/// [`AttentionShape::flags`]: causal mask.
pub const FLAG_CAUSAL: u32 = 1 << 19;
/// [`AttentionShape::flags`]: scores have a soft cap.
pub const FLAG_SOFT_CAP: u32 = 1 << 20;
/// [`AttentionShape::flags`]: query offsets are given.
pub const FLAG_Q_OFFSETS: u32 = 1 << 21;
/// [`AttentionShape::flags`]: key offsets are given.
pub const FLAG_KV_OFFSETS: u32 = 1 << 22;
/// [`AttentionShape::flags`]: key counts are given.
pub const FLAG_KV_LENGTHS: u32 = 1 << 23;
/// [`AttentionShape::flags`]: the log-sum-exp is written.
pub const FLAG_LSE: u32 = 1 << 24;
/// [`AttentionShape::flags`]: vector loads of eight features of Q.
pub const FLAG_Q_ALIGNED: u32 = 1 << 25;
/// [`AttentionShape::flags`]: vector loads of eight features of K and V.
pub const FLAG_KV_ALIGNED: u32 = 1 << 26;
/// [`AttentionShape::flags`]: vector stores of eight features of D.
pub const FLAG_D_ALIGNED: u32 = 1 << 27;
/// [`AttentionShape::flags`]: indices and the keys of earlier tokens may be read before the launch ahead has ended.
pub const FLAG_KEYS_READY: u32 = 1 << 30;
/// [`AttentionShape::flags`], [`NormShape::flags`]: vector loads of eight features of the gate.
pub const FLAG_GATE_ALIGNED: u32 = 1 << 28;

/// [`LinearAttentionShape::flags`]: there is a delta term.
pub const FLAG_DELTA: u32 = 1 << 19;
/// [`LinearAttentionShape::flags`]: there is a decay for each key feature.
pub const FLAG_DECAY_FEATURES: u32 = 1 << 20;
/// [`LinearAttentionShape::flags`]: queries and keys are L2-normalized.
pub const FLAG_L2_NORM: u32 = 1 << 21;
/// [`LinearAttentionShape::flags`]: states begin as zero.
pub const FLAG_FROM_ZERO: u32 = 1 << 22;
/// [`LinearAttentionShape::flags`]: β is the time step, `softplus(a + dt_bias)`.
pub const FLAG_TIME_STEP: u32 = 1 << 23;
/// [`LinearAttentionShape::flags`]: value head `h` has key head `h % key_heads`.
pub const FLAG_TILED_HEADS: u32 = 1 << 24;

/// [`NormShape::flags`]: the row mean is subtracted (LayerNorm).
pub const FLAG_CENTERED: u32 = 1 << 19;
/// [`NormShape::flags`]: gamma is given.
pub const FLAG_GAMMA: u32 = 1 << 20;
/// [`NormShape::flags`]: beta is given.
pub const FLAG_BETA: u32 = 1 << 21;
/// [`NormShape::flags`]: rows of the sum are 16-byte aligned.
pub const FLAG_SUM_ALIGNED16: u32 = 1 << 22;
/// [`NormShape::flags`]: gamma is 16-byte aligned.
pub const FLAG_GAMMA_ALIGNED16: u32 = 1 << 23;
/// [`NormShape::flags`]: beta is 16-byte aligned.
pub const FLAG_BETA_ALIGNED16: u32 = 1 << 24;
/// [`NormShape::flags`]: the result overwrites X; wgpu only.
pub const FLAG_X_IN_D: u32 = 1 << 25;
/// [`NormShape::flags`]: the sum overwrites X; wgpu only.
pub const FLAG_X_IN_SUM: u32 = 1 << 26;
/// [`NormShape::flags`]: the sum overwrites the residual; wgpu only.
pub const FLAG_RESIDUAL_IN_SUM: u32 = 1 << 27;

/// [`NormShape::flags`]: there is a gate, of SiLU unless `SIGMOID`; wgpu reads z as the residual.
pub const FLAG_GATE: u32 = 1 << 29;
/// [`NormShape::flags`]: the gate multiplies X instead of the result.
pub const FLAG_GATE_BEFORE: u32 = 1 << 30;

/// All flags of a product. The epilogue's fast path
/// masks out the flags that it supports, and is used
/// when none of these remains.
pub const GEMM_FLAGS: u32 = 2 * FLAG_X_FACTOR - 1;

/// Every flag with its name, for code generation.
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
    ("SQRT_SOFTPLUS", FLAG_SQRT_SOFTPLUS),
    ("ACCUMULATES", FLAG_ACCUMULATES),
    ("SLOPE", FLAG_SLOPE),
    ("K_GROUPED", FLAG_K_GROUPED),
    ("A_SCALE", FLAG_A_SCALE),
    ("B_SCALE", FLAG_B_SCALE),
    ("ALIGNED16", FLAG_ALIGNED16),
    ("COPY", FLAG_COPY),
    ("SILU", FLAG_SILU),
    ("FROM_ZEROS", FLAG_FROM_ZEROS),
    ("ADVANCE", FLAG_ADVANCE),
    ("INPUT_GATE", FLAG_INPUT_GATE),
    ("OUTPUT_GATE", FLAG_OUTPUT_GATE),
    ("CAUSAL", FLAG_CAUSAL),
    ("SOFT_CAP", FLAG_SOFT_CAP),
    ("Q_OFFSETS", FLAG_Q_OFFSETS),
    ("KV_OFFSETS", FLAG_KV_OFFSETS),
    ("KV_LENGTHS", FLAG_KV_LENGTHS),
    ("LSE", FLAG_LSE),
    ("Q_ALIGNED", FLAG_Q_ALIGNED),
    ("KV_ALIGNED", FLAG_KV_ALIGNED),
    ("D_ALIGNED", FLAG_D_ALIGNED),
    ("GATE_ALIGNED", FLAG_GATE_ALIGNED),
    ("DELTA", FLAG_DELTA),
    ("DECAY_FEATURES", FLAG_DECAY_FEATURES),
    ("L2_NORM", FLAG_L2_NORM),
    ("FROM_ZERO", FLAG_FROM_ZERO),
    ("TIME_STEP", FLAG_TIME_STEP),
    ("TILED_HEADS", FLAG_TILED_HEADS),
    ("CENTERED", FLAG_CENTERED),
    ("GAMMA", FLAG_GAMMA),
    ("BETA", FLAG_BETA),
    ("SUM_ALIGNED16", FLAG_SUM_ALIGNED16),
    ("GAMMA_ALIGNED16", FLAG_GAMMA_ALIGNED16),
    ("BETA_ALIGNED16", FLAG_BETA_ALIGNED16),
    ("X_IN_D", FLAG_X_IN_D),
    ("X_IN_SUM", FLAG_X_IN_SUM),
    ("RESIDUAL_IN_SUM", FLAG_RESIDUAL_IN_SUM),
    ("GATE", FLAG_GATE),
    ("GATE_BEFORE", FLAG_GATE_BEFORE),
    ("KEYS_READY", FLAG_KEYS_READY),
];

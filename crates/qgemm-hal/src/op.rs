//! The operation that the API hands down: validated, with every stride in elements.

use qgemm_formats::prepack::PackClass;
use qgemm_formats::{DType, Format};

/// A dense matrix operand: element type, strides in elements, and the alignment of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dense {
    /// Element type.
    pub dtype: DType,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Elements from one column to the next: 1 for row-major.
    pub col_stride: u64,
    /// Whether every row begins at a multiple of 16 bytes (and columns are contiguous), so that kernels may
    /// use 16-byte accesses.
    pub aligned16: bool,
}

/// Function applied to the scaled sum with C and the bias added, before the residual is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `max(v, 0)`.
    Relu,
    /// `v / (1 + exp(−v))`, also called swish.
    Silu,
    /// GELU by its approximation `v / 2 · (1 + tanh(√(2/π) · (v + 0.044715 v³)))`.
    GeluTanh,
    /// GELU itself: `v / 2 · (1 + erf(v / √2))`.
    GeluErf,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 5] = [Self::Identity, Self::Relu, Self::Silu, Self::GeluTanh, Self::GeluErf];

    /// Name in tables: `gelu_tanh`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
        }
    }
}

/// How far activations may be rounded before they are multiplied: a permission, of which kernels use what makes them fast.
/// Matrix instructions read f16 and bf16 only, and processors multiply integers of eight bits four times as fast as f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum XRounding {
    /// Not at all.
    Exact,
    /// To f16, after each token was multiplied by a power of two of its own: what is beyond the range of f16 keeps eleven
    /// bits, too. bf16 activations lose nothing by it but what is 2³¹ times smaller than the token's largest value.
    F16,
    /// To bf16, where matrix instructions take it.
    BF16,
    /// To integers of eight bits, with a factor for every
    /// [`activation_block`](qgemm_formats::FormatDesc::activation_block) columns, where weights are such integers, too, and the
    /// device has no faster way that rounds less; elsewhere as [`XRounding::F16`]. It costs an error of 1e-5 to 1e-4 of the
    /// output's square, 2.5e-4 seen for tokens with a few large values: little beside what weights of four bits cost (5e-3), and
    /// more than weights of eight (3e-5). It is what llama.cpp does.
    #[default]
    Int8,
}

impl XRounding {
    /// All of them, each allowing more than those before.
    pub const ALL: [XRounding; 4] = [XRounding::Exact, XRounding::F16, XRounding::BF16, XRounding::Int8];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            XRounding::Exact => "exact",
            XRounding::F16 => "f16",
            XRounding::BF16 => "bf16",
            XRounding::Int8 => "int8",
        }
    }
}

/// `D[M, features] = activation(v) + residual` with `v = alpha · token_scale · X·Wᵀ + beta · C + bias`, or, of a gated
/// pair, `activation(v of the gate) · v of the up + residual`; validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedGemm {
    /// Tokens (rows of X); at least 1.
    pub m: usize,
    /// Rows of W, at least 1: the output features, or, of a gated pair, a multiple of 16 (see
    /// [`HostWeight::gated_pair`](qgemm_formats::HostWeight::gated_pair)).
    pub n: usize,
    /// Output features (columns of D): `n`, or, of a gated pair, the rows of each weight.
    pub features: usize,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Input features (columns of X); at least 1.
    pub k: usize,
    /// Length of a stored row of W (differs from `k` only with act-order padding).
    pub stored_k: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: PackClass,
    /// Whether W has a factor per row.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// Whether W's values can be rounded to f16 ([`HostWeight::fits_f16`](qgemm_formats::HostWeight::fits_f16)).
    pub weight_fits_f16: bool,
    /// X.
    pub x: Dense,
    /// How far X may be rounded.
    pub x_rounding: XRounding,
    /// D.
    pub d: Dense,
    /// C, read only when present; `beta` is 0 otherwise.
    pub c: Option<Dense>,
    /// Element type of the bias: contiguous, one element a feature; of a gated pair the gate's bias, then the up's.
    pub bias: Option<DType>,
    /// Whether every token has a factor in f32.
    pub token_scale: bool,
    /// The residual, added last.
    pub residual: Option<Dense>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
    /// Function applied before the residual is added; of a gated pair, to the gate.
    pub activation: Activation,
    /// Pins family and K partition whatever M is, so that a row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl CheckedGemm {
    /// Elements of the bias, where there is one.
    pub fn bias_len(&self) -> usize {
        if self.gated { 2 * self.features } else { self.features }
    }

    /// Kernel name of `family` for this operation: `gemm_nt_q4_k_f16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_nt_{}_{}", self.format.name, self.x.dtype)
    }

    /// Bytes that the operation must move at least: W, X, D, C and the residual once each.
    pub fn bytes(&self) -> f64 {
        let x = self.m as f64 * self.k as f64 * self.x.dtype.bytes() as f64;
        let output = |dense: &Dense| self.m as f64 * self.features as f64 * dense.dtype.bytes() as f64;
        let read: f64 = self.c.iter().chain(&self.residual).map(output).sum();
        self.weight_bytes() + x + output(&self.d) + read
    }

    /// Bytes of W.
    pub fn weight_bytes(&self) -> f64 {
        self.n as f64 * self.format.row_bytes(self.stored_k) as f64
    }

    /// Multiply-adds of the operation.
    pub fn macs(&self) -> f64 {
        self.m as f64 * self.n as f64 * self.k as f64
    }
}

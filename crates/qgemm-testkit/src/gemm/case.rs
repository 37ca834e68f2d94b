//! A conformance case of `gemm`, as data.

use std::fmt;

use qgemm_formats::{DType, Format, XFormat};
use qgemm_hal::{Activation, Math, NormFunction, NormKind, XPrecision};

use crate::activations::ActivationKind;
use crate::weights::WeightKind;

/// Column order of an act-order weight in storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActOrder {
    /// Every group is full: a permutation.
    Full,
    /// Every group lacks a column, so stored rows are longer than K.
    Padded,
}

/// Epilogue of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    /// Factor of the product (alpha).
    pub alpha: f32,
    /// Factor (beta) and type of C. With factor 0, C holds NaN, which
    /// must not be read.
    pub c: Option<(f32, DType)>,
    /// Type of the bias.
    pub bias: Option<DType>,
    /// Whether tokens have scales.
    pub token_scale: bool,
    /// Whether output features have scales: row factors of the
    /// weight, in any format.
    pub channel_scale: bool,
    /// Activation before the residual; in a gated pair, of the gate.
    pub activation: Activation,
    /// Type of the residual.
    pub residual: Option<DType>,
}

impl Default for Epilogue {
    fn default() -> Self {
        Self {
            alpha: 1.0,
            c: None,
            bias: None,
            token_scale: false,
            channel_scale: false,
            activation: Activation::Identity,
            residual: None,
        }
    }
}

/// Memory layout of the operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// X is stored as `[K, M]`.
    pub x_transposed: bool,
    /// W is stored as `[K, N]` before loading; unquantized formats only.
    pub w_transposed: bool,
    /// Elements between the rows of X, filled with NaN.
    pub x_gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Elements between the rows of C, filled with NaN.
    pub c_gap: usize,
    /// Elements between the rows of the residual, filled with NaN.
    pub residual_gap: usize,
    /// Offset of X, C, D and the residual from an aligned address, in
    /// elements.
    pub offset: usize,
}

/// A product to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Format of W.
    pub format: Format,
    /// Tokens.
    pub m: usize,
    /// Output features; in a gated pair, of each weight.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Type of X.
    pub x_dtype: DType,
    /// Format of X, if X is given quantized; `x_dtype` is its type
    /// before.
    pub x_format: Option<XFormat>,
    /// Permitted rounding of X.
    pub x_precision: XPrecision,
    /// Type of D.
    pub d_dtype: DType,
    /// Norm of X before the product, if any. The seed picks the types
    /// of gamma and beta.
    pub norm: Option<NormKind>,
    /// Type of normalized rows, if not that of X.
    pub normed_dtype: Option<DType>,
    /// Quantized format of normalized rows, if any.
    pub normed_format: Option<XFormat>,
    /// Kind of X.
    pub activations: ActivationKind,
    /// Kind of W.
    pub weights: WeightKind,
    /// Column order of W, if permuted.
    pub act_order: Option<ActOrder>,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Number of fused weights, each with its output; 0 if W is not
    /// fused.
    pub segments: usize,
    /// The epilogue.
    pub epilogue: Epilogue,
    /// Memory layout of the operands.
    pub layout: Layout,
    /// Checks that a row's bits do not depend on the number of rows.
    pub batch_invariant: bool,
    /// Runs every config that could be chosen, instead of the chosen
    /// one.
    pub every_configuration: bool,
    /// Restricts the plan to one kernel family.
    pub family: Option<&'static str>,
    /// Restricts the plan to one arithmetic.
    pub math: Option<Math>,
    /// Seed of all random values.
    pub seed: u64,
}

impl Case {
    /// A plain f32 product of normal activations with quantized
    /// normal weights.
    pub fn new(format: Format, m: usize, n: usize, k: usize) -> Self {
        Self {
            format,
            m,
            n,
            k,
            x_dtype: DType::F32,
            x_format: None,
            x_precision: XPrecision::default(),
            d_dtype: DType::F32,
            norm: None,
            normed_dtype: None,
            normed_format: None,
            activations: ActivationKind::Normal,
            weights: WeightKind::Quantized,
            act_order: None,
            gated: false,
            segments: 0,
            epilogue: Epilogue::default(),
            layout: Layout::default(),
            batch_invariant: false,
            every_configuration: false,
            family: None,
            math: None,
            seed: 1,
        }
    }

    /// X given quantized, neither transposed nor normalized.
    pub fn with_x_format(self, format: XFormat) -> Self {
        let layout = Layout { x_transposed: false, ..self.layout };
        Self { x_format: Some(format), layout, norm: None, normed_dtype: None, normed_format: None, ..self }
    }

    /// Weights and activations with exact sums. X stays plain,
    /// because quantized activations are not small integers.
    pub fn with_exact_sums(self) -> Self {
        Self {
            weights: WeightKind::Exact,
            activations: ActivationKind::SmallIntegers,
            x_precision: XPrecision::F16,
            ..self
        }
    }

    /// Output features of each fused weight: multiples of 8, and the
    /// rest.
    pub fn segment_sizes(&self) -> Vec<usize> {
        let Some(others) = self.segments.checked_sub(1) else { return Vec::new() };
        let size = self.n / self.segments / 8 * 8;
        let mut sizes = vec![size; others];
        sizes.push(self.n - others * size);
        sizes
    }

    /// The norm of X before the product.
    pub fn norm_function(&self) -> Option<NormFunction> {
        let dtype = |salt: u64| DType::ALL[((self.seed ^ salt) % 3) as usize];
        let is_layer = self.norm == Some(NormKind::Layer);
        self.norm.map(|kind| match NormFunction::new(kind, 1e-5).gamma(dtype(0)) {
            layer if is_layer => layer.beta(dtype(1)),
            _ if self.seed % 5 == 4 => NormFunction::new(kind, 1e-6),
            function => function,
        })
    }

    /// The type of X in the product.
    pub fn multiplied_dtype(&self) -> DType {
        self.normed_dtype.filter(|_| self.norm.is_some()).unwrap_or(self.x_dtype)
    }

    /// Number of biases of N elements: one per weight of a gated
    /// pair.
    pub fn bias_rows(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    /// Whether every sum is exact.
    pub fn sums_are_exact(&self) -> bool {
        self.weights == WeightKind::Exact && self.activations == ActivationKind::SmallIntegers && self.norm.is_none()
    }

    /// Whether the result must be right bit for bit: sums are exact,
    /// and the epilogue keeps them exact.
    pub fn is_exact(&self) -> bool {
        let exact = matches!(self.epilogue.activation, Activation::Identity | Activation::Relu);
        self.sums_are_exact() && exact && !self.gated
    }
}

/// A line for tables: `q4_k 17x33x256 f16->f32 normal*quantized`,
/// then non-default fields.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { format, m, n, k, x_dtype, d_dtype, .. } = self;
        write!(f, "{format} {m}x{n}x{k} {x_dtype}->{d_dtype} {}*{}", self.activations.name(), self.weights.name())?;
        if let Some(format) = self.x_format {
            write!(f, " X={format}")?;
        }
        let Epilogue { alpha, c, bias, token_scale, channel_scale, activation, residual } = self.epilogue;
        if alpha != 1.0 {
            write!(f, " alpha={alpha}")?;
        }
        if let Some((beta, dtype)) = c {
            write!(f, " beta={beta} C={dtype}")?;
        }
        if let Some(dtype) = bias {
            write!(f, " bias={dtype}")?;
        }
        if activation != Activation::Identity {
            write!(f, " {activation}")?;
        }
        if let Some(dtype) = residual {
            write!(f, " residual={dtype}")?;
        }
        let Layout { x_transposed, w_transposed, x_gap, d_gap, c_gap, residual_gap, offset } = self.layout;
        let flags = [
            (self.gated, "gated"),
            (token_scale, "token-scale"),
            (channel_scale, "channel-scale"),
            (x_transposed, "x-transposed"),
            (w_transposed, "w-transposed"),
            (self.act_order == Some(ActOrder::Full), "act-order"),
            (self.act_order == Some(ActOrder::Padded), "act-order-padded"),
            (self.batch_invariant, "batch-invariant"),
            (self.every_configuration, "every-configuration"),
        ];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, " {name}")?;
        }
        let distances =
            [("x-gap", x_gap), ("d-gap", d_gap), ("c-gap", c_gap), ("residual-gap", residual_gap), ("offset", offset)];
        for (name, value) in distances {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        if self.segments > 0 {
            write!(f, " segments={}", self.segments)?;
        }
        if self.x_precision != XPrecision::default() {
            write!(f, " x-precision={}", self.x_precision)?;
        }
        if let Some(kind) = self.norm {
            write!(f, " norm={kind}")?;
        }
        if let Some(dtype) = self.normed_dtype {
            write!(f, " normed={dtype}")?;
        }
        if let Some(format) = self.normed_format {
            write!(f, " normed={format}")?;
        }
        if let Some(family) = self.family {
            write!(f, " family={family}")?;
        }
        if let Some(math) = self.math {
            write!(f, " math={}", math.name())?;
        }
        write!(f, " seed={}", self.seed)
    }
}

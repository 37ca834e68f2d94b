//! One conformance case: everything that decides what is multiplied, as data.

use std::fmt;

use qgemm_formats::{DType, Format, XFormat};
use qgemm_hal::{Activation, Math, NormFunction, NormKind, XPrecision};

use crate::activations::ActivationKind;
use crate::weights::WeightKind;

/// How the columns of an act-order weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActOrder {
    /// Every group is full: a permutation.
    Full,
    /// Every group lacks a column, so that stored rows are longer than K.
    Padded,
}

/// What is done with the product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    /// Factor of the product.
    pub alpha: f32,
    /// Factor and type of C. With factor 0, C holds NaN, which must not show.
    pub c: Option<(f32, DType)>,
    /// Type of the bias.
    pub bias: Option<DType>,
    /// Whether every token has a factor.
    pub token_scale: bool,
    /// Whether every output feature has a factor, whatever the format: the weight's row factors.
    pub channel_scale: bool,
    /// Applied before the residual is added; of a gated pair, to the gate.
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

/// Where operands lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// X is stored as `[K, M]`.
    pub x_transposed: bool,
    /// W is stored as `[K, N]` before loading; unquantized formats only.
    pub w_transposed: bool,
    /// Elements between the rows of X, filled with NaN.
    pub x_gap: usize,
    /// Elements between the rows of D, which must stay as they were.
    pub d_gap: usize,
    /// Elements between the rows of C, filled with NaN.
    pub c_gap: usize,
    /// Elements between the rows of the residual, filled with NaN.
    pub residual_gap: usize,
    /// Elements by which X, C, the residual and D begin past an aligned address.
    pub offset: usize,
}

/// One multiplication to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Format of W.
    pub format: Format,
    /// Tokens.
    pub m: usize,
    /// Output features; of a gated pair, the rows of each weight.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Type of X.
    pub x_dtype: DType,
    /// Format of codes and scales in which X is given, where it is; `x_dtype` is then what it was before.
    pub x_format: Option<XFormat>,
    /// How far X may be rounded.
    pub x_precision: XPrecision,
    /// Type of D.
    pub d_dtype: DType,
    /// The norm of X before the product, if there is one; gamma and beta have types that the seed picks.
    pub norm: Option<NormKind>,
    /// The type that normalized rows are rounded to, if not that of X.
    pub normed_dtype: Option<DType>,
    /// The format of codes and scales that normalized rows are written in, if they are.
    pub normed_format: Option<XFormat>,
    /// What X looks like.
    pub activations: ActivationKind,
    /// What W looks like.
    pub weights: WeightKind,
    /// Permuted columns.
    pub act_order: Option<ActOrder>,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Weights that W is fused of, each with an output of its own; 0 of a weight that is one.
    pub segments: usize,
    /// What is done with the product.
    pub epilogue: Epilogue,
    /// Where operands lie.
    pub layout: Layout,
    /// Whether a row's bits must not depend on the number of rows, which is then checked.
    pub batch_invariant: bool,
    /// Whether every configuration that could be chosen is run, instead of the one that is.
    pub every_configuration: bool,
    /// Restricts the plan to one kernel family.
    pub family: Option<&'static str>,
    /// Restricts the plan to one arithmetic.
    pub math: Option<Math>,
    /// Seed of all random values.
    pub seed: u64,
}

impl Case {
    /// A plain product of normal activations with quantized normal weights, all in f32.
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

    /// With X given in codes and scales, which is neither transposed nor normalized.
    pub fn with_x_format(self, format: XFormat) -> Self {
        let layout = Layout { x_transposed: false, ..self.layout };
        Self { x_format: Some(format), layout, norm: None, normed_dtype: None, normed_format: None, ..self }
    }

    /// With weights and activations whose sums are exact, and stay so: quantized activations would be no small integers.
    pub fn with_exact_sums(self) -> Self {
        Self {
            weights: WeightKind::Exact,
            activations: ActivationKind::SmallIntegers,
            x_precision: XPrecision::F16,
            ..self
        }
    }

    /// Output features of each weight that W is fused of: multiples of 8, and what is left.
    pub fn segment_sizes(&self) -> Vec<usize> {
        let Some(others) = self.segments.checked_sub(1) else { return Vec::new() };
        let size = self.n / self.segments / 8 * 8;
        let mut sizes = vec![size; others];
        sizes.push(self.n - others * size);
        sizes
    }

    /// What becomes of rows of X before the product.
    pub fn norm_function(&self) -> Option<NormFunction> {
        let dtype = |salt: u64| DType::ALL[((self.seed ^ salt) % 3) as usize];
        let is_layer = self.norm == Some(NormKind::Layer);
        self.norm.map(|kind| match NormFunction::new(kind, 1e-5).gamma(dtype(0)) {
            layer if is_layer => layer.beta(dtype(1)),
            _ if self.seed % 5 == 4 => NormFunction::new(kind, 1e-6),
            function => function,
        })
    }

    /// The type of X as it is multiplied.
    pub fn multiplied_dtype(&self) -> DType {
        self.normed_dtype.filter(|_| self.norm.is_some()).unwrap_or(self.x_dtype)
    }

    /// Biases of N elements: one, or one for each weight of a gated pair.
    pub fn bias_rows(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    /// Whether every sum is exact.
    pub fn sums_are_exact(&self) -> bool {
        self.weights == WeightKind::Exact && self.activations == ActivationKind::SmallIntegers && self.norm.is_none()
    }

    /// Whether what becomes of exact sums is exact, too, so that the result must be, bit for bit.
    pub fn is_exact(&self) -> bool {
        let exact = matches!(self.epilogue.activation, Activation::Identity | Activation::Relu);
        self.sums_are_exact() && exact && !self.gated
    }
}

/// A line for tables: `q4_k 17x33x256 f16->f32 normal*quantized`, then whatever is not the default.
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
            write!(f, " {}", activation.name())?;
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

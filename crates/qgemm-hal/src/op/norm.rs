//! `norm`: RMSNorm and LayerNorm, also as the step before a product.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::{DType, XFactor, XFormat, XParts};

use super::dense::Dense;
use super::gemm::XPlanes;
use super::{Operation, memory_bound, operands};
use crate::axis::KernelDType;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NormKind {
    /// RMSNorm: `y = x / sqrt(mean(x²) + eps)`.
    Rms,
    /// LayerNorm:
    /// `y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps)`.
    Layer,
}

impl NormKind {
    /// Both.
    pub const ALL: [NormKind; 2] = [NormKind::Rms, NormKind::Layer];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            NormKind::Rms => "rms",
            NormKind::Layer => "layer",
        }
    }
}

impl fmt::Display for NormKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NormKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("`{text}` is no kind of norm"))
    }
}

/// Norm function: `gamma · y + beta`, with the `y` of
/// [`NormKind`]. Statistics, gamma and beta are applied in f32.
///
/// ```
/// use qgemm_formats::DType;
/// use qgemm_hal::{NormFunction, NormKind};
///
/// let norm = NormFunction::rms(1e-6).gamma(DType::BF16);
/// assert_eq!((norm.kind, norm.gamma, norm.beta), (NormKind::Rms, Some(DType::BF16), None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormFunction {
    /// Kind of normalization.
    pub kind: NormKind,
    /// Added to the mean of squares: finite, and not negative.
    pub eps: f32,
    /// Element type of gamma, one element for each
    /// column; 1 without it.
    pub gamma: Option<DType>,
    /// Element type of beta, one element for each
    /// column; 0 without it.
    pub beta: Option<DType>,
}

impl NormFunction {
    /// A norm of this kind, without gamma and beta.
    pub const fn new(kind: NormKind, eps: f32) -> Self {
        Self { kind, eps, gamma: None, beta: None }
    }

    /// RMSNorm without gamma and beta.
    pub const fn rms(eps: f32) -> Self {
        Self::new(NormKind::Rms, eps)
    }

    /// LayerNorm without gamma and beta.
    pub const fn layer(eps: f32) -> Self {
        Self::new(NormKind::Layer, eps)
    }

    /// Adds a gamma of type `dtype`. A weight stored as
    /// gamma − 1 (Gemma) becomes an f32 gamma when loaded:
    /// `DenseTensor::one_plus`.
    pub const fn gamma(self, dtype: DType) -> Self {
        Self { gamma: Some(dtype), ..self }
    }

    /// Adds a beta of type `dtype`.
    pub const fn beta(self, dtype: DType) -> Self {
        Self { beta: Some(dtype), ..self }
    }
}

/// Plan cache key: eps is finite and is
/// compared by its bits.
impl Eq for NormFunction {}

impl Hash for NormFunction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind, self.eps.to_bits(), self.gamma, self.beta).hash(state);
    }
}

/// Activation of a norm's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GateFunction {
    /// `z · sigmoid(z)`.
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

impl GateFunction {
    /// Both.
    pub const ALL: [GateFunction; 2] = [GateFunction::Silu, GateFunction::Sigmoid];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            GateFunction::Silu => "silu",
            GateFunction::Sigmoid => "sigmoid",
        }
    }
}

impl fmt::Display for GateFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Gate of a norm: `act(z)` multiplies the result, or X. Products
/// are f32 and unrounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormGate {
    /// z, `[rows, columns]`, in the type of X.
    pub z: Dense,
    /// The activation.
    pub function: GateFunction,
    /// Whether X is multiplied instead of the result.
    pub before: bool,
}

/// A residual that is added to X before the norm,
/// and the output of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddedResidual {
    /// The residual.
    pub residual: Dense,
    /// `x + residual`, added in f32 and rounded to the type
    /// of the sum: the input of the norm.
    pub sum: Dense,
    /// Whether the sum overwrites the residual. Both then have
    /// the same type and strides.
    pub in_place: bool,
}

/// Output that overwrites X, with the type and strides of X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum XOverwrite {
    /// None: X does not overlap an output.
    #[default]
    Own,
    /// The result.
    D,
    /// The sum with the residual.
    Sum,
}

/// Planes of a quantized result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedD {
    /// The format; must be quantized.
    pub format: XFormat,
    /// Layout of its planes.
    pub planes: XPlanes,
}

/// RMSNorm or LayerNorm:
/// `D[r, c] = gamma[c] · y(r)[c] + beta[c]` with `y` of
/// [`NormKind`], rounded once to D's type; validated by the API.
///
/// With a residual, the input row is
/// `sum[r] = round(x[r] + residual[r])`: the rounded sum is normalized, as
/// a separate norm of the sum would do. Columns of D
/// beyond X are 0. With an order, column `c` of D
/// is column `order[c]` of X; entries outside X yield zero columns.
///
/// With groups of features, the means are taken over each group of
/// `columns / groups` columns. With a gate, its activation multiplies
/// D, or X before the norm.
///
/// A quantized result is [`XParts::quantize_row`] of the unrounded
/// f32 row. D is not written then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedNorm {
    /// Rows of X and D; at least 1.
    pub rows: usize,
    /// Columns of X, over which the means are
    /// taken; at least 1.
    pub columns: usize,
    /// Groups of features; a divisor of `columns`. With several, D has
    /// no further columns.
    pub groups: usize,
    /// Columns of D: those of X, or others with an
    /// order or as a prologue.
    pub d_columns: usize,
    /// The norm function.
    pub function: NormFunction,
    /// X, row-major.
    pub x: Dense,
    /// D, row-major. With a quantized result: contiguous
    /// f32 that is never written.
    pub d: Dense,
    /// Quantized output instead of D, which then has as
    /// many columns as the codes.
    pub quantized: Option<QuantizedD>,
    /// The residual and the sum.
    pub added: Option<AddedResidual>,
    /// Output that overwrites X.
    pub x_overwrite: XOverwrite,
    /// Whether an order maps columns of D to columns of X.
    /// Not with a residual, nor in place.
    pub gathers: bool,
    /// The gate.
    pub gate: Option<NormGate>,
}

operands! {
    /// Operands of `norm`.
    pub enum NormOperand {
        /// The input rows.
        X: "x" Read,
        /// The residual.
        Residual: "the residual" Read,
        /// Gamma: factor of each column.
        Gamma: "gamma" Constant,
        /// Beta: offset of each column.
        Beta: "beta" Constant,
        /// Column of D → column of X, u32.
        Order: "the column order" Constant,
        /// The result.
        D: "d" Write,
        /// The rows plus the residual.
        Sum: "the sum" Write,
        /// The input rows, overwritten by the result.
        XAndD: "x and d" Accumulate,
        /// The input rows, overwritten by the sum.
        XAndSum: "x and the sum" Accumulate,
        /// The residual, overwritten by the sum.
        ResidualAndSum: "the residual and the sum" Accumulate,
        /// Given factor of a quantized result, f32.
        Factor: "the factor" Read,
        /// The codes.
        Codes: "the codes" Write,
        /// The scales.
        Scales: "the scales" Write,
        /// Factor of each row, f32.
        TokenFactors: "the token factors" Write,
        /// X block sums.
        Sums: "the sums" Write,
        /// z of the gate.
        Gate: "the gate" Read,
    }
}

spec! {
    /// Kernel identity keys of `norm`. Kind and operands
    /// are run-time parameters.
    pub struct NormSpec {
        /// Groups of eight columns that a thread keeps in
        /// registers; 0 for rows of any length.
        groups: u32,
        /// Element type of all matrices in kernels for whole aligned
        /// rows; `any` for run-time types.
        x: KernelDType,
    }
}

impl NormSpec {
    /// Key of a kernel with run-time element types.
    pub const fn any(groups: u32) -> Self {
        Self { groups, x: KernelDType::Any }
    }

    /// Key of a kernel for whole aligned rows of one type.
    pub const fn of_type(groups: u32, dtype: DType) -> Self {
        Self { groups, x: KernelDType::Of(dtype) }
    }
}

spec! {
    /// Kernel identity keys of `norm` with a quantized result. Kind and
    /// types are run-time parameters.
    pub struct NormQuantizeSpec {
        /// Groups of eight columns that a thread keeps in
        /// registers; 0 for rows of any length.
        groups: u32,
        /// The format of the result.
        to: XFormat,
        /// Whether a factor is given.
        given_factor: bool,
        /// Columns that a block sum covers; 0 without sums.
        sum_span: u32,
    }
}

impl NormQuantizeSpec {
    /// Key of a kernel that writes `quantized`.
    pub fn new(groups: u32, quantized: &QuantizedD) -> Self {
        let QuantizedD { format, planes: XPlanes { parts, .. } } = *quantized;
        Self {
            groups,
            to: format,
            given_factor: parts.factor == XFactor::Given,
            sum_span: parts.sum_span.unwrap_or(0) as u32,
        }
    }

    /// Planes that the kernel writes; `None` for an unquantized format.
    pub fn parts(&self) -> Option<XParts> {
        self.to.parts(self.given_factor, Some(self.sum_span as usize).filter(|&span| span > 0))
    }
}

spec! {
    /// Kernel identity keys of `norm` with a gate or groups of
    /// features. Kind, types and gate are run-time parameters.
    pub struct NormGatedSpec {
        /// Groups of eight columns that a thread keeps in
        /// registers; 0 for rows of any length.
        groups: u32,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormLaunch {
    /// The config.
    pub config: NormConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedNorm {
    /// The operand that holds X.
    pub fn x_operand(&self) -> NormOperand {
        match self.x_overwrite {
            XOverwrite::Own => NormOperand::X,
            XOverwrite::D => NormOperand::XAndD,
            XOverwrite::Sum => NormOperand::XAndSum,
        }
    }

    /// The common type of X, residual and sum, if all
    /// rows are whole aligned groups of eight columns and
    /// D has no further columns. D has this type, too, or rounds f32.
    pub fn aligned_dtype(&self) -> Option<DType> {
        let dtype = self.x.dtype;
        let added = self.added.iter().flat_map(|added| [added.residual, added.sum]);
        let rounds = dtype == DType::F32;
        let whole = self.columns == self.d_columns && self.columns.is_multiple_of(8);
        let whole = whole && !self.gathers && self.quantized.is_none() && !self.is_gated();
        let is_row_of =
            |dense: Dense, any: bool| (any || dense.dtype == dtype) && dense.aligned16 && dense.col_stride == 1;
        let mut all = added.chain([self.x]).map(|dense| is_row_of(dense, false)).chain([is_row_of(self.d, rounds)]);
        (whole && all.all(|is_row| is_row)).then_some(dtype)
    }

    /// Whether there is a gate or several groups of features. Fast
    /// kernels serve neither.
    pub fn is_gated(&self) -> bool {
        self.gate.is_some() || self.groups > 1
    }

    /// The norm with a row for each group of features, and strides
    /// of whole rows.
    pub fn of_groups(&self) -> Self {
        let columns = self.columns / self.groups;
        let d_columns = if self.groups > 1 { columns } else { self.d_columns };
        Self { rows: self.rows * self.groups, columns, d_columns, ..*self }
    }

    /// The format of the result.
    pub fn d_format(&self) -> XFormat {
        self.quantized.map_or(XFormat::Plain(self.d.dtype), |quantized| quantized.format)
    }

    /// Name in tables and messages: `norm_rms_f16_bf16`, `norm_rms_f16_q8_0`.
    pub fn kernel_name(&self) -> String {
        format!("norm_{}_{}_{}", self.function.kind, self.x.dtype, self.d_format())
    }

    /// The operand that holds D, or the codes of
    /// a quantized result.
    pub fn d_operand(&self) -> NormOperand {
        match self.quantized {
            Some(_) => NormOperand::Codes,
            None if self.x_overwrite == XOverwrite::D => NormOperand::XAndD,
            None => NormOperand::D,
        }
    }

    /// The operand that holds the residual, if any.
    pub fn residual_operand(&self) -> Option<NormOperand> {
        let operand =
            |added: AddedResidual| if added.in_place { NormOperand::ResidualAndSum } else { NormOperand::Residual };
        self.added.map(operand)
    }

    /// The operand that holds the sum, if any.
    pub fn sum_operand(&self) -> Option<NormOperand> {
        let operand = |added: AddedResidual| match (self.x_overwrite, added.in_place) {
            (XOverwrite::Sum, _) => NormOperand::XAndSum,
            (_, true) => NormOperand::ResidualAndSum,
            (_, false) => NormOperand::Sum,
        };
        self.added.map(operand)
    }
}

impl Operation for CheckedNorm {
    type Operand = NormOperand;
    type Config = NormConfig;
    type Plan = NormLaunch;

    fn operands(&self) -> Vec<NormOperand> {
        use NormOperand as O;
        let function = &self.function;
        let optional = [
            self.residual_operand(),
            function.gamma.map(|_| O::Gamma),
            function.beta.map(|_| O::Beta),
            self.gathers.then_some(O::Order),
            self.gate.map(|_| O::Gate),
            Some(self.d_operand()),
            self.sum_operand(),
        ];
        let parts = self.quantized.map(|quantized| quantized.planes.parts);
        let of_planes = parts.into_iter().flat_map(|parts| {
            let planes = [
                (parts.factor == XFactor::Given, O::Factor),
                (parts.scale.is_some(), O::Scales),
                (parts.factor == XFactor::PerToken, O::TokenFactors),
                (parts.sum_span.is_some(), O::Sums),
            ];
            planes.into_iter().filter(|(is_there, _)| *is_there).map(|(_, operand)| operand)
        });
        let mut operands = vec![self.x_operand()];
        for operand in optional.into_iter().flatten().chain(of_planes) {
            if !operands.contains(&operand) {
                operands.push(operand);
            }
        }
        operands
    }

    fn traffic(&self) -> f64 {
        let matrix = |dense: &Dense, columns: usize| self.rows as f64 * columns as f64 * dense.dtype.bytes() as f64;
        let of_column: usize =
            [self.function.gamma, self.function.beta].into_iter().flatten().map(DType::bytes).sum::<usize>()
                + if self.gathers { size_of::<u32>() } else { 0 };
        let added =
            self.added.map_or(0.0, |added| matrix(&added.residual, self.columns) + matrix(&added.sum, self.columns));
        let written = match self.quantized {
            None => matrix(&self.d, self.d_columns),
            Some(QuantizedD { planes: XPlanes { parts, .. }, .. }) => {
                let factor = if parts.factor == XFactor::PerToken { 4 } else { 0 };
                let k = self.columns;
                self.rows as f64 * (parts.code_bytes(k) + parts.scale_bytes(k) + parts.sums(k) * 4 + factor) as f64
            }
        };
        let gate = self.gate.map_or(0.0, |gate| matrix(&gate.z, self.columns));
        matrix(&self.x, self.columns) + gate + written + added + self.d_columns as f64 * of_column as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, columns, groups, function, x, .. } = self;
        let added = if self.added.is_some() { ", with a residual" } else { "" };
        let gate = match self.gate {
            Some(NormGate { before: true, function, .. }) => format!(", X gated by {function}"),
            Some(NormGate { function, .. }) => format!(", gated by {function}"),
            None => String::new(),
        };
        let groups = if *groups > 1 { format!(" in {groups} groups") } else { String::new() };
        let of = format!("{rows} x {columns}{groups} ({}) from {}", function.kind, x.dtype);
        format!("{of} to {}{added}{gate}", self.d_format())
    }

    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    fn config(plan: &NormLaunch) -> &NormConfig {
        &plan.config
    }

    fn estimate(plan: &NormLaunch) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &NormLaunch) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<NormConfig, Unsupported> {
        let kernel = KernelId::new("noop", None, Spec::Norm(NormSpec::any(0)));
        Ok(NormConfig { kernel, efficiency: 1000 })
    }
}

memory_bound!(CheckedNorm, NormConfig, NormLaunch, |_| 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_place_is_one_operand() {
        use NormOperand as O;
        let dense = Dense::rows_of(DType::F16, 64);
        let op = CheckedNorm {
            rows: 3,
            columns: 64,
            d_columns: 64,
            function: NormFunction::rms(1e-6).gamma(DType::F32),
            x: dense,
            d: dense,
            quantized: None,
            added: None,
            x_overwrite: XOverwrite::Own,
            gathers: false,
            groups: 1,
            gate: None,
        };
        assert_eq!(op.operands(), [O::X, O::Gamma, O::D]);
        assert_eq!(op.traffic(), (2 * 3 * 64 * 2 + 64 * 4) as f64);
        assert_eq!(op.aligned_dtype(), Some(DType::F16));
        let gate = NormGate { z: dense, function: GateFunction::Silu, before: true };
        let gated = CheckedNorm { gate: Some(gate), groups: 4, ..op };
        assert_eq!((gated.operands().as_slice(), gated.aligned_dtype()), (&[O::X, O::Gamma, O::Gate, O::D][..], None));
        assert_eq!(gated.traffic() - op.traffic(), (3 * 64 * 2) as f64);
        assert_eq!((gated.of_groups().rows, gated.of_groups().columns, gated.of_groups().d_columns), (12, 16, 16));
        let in_place = CheckedNorm { x_overwrite: XOverwrite::D, ..op };
        assert_eq!(in_place.operands(), [O::XAndD, O::Gamma]);
        let added = Some(AddedResidual { residual: dense, sum: dense, in_place: true });
        let fused = CheckedNorm { added, ..in_place };
        assert_eq!(fused.operands(), [O::XAndD, O::ResidualAndSum, O::Gamma]);
        let over_x = CheckedNorm {
            added: Some(AddedResidual { residual: dense, sum: dense, in_place: false }),
            x_overwrite: XOverwrite::Sum,
            ..op
        };
        assert_eq!(over_x.operands(), [O::XAndSum, O::Residual, O::Gamma, O::D]);
        assert_eq!(over_x.sum_operand(), Some(O::XAndSum));
        let format = XFormat::NvFp4;
        let parts = format.parts(false, None).expect("it has codes");
        let planes = XPlanes { parts, codes_row: 32, scales_row: 4, sums_row: 0 };
        let quantized = CheckedNorm { quantized: Some(QuantizedD { format, planes }), ..op };
        assert_eq!(quantized.operands(), [O::X, O::Gamma, O::Codes, O::Scales, O::TokenFactors]);
        assert_eq!(quantized.traffic(), (3 * (64 * 2 + 32 + 4 + 4) + 64 * 4) as f64);
        assert_eq!((quantized.kernel_name().as_str(), quantized.aligned_dtype()), ("norm_rms_f16_nvfp4", None));
    }
}

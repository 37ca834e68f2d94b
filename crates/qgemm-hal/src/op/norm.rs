//! `norm`: rows brought to one magnitude, RMSNorm and LayerNorm, and what products ask of X that is to be normalized first.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::{DType, XFactor, XFormat, XParts};

use super::dense::Dense;
use super::gemm::XPlanes;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, Name, spec};

/// What a row is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NormKind {
    /// RMSNorm: `y = x / sqrt(mean(x²) + eps)`.
    Rms,
    /// LayerNorm: `y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps)`.
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

/// What becomes of a row: `gamma · y + beta`, with the `y` of [`NormKind`]. Statistics, gamma and beta act in f32.
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
    /// What a row is divided by.
    pub kind: NormKind,
    /// Added to the mean of squares: finite, and not negative.
    pub eps: f32,
    /// Element type of gamma, one element a column; 1 everywhere where there is none.
    pub gamma: Option<DType>,
    /// Element type of beta, one element a column; 0 everywhere where there is none.
    pub beta: Option<DType>,
}

impl NormFunction {
    /// A norm of this kind without gamma and beta.
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

    /// With a gamma of this type.
    pub const fn gamma(self, dtype: DType) -> Self {
        Self { gamma: Some(dtype), ..self }
    }

    /// With a beta of this type.
    pub const fn beta(self, dtype: DType) -> Self {
        Self { beta: Some(dtype), ..self }
    }
}

/// Descriptions are keys of plans: eps is finite, and told apart by its bits.
impl Eq for NormFunction {}

impl Hash for NormFunction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind, self.eps.to_bits(), self.gamma, self.beta).hash(state);
    }
}

/// A residual that is added to X first, and where the sum goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddedResidual {
    /// The residual.
    pub residual: Dense,
    /// `x + residual`, added in f32 and rounded to its own type: what is normalized.
    pub sum: Dense,
    /// Whether the sum takes the place of the residual, whose type and strides it has.
    pub in_place: bool,
}

/// What takes the place of X, whose type and strides it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum XPlace {
    /// Nothing: X lies apart from what is written.
    #[default]
    Own,
    /// The result.
    D,
    /// The sum with the residual.
    Sum,
}

/// The planes that a result in codes and scales is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedD {
    /// The format; not plain.
    pub format: XFormat,
    /// Its planes.
    pub planes: XPlanes,
}

/// `D[r, c] = gamma[c] · y(r)[c] + beta[c]` with `y` of [`NormKind`], rounded once to D's type; validated by the API.
///
/// With a residual, the row is `sum[r] = round(x[r] + residual[r])`: what was written is what is normalized, so that the result is
/// that of a norm of the sum. Columns of D beyond X's are 0. With an order, column `c` of D is that of column `order[c]` of X; an
/// entry that is no column of X makes a column of zeros.
///
/// A quantized result is what [`XParts::quantize_row`] makes of the unrounded f32 row; nothing is written to D then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedNorm {
    /// Rows of X and D; at least 1.
    pub rows: usize,
    /// Columns of X, which the means are over; at least 1.
    pub columns: usize,
    /// Columns of D: those of X, and with an order or as a prologue others.
    pub d_columns: usize,
    /// What becomes of a row.
    pub function: NormFunction,
    /// X, row-major.
    pub x: Dense,
    /// D, row-major; where the result is quantized, f32 without gaps that is not written.
    pub d: Dense,
    /// What is written in place of D, which then has the columns of the codes.
    pub quantized: Option<QuantizedD>,
    /// The residual and the sum.
    pub added: Option<AddedResidual>,
    /// What takes the place of X.
    pub x_place: XPlace,
    /// Whether an order says which column of X each column of D is. Not with a residual, nor in place.
    pub gathers: bool,
}

operands! {
    /// What `norm` reads and writes.
    pub enum NormOperand {
        /// The rows.
        X: "x" Read,
        /// What is added to them.
        Residual: "the residual" Read,
        /// Factors of the columns.
        Gamma: "gamma" Constant,
        /// What is added to the columns.
        Beta: "beta" Constant,
        /// Column of D → column of X, a `u32` each.
        Order: "the column order" Constant,
        /// The result.
        D: "d" Write,
        /// The rows with the residual.
        Sum: "the sum" Write,
        /// The rows, whose place the result takes.
        XAndD: "x and d" Accumulate,
        /// The rows, whose place the sum takes.
        XAndSum: "x and the sum" Accumulate,
        /// The residual, whose place the sum takes.
        ResidualAndSum: "the residual and the sum" Accumulate,
        /// Of a quantized result the factor that is given for all of it, in f32.
        Factor: "the factor" Read,
        /// The codes.
        Codes: "the codes" Write,
        /// The scales.
        Scales: "the scales" Write,
        /// A factor for each row, in f32.
        TokenFactors: "the token factors" Write,
        /// The sums.
        Sums: "the sums" Write,
    }
}

spec! {
    /// What tells the kernels of `norm` apart. Kind and operands are told at run time.
    pub struct NormSpec {
        /// Groups of eight columns that a thread keeps in registers; 0 of kernels for rows of any length.
        groups: u32,
        /// The type of all matrices of kernels for whole aligned rows; `any` of those that are told at run time.
        x: Name,
    }
}

impl NormSpec {
    /// Of a kernel that is told at run time which types the matrices have.
    pub const fn any(groups: u32) -> Self {
        Self { groups, x: Name::new("any") }
    }

    /// Of a kernel for whole aligned rows of one type.
    pub const fn of_type(groups: u32, dtype: DType) -> Self {
        Self { groups, x: Name::new(dtype.name()) }
    }
}

spec! {
    /// What tells the kernels of `norm` apart whose result is quantized. Kind and types are told at run time.
    pub struct NormQuantizeSpec {
        /// Groups of eight columns that a thread keeps in registers; 0 of kernels for rows of any length.
        groups: u32,
        /// The format of the result.
        to: XFormat,
        /// Whether a factor is given.
        given_factor: bool,
        /// Columns that a sum covers; 0 where there are none.
        sum_span: u32,
    }
}

impl NormQuantizeSpec {
    /// Of a kernel that writes `quantized`.
    pub fn new(groups: u32, quantized: &QuantizedD) -> Self {
        let QuantizedD { format, planes: XPlanes { parts, .. } } = *quantized;
        Self {
            groups,
            to: format,
            given_factor: parts.factor == XFactor::Given,
            sum_span: parts.sum_span.unwrap_or(0) as u32,
        }
    }

    /// The planes of what such a kernel writes; `None` of what is no format of codes.
    pub fn parts(&self) -> Option<XParts> {
        self.to.parts(self.given_factor, Some(self.sum_span as usize).filter(|&span| span > 0))
    }
}

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormLaunch {
    /// The configuration.
    pub config: NormConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedNorm {
    /// The operand that X is read from.
    pub fn x_operand(&self) -> NormOperand {
        match self.x_place {
            XPlace::Own => NormOperand::X,
            XPlace::D => NormOperand::XAndD,
            XPlace::Sum => NormOperand::XAndSum,
        }
    }

    /// The type of X, D, residual and sum where all have one, and whole groups of eight columns at multiples of 16 bytes, which
    /// D has none beyond.
    pub fn aligned_dtype(&self) -> Option<DType> {
        let dtype = self.x.dtype;
        let added = self.added.iter().flat_map(|added| [added.residual, added.sum]);
        let mut all = [self.x, self.d].into_iter().chain(added);
        let whole = self.columns == self.d_columns && self.columns.is_multiple_of(8);
        let whole = whole && !self.gathers && self.quantized.is_none();
        (whole && all.all(|dense| dense.dtype == dtype && dense.aligned16 && dense.col_stride == 1)).then_some(dtype)
    }

    /// The format of the result.
    pub fn d_format(&self) -> XFormat {
        self.quantized.map_or(XFormat::Plain(self.d.dtype), |quantized| quantized.format)
    }

    /// Name of the norm in tables and messages: `norm_rms_f16_bf16`, `norm_rms_f16_q8_0`.
    pub fn kernel_name(&self) -> String {
        format!("norm_{}_{}_{}", self.function.kind, self.x.dtype, self.d_format())
    }

    /// The operand that D is written to; of a quantized result the codes.
    pub fn d_operand(&self) -> NormOperand {
        match self.quantized {
            Some(_) => NormOperand::Codes,
            None if self.x_place == XPlace::D => NormOperand::XAndD,
            None => NormOperand::D,
        }
    }

    /// The operand that the residual is read from, where there is one.
    pub fn residual_operand(&self) -> Option<NormOperand> {
        let operand =
            |added: AddedResidual| if added.in_place { NormOperand::ResidualAndSum } else { NormOperand::Residual };
        self.added.map(operand)
    }

    /// The operand that the sum is written to, where there is one.
    pub fn sum_operand(&self) -> Option<NormOperand> {
        let operand = |added: AddedResidual| match (self.x_place, added.in_place) {
            (XPlace::Sum, _) => NormOperand::XAndSum,
            (_, true) => NormOperand::ResidualAndSum,
            (_, false) => NormOperand::Sum,
        };
        self.added.map(operand)
    }
}

impl Operation for CheckedNorm {
    const NAME: &'static str = "norm";
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
        matrix(&self.x, self.columns) + written + added + self.d_columns as f64 * of_column as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }
}

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
            x_place: XPlace::Own,
            gathers: false,
        };
        assert_eq!(op.operands(), [O::X, O::Gamma, O::D]);
        assert_eq!(op.traffic(), (2 * 3 * 64 * 2 + 64 * 4) as f64);
        let in_place = CheckedNorm { x_place: XPlace::D, ..op };
        assert_eq!(in_place.operands(), [O::XAndD, O::Gamma]);
        let added = Some(AddedResidual { residual: dense, sum: dense, in_place: true });
        let fused = CheckedNorm { added, ..in_place };
        assert_eq!(fused.operands(), [O::XAndD, O::ResidualAndSum, O::Gamma]);
        let over_x = CheckedNorm {
            added: Some(AddedResidual { residual: dense, sum: dense, in_place: false }),
            x_place: XPlace::Sum,
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

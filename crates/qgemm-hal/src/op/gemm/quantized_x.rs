//! X in codes and scales as `gemm` takes it, and the product of the same as plain numbers.

use std::borrow::Cow;

use qgemm_formats::{DType, XCode, XFactor, XFormat, XParts};

use super::workspace::{XPlaneRegions, XRegion};
use super::{CheckedGemm, GemmOperand, LaunchPlan, XOperand, XPrecision};
use crate::op::dense::Dense;
use crate::op::dequantize::CheckedDequantize;
use crate::op::quantize::CheckedQuantize;

/// The planes of a quantized X, rows of each so many bytes apart; [`GemmOperand::X`] is the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XPlanes {
    /// What they hold.
    pub parts: XParts,
    /// Bytes from one row of codes to the next; a multiple of 16, as is the address.
    pub codes_row: u64,
    /// Bytes from one row of scales to the next; a multiple of 4, as is the address.
    pub scales_row: u64,
    /// Bytes from one row of sums to the next; a multiple of 4, as is the address.
    pub sums_row: u64,
}

impl XPlanes {
    /// The operands beside the codes.
    pub fn operands(&self) -> impl Iterator<Item = GemmOperand> + use<> {
        self.operands_of([GemmOperand::XScales, GemmOperand::XPlaneFactors, GemmOperand::XSums])
    }

    /// Those of scales, factors and sums that there are.
    pub fn operands_of<O>(&self, [scales, factors, sums]: [O; 3]) -> impl Iterator<Item = O> + use<O> {
        let optional = [
            (self.parts.scale.is_some(), scales),
            (self.parts.factor != XFactor::None, factors),
            (self.parts.sum_span.is_some(), sums),
        ];
        optional.into_iter().filter(|(is_there, _)| *is_there).map(|(_, operand)| operand)
    }

    /// The operand of a product whose X is of `format`.
    pub fn operand(self, format: XFormat) -> XOperand {
        let codes_a_byte = if self.parts.code == XCode::E2M1 { 2 } else { 1 };
        let row_stride = self.codes_row.saturating_mul(codes_a_byte);
        XOperand { format, row_stride, col_stride: 1, aligned16: true, planes: Some(self) }
    }
}

impl CheckedGemm {
    /// The step that makes plain numbers of a quantized X, and the operation behind it, which multiplies those; `None` of an X
    /// that is plain.
    ///
    /// The numbers are f32. Those of integer codes may not be rounded any further, so that the product keeps the limits of integer
    /// products; those of other codes may be, to f16, whose eleven bits hold each code's four.
    pub fn dequantized(&self) -> Option<(Self, CheckedDequantize)> {
        let planes = self.x.planes?;
        let step = CheckedDequantize { rows: self.m, columns: self.k, format: self.x.format, planes };
        let x_precision = match planes.parts.code {
            XCode::Int8 => XPrecision::Exact,
            XCode::E4M3 | XCode::E2M1 => XPrecision::F16,
        };
        Some((Self { x: step.d().into(), x_precision, ..self.clone() }, step))
    }

    /// The steps that quantize a plain X as far as its precision permits, each with the operation behind it, which multiplies
    /// codes; none of an X that is quantized, or may not be. [`XPrecision::Auto`] asks for none: what rounds further than kernels do
    /// by themselves is asked for.
    pub fn quantized(&self) -> impl Iterator<Item = (Self, CheckedQuantize)> + '_ {
        const BLOCKS: XFormat = XFormat::Q8_0;
        let formats: &[XFormat] = match self.x_precision {
            XPrecision::Int8 => &[BLOCKS],
            XPrecision::E4M3 => &[XFormat::E4M3Block, BLOCKS],
            XPrecision::E4M3Token => &[XFormat::E4M3Block, XFormat::E4M3Token, BLOCKS],
            XPrecision::Int8Token => &[XFormat::Int8Token, BLOCKS],
            _ => &[],
        };
        formats.iter().filter_map(|&format| self.quantized_to(format))
    }

    /// The step that quantizes a plain X to `format`, and the operation behind it.
    pub(in crate::op) fn quantized_to(&self, format: XFormat) -> Option<(Self, CheckedQuantize)> {
        let (x, parts) = (self.plain_x().ok()?, format.parts(false, None)?);
        let k = self.k;
        let step = CheckedQuantize {
            rows: self.m,
            columns: k,
            x,
            format,
            parts,
            codes_row: parts.code_bytes(k) as u64,
            scales_row: parts.scale_bytes(k) as u64,
            sums_row: parts.sums(k) as u64 * 4,
        };
        let planes = XPlanes { parts, codes_row: step.codes_row, scales_row: step.scales_row, sums_row: step.sums_row };
        Some((Self { x: planes.operand(format), ..self.clone() }, step))
    }

    /// The operation that the families of `plan` see: this one, or that behind the step that makes X plain or quantizes it.
    pub fn product(&self, plan: &LaunchPlan) -> Cow<'_, Self> {
        let layout = &plan.workspace;
        let plain = layout.dequantized.and_then(|_| self.dequantized()).map(|(product, _)| product);
        let quantized =
            layout.quantized.and_then(|region| self.quantized_to(region.format)).map(|(product, _)| product);
        plain.or(quantized).map_or(Cow::Borrowed(self), Cow::Owned)
    }

    /// The step that quantizes X before the kernels of `plan`, and where it writes.
    pub fn quantize_step(&self, plan: &LaunchPlan) -> Option<(CheckedQuantize, XPlaneRegions)> {
        let regions = plan.workspace.quantized?;
        self.quantized_to(regions.format).map(|(_, step)| (step, regions))
    }
}

impl CheckedDequantize {
    /// Columns of what it writes: those of X as stored, so that every row begins at a multiple of 16 bytes.
    pub fn d_columns(&self) -> usize {
        self.planes.parts.columns(self.columns)
    }

    /// What it writes.
    pub fn d(&self) -> Dense {
        Dense::rows_of(DType::F32, self.d_columns())
    }

    /// Where it writes that in a workspace, from byte `x` on.
    pub(crate) fn region(&self, x: usize) -> XRegion {
        let columns = self.d_columns();
        XRegion {
            x,
            factors: None,
            rows: self.rows,
            columns,
            row_bytes: columns.saturating_mul(self.d().dtype.bytes()),
        }
    }
}

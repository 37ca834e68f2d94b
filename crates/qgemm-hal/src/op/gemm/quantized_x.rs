//! Quantized X in `gemm`, and the product with a dequantized X.

use std::borrow::Cow;

use qgemm_formats::{DType, XCode, XFactor, XFormat, XParts};

use super::workspace::{XPlaneRegions, XRegion};
use super::{CheckedGemm, GemmOperand, LaunchPlan, XOperand, XPrecision};
use crate::op::dense::Dense;
use crate::op::dequantize::CheckedDequantize;
use crate::op::quantize::CheckedQuantize;

/// Planes of a quantized X with their row strides;
/// [`GemmOperand::X`] holds the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XPlanes {
    /// Contents of the planes.
    pub parts: XParts,
    /// Row stride of the codes in bytes. It and the
    /// address are multiples of 16.
    pub codes_row: u64,
    /// Row stride of the scales in bytes. It and the
    /// address are multiples of 4.
    pub scales_row: u64,
    /// Row stride of the sums in bytes. It and the
    /// address are multiples of 4.
    pub sums_row: u64,
}

impl XPlanes {
    /// The operands beside the codes.
    pub fn operands(&self) -> impl Iterator<Item = GemmOperand> + use<> {
        self.operands_of([GemmOperand::XScales, GemmOperand::XPlaneFactors, GemmOperand::XSums])
    }

    /// The existing ones of scales, factors and sums.
    pub fn operands_of<O>(&self, [scales, factors, sums]: [O; 3]) -> impl Iterator<Item = O> + use<O> {
        let optional = [
            (self.parts.scale.is_some(), scales),
            (self.parts.factor != XFactor::None, factors),
            (self.parts.sum_span.is_some(), sums),
        ];
        optional.into_iter().filter(|(is_there, _)| *is_there).map(|(_, operand)| operand)
    }

    /// X operand of a product in `format`.
    pub fn operand(self, format: XFormat) -> XOperand {
        let codes_a_byte = if self.parts.code == XCode::E2M1 { 2 } else { 1 };
        let row_stride = self.codes_row.saturating_mul(codes_a_byte);
        XOperand { format, row_stride, col_stride: 1, aligned16: true, planes: Some(self) }
    }
}

impl CheckedGemm {
    /// The step that dequantizes X, and the operation after it.
    /// `None` when X is not quantized.
    ///
    /// The values are f32. From integer codes they must not be
    /// rounded further, so that the product keeps the limits of integer
    /// products. Other codes may be rounded to f16, whose 11 bits
    /// hold the 4 bits of each code.
    pub fn dequantized(&self) -> Option<(Self, CheckedDequantize)> {
        let planes = self.x.planes?;
        let step = CheckedDequantize { rows: self.m, columns: self.k, format: self.x.format, planes };
        let x_precision = match planes.parts.code {
            XCode::Int8 => XPrecision::Exact,
            XCode::E4M3 | XCode::E2M1 => XPrecision::F16,
        };
        Some((Self { x: step.d().into(), x_precision, ..self.clone() }, step))
    }

    /// The steps that quantize X as far as its precision permits,
    /// each with the operation after it. None when X is quantized
    /// already or must not be. [`XPrecision::Auto`] yields none: more rounding
    /// than kernels do by default must be requested.
    pub fn quantized(&self) -> impl Iterator<Item = (Self, CheckedQuantize)> + '_ {
        const BLOCKS: XFormat = XFormat::Q8_0;
        let formats: &[XFormat] = match self.x_precision {
            XPrecision::Int8 => &[BLOCKS],
            XPrecision::E4M3 => &[XFormat::E4M3Block, BLOCKS],
            XPrecision::E4M3Token => &[XFormat::E4M3Block, XFormat::E4M3Token, BLOCKS],
            XPrecision::Int8Token => &[XFormat::Int8Token, BLOCKS],
            XPrecision::MxFp8 => &[XFormat::MxFp8, BLOCKS],
            XPrecision::MxFp4 => &[XFormat::MxFp4, XFormat::MxFp8, BLOCKS],
            XPrecision::NvFp4 => &[XFormat::NvFp4, BLOCKS],
            _ => &[],
        };
        formats.iter().filter_map(|&format| self.quantized_to(format))
    }

    /// The step that quantizes X to `format`, and
    /// the operation after it.
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

    /// The operation that the families of `plan` see: this one, or
    /// the one after the step that dequantizes or quantizes X.
    pub fn product(&self, plan: &LaunchPlan) -> Cow<'_, Self> {
        let layout = &plan.workspace;
        let plain = layout.dequantized.and_then(|_| self.dequantized()).map(|(product, _)| product);
        let quantized =
            layout.quantized.and_then(|region| self.quantized_to(region.format)).map(|(product, _)| product);
        plain.or(quantized).map_or(Cow::Borrowed(self), Cow::Owned)
    }

    /// The step that quantizes X before the kernels of
    /// `plan`, and its output regions.
    pub fn quantize_step(&self, plan: &LaunchPlan) -> Option<(CheckedQuantize, XPlaneRegions)> {
        let regions = plan.workspace.quantized?;
        self.quantized_to(regions.format).map(|(_, step)| (step, regions))
    }
}

impl CheckedDequantize {
    /// Output columns: those of X as stored, so that every
    /// row is 16-byte aligned.
    pub fn d_columns(&self) -> usize {
        self.planes.parts.columns(self.columns)
    }

    /// Output matrix.
    pub fn d(&self) -> Dense {
        Dense::rows_of(DType::F32, self.d_columns())
    }

    /// Output region in a workspace, at offset `x`.
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

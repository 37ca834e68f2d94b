//! X formats ([`XFormat`]): storage formats of activations.

use std::fmt;
use std::str::FromStr;

use crate::activation::{Q8_BLOCK, Q8_K_BLOCK};
use crate::desc::{Encoding, ScaleType};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::float8::E2M1_DOUBLED;

/// Block length of MX formats (OCP Microscaling Formats 1.0).
const MX_BLOCK: usize = 32;
/// Block length of NVFP4.
const NVFP4_BLOCK: usize = 16;
/// Block length of DeepSeek's 1×128 scales.
const E4M3_BLOCK: usize = 128;

/// Format of activations: a plain type, or codes with scales.
///
/// ```
/// use qgemm_formats::{DType, ScaleSpan, XFormat};
/// assert_eq!("bf16".parse::<XFormat>()?, XFormat::Plain(DType::BF16));
/// assert_eq!(XFormat::Q8_0.name(), "q8_0");
/// assert_eq!("q8_256".parse::<XFormat>()?.desc().scale_span, ScaleSpan::Block(256));
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum XFormat {
    /// Unquantized numbers.
    Plain(DType),
    /// INT8 with an f32 scale per 32 columns, without sums: the values of ggml's Q8_0.
    Q8_0,
    /// INT8 with an f32 scale per 256 columns, without sums.
    Q8_256,
    /// INT8 with an f32 scale and a scaled sum per 32 columns. Sums can cover 16 columns
    /// instead, for the minimums of Q2_K.
    Q8_1,
    /// INT8 with one f32 scale per token.
    Int8Token,
    /// E4M3 with one f32 scale per token.
    E4M3Token,
    /// E4M3 with an f32 scale per 128 columns.
    E4M3Block,
    /// E4M3 with one given f32 scale for all of X.
    E4M3Tensor,
    /// E4M3 with an E8M0 scale per 32 columns.
    MxFp8,
    /// E2M1 with an E8M0 scale per 32 columns.
    MxFp4,
    /// E2M1 with an E4M3 scale per 16 columns, and an f32 factor per token or for all of X.
    NvFp4,
}

/// Span of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleSpan {
    /// No scales.
    None,
    /// This many columns of a token.
    Block(usize),
    /// All columns of a token.
    Token,
    /// All of X.
    Tensor,
}

/// Description of an X format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct XFormatDesc {
    /// Bits per element or code.
    pub bits: u32,
    /// Formula from code to unscaled value. INT8 codes have an offset of 128 in this
    /// description only: kernels read two's complement.
    pub encoding: Encoding,
    /// Span of a scale.
    pub scale_span: ScaleSpan,
    /// Element type of scales, if any.
    pub scale: Option<ScaleType>,
    /// Default columns per sum, if the format has sums.
    pub sum_span: Option<usize>,
}

/// INT8.
const S8: Encoding = Encoding::IntOffset { offset: 128 };

impl XFormat {
    /// All formats, in the order of tables.
    pub const ALL: [XFormat; 13] = [
        XFormat::Plain(DType::F32),
        XFormat::Plain(DType::F16),
        XFormat::Plain(DType::BF16),
        XFormat::Q8_0,
        XFormat::Q8_256,
        XFormat::Q8_1,
        XFormat::Int8Token,
        XFormat::E4M3Token,
        XFormat::E4M3Block,
        XFormat::E4M3Tensor,
        XFormat::MxFp8,
        XFormat::MxFp4,
        XFormat::NvFp4,
    ];

    /// Lower-case name, as in kernel names and options.
    pub const fn name(self) -> &'static str {
        match self {
            XFormat::Plain(dtype) => dtype.name(),
            XFormat::Q8_256 => "q8_256",
            XFormat::Q8_0 => "q8_0",
            XFormat::Q8_1 => "q8_1",
            XFormat::Int8Token => "int8_token",
            XFormat::E4M3Token => "e4m3_token",
            XFormat::E4M3Block => "e4m3_1x128",
            XFormat::E4M3Tensor => "e4m3_tensor",
            XFormat::MxFp8 => "mxfp8",
            XFormat::MxFp4 => "mxfp4",
            XFormat::NvFp4 => "nvfp4",
        }
    }

    /// Description.
    pub const fn desc(self) -> XFormatDesc {
        match self {
            XFormat::Plain(dtype) => described(dtype.bytes() as u32 * 8, Encoding::Plain(dtype), ScaleSpan::None, None),
            XFormat::Q8_0 => described(8, S8, ScaleSpan::Block(Q8_BLOCK), Some(ScaleType::F32)),
            XFormat::Q8_256 => described(8, S8, ScaleSpan::Block(Q8_K_BLOCK), Some(ScaleType::F32)),
            XFormat::Q8_1 => XFormatDesc {
                sum_span: Some(Q8_BLOCK),
                ..described(8, S8, ScaleSpan::Block(Q8_BLOCK), Some(ScaleType::F32))
            },
            XFormat::Int8Token => described(8, S8, ScaleSpan::Token, Some(ScaleType::F32)),
            XFormat::E4M3Token => described(8, Encoding::E4M3, ScaleSpan::Token, Some(ScaleType::F32)),
            XFormat::E4M3Block => described(8, Encoding::E4M3, ScaleSpan::Block(E4M3_BLOCK), Some(ScaleType::F32)),
            XFormat::E4M3Tensor => described(8, Encoding::E4M3, ScaleSpan::Tensor, Some(ScaleType::F32)),
            XFormat::MxFp8 => described(8, Encoding::E4M3, ScaleSpan::Block(MX_BLOCK), Some(ScaleType::E8M0)),
            XFormat::MxFp4 => described(4, E2M1, ScaleSpan::Block(MX_BLOCK), Some(ScaleType::E8M0)),
            XFormat::NvFp4 => described(4, E2M1, ScaleSpan::Block(NVFP4_BLOCK), Some(ScaleType::E4M3)),
        }
    }

    /// Element type of an unquantized format.
    pub const fn plain(self) -> Option<DType> {
        match self {
            XFormat::Plain(dtype) => Some(dtype),
            _ => None,
        }
    }
}

/// E2M1. The table holds doubled values, as for weights.
const E2M1: Encoding = Encoding::Codebook(&E2M1_DOUBLED);

const fn described(bits: u32, encoding: Encoding, scale_span: ScaleSpan, scale: Option<ScaleType>) -> XFormatDesc {
    XFormatDesc { bits, encoding, scale_span, scale, sum_span: None }
}

impl fmt::Display for XFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<DType> for XFormat {
    fn from(dtype: DType) -> Self {
        XFormat::Plain(dtype)
    }
}

impl FromStr for XFormat {
    type Err = FormatError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let named = |format: &XFormat| format.name().eq_ignore_ascii_case(s);
        XFormat::ALL.into_iter().find(named).ok_or_else(|| FormatError::UnknownXFormat { name: s.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse() {
        for format in XFormat::ALL {
            assert_eq!(format.name().parse::<XFormat>().expect("a name"), format);
        }
        let error = "q8_2".parse::<XFormat>().expect_err("no such format").to_string();
        assert!(error.contains("q8_2") && error.contains("e4m3_1x128"), "{error}");
    }

    #[test]
    fn descriptions_hold_together() {
        for format in XFormat::ALL {
            let desc = format.desc();
            assert_eq!(desc.scale.is_some(), desc.scale_span != ScaleSpan::None, "{format}");
            assert_eq!(format.plain().is_some(), matches!(desc.encoding, Encoding::Plain(_)), "{format}");
            if let (Some(span), ScaleSpan::Block(block)) = (desc.sum_span, desc.scale_span) {
                assert_eq!(block % span, 0, "{format}");
            }
        }
    }
}

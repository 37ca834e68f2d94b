//! [`XPrecision`]: what a problem permits a product to do with X.

use std::fmt;
use std::str::FromStr;

use qgemm_formats::DType;

use crate::error::HalError;

/// How far activations may be rounded before they are multiplied: a permission, of which kernels use what makes them fast.
///
/// It allows and never forces: a product that rounds less is always permitted, and taken where it is as fast. What a plan does,
/// [`TileConfig::x_format`](crate::TileConfig::x_format) of its launch says; what each device makes of each permission stands in
/// `docs/guide/support.md`.
///
/// Integers of eight bits, which [`XPrecision::Auto`] permits, cost an error of 1e-5 to 1e-4 of the output's square, 2.5e-4 seen
/// for tokens with a few large values. That is what llama.cpp does on processors. It is little beside what weights of four bits
/// cost (5e-3), and more than weights of eight do (3e-5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum XPrecision {
    /// What costs no speed on the device, and never rounds further than llama.cpp: as [`XPrecision::Int8`] on processors and
    /// wgpu, and f16 or bf16 on CUDA. Of FP8 weights whose checkpoint states dynamic FP8 activations, as [`XPrecision::E4M3`].
    #[default]
    Auto,
    /// Not at all.
    Exact,
    /// To f16, after each token was multiplied by a power of two of its own: what is beyond the range of f16 keeps eleven
    /// bits, too. bf16 activations lose nothing by it but what is 2³¹ times smaller than the token's largest value.
    F16,
    /// To bf16, where matrix instructions take it.
    BF16,
    /// f32 to TF32, to nearest: eleven bits in the range of f32. `matmul` does so on CUDA from Ampere on; else f32 is multiplied as it is.
    Tf32,
    /// f32 to the sum of two bf16 numbers, each rounded to nearest, whose products are added but for the smallest: three multiplications for
    /// one, 16 bits. `matmul` does so on CUDA from Ampere on; else f32 is multiplied as it is.
    Bf16x3,
    /// To integers of eight bits, with a factor for every
    /// [`activation_block`](qgemm_formats::FormatDesc::activation_block) columns, on CUDA for every 32, where weights are such
    /// integers, too, or name them in a table. Else as [`XPrecision::F16`].
    Int8,
    /// To integers of eight bits with one factor a token, where kernels multiply such codes with weights that are integers, too. Else as
    /// [`XPrecision::Int8`], which rounds less.
    Int8Token,
    /// To E4M3, four bits of precision, with a factor for every 128 columns, where a CUDA kernel multiplies such codes with those of FP8
    /// weights (Ada and newer), or of INT4 and MXFP4 (Hopper). Else as [`XPrecision::Int8`], which rounds less.
    E4M3,
    /// To E4M3 with one factor a token, where such kernels are faster with it than with one for every 128 columns. Else as
    /// [`XPrecision::E4M3`], which rounds less.
    E4M3Token,
}

impl XPrecision {
    /// All of them.
    pub const ALL: [XPrecision; 10] = [
        XPrecision::Auto,
        XPrecision::Exact,
        XPrecision::F16,
        XPrecision::BF16,
        XPrecision::Tf32,
        XPrecision::Bf16x3,
        XPrecision::Int8,
        XPrecision::Int8Token,
        XPrecision::E4M3,
        XPrecision::E4M3Token,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            XPrecision::Auto => "auto",
            XPrecision::Exact => "exact",
            XPrecision::F16 => "f16",
            XPrecision::BF16 => "bf16",
            XPrecision::Tf32 => "tf32",
            XPrecision::Bf16x3 => "bf16x3",
            XPrecision::Int8 => "int8",
            XPrecision::Int8Token => "int8_token",
            XPrecision::E4M3 => "e4m3",
            XPrecision::E4M3Token => "e4m3_token",
        }
    }

    /// Whether X, whatever it is stored in, may be multiplied as blocks of integers of eight bits
    /// ([`XFormat::Q8`](qgemm_formats::XFormat::Q8)).
    pub const fn allows_q8(self) -> bool {
        use XPrecision::{Auto, E4M3, E4M3Token, Int8, Int8Token};
        matches!(self, Auto | Int8 | Int8Token | E4M3 | E4M3Token)
    }

    /// The 16-bit type in which X, stored in `dtype`, may be multiplied where it is not that type already; f16 with a power of
    /// two a token.
    pub const fn half(self, dtype: DType) -> Option<DType> {
        match (self, dtype) {
            (XPrecision::Exact | XPrecision::Tf32 | XPrecision::Bf16x3, _) | (_, DType::F16) => None,
            (XPrecision::BF16, DType::F32) => Some(DType::BF16),
            (_, DType::F32 | DType::BF16) => Some(DType::F16),
        }
    }
}

impl fmt::Display for XPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for XPrecision {
    type Err = HalError;

    fn from_str(s: &str) -> Result<Self, HalError> {
        let found = XPrecision::ALL.into_iter().find(|precision| precision.name().eq_ignore_ascii_case(s));
        found.ok_or_else(|| HalError::UnknownXPrecision { name: s.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_allows_nothing_and_what_allows_q8_allows_f16() {
        for dtype in DType::ALL {
            assert_eq!(XPrecision::Exact.half(dtype), None);
            for allowed in XPrecision::ALL {
                let half = allowed.half(dtype);
                assert!(half != Some(dtype), "{allowed:?}: {dtype}");
                if allowed.allows_q8() && dtype != DType::F16 {
                    assert_eq!(half, Some(DType::F16), "{allowed:?}: {dtype}");
                }
            }
        }
        assert!(!XPrecision::Exact.allows_q8());
    }

    #[test]
    fn names_parse_and_others_are_refused() {
        for precision in XPrecision::ALL {
            assert_eq!(precision.name().parse::<XPrecision>().expect("a name"), precision);
        }
        let error = "int9".parse::<XPrecision>().expect_err("no such precision").to_string();
        assert!(error.contains("int9") && error.contains("bf16x3"), "{error}");
    }
}

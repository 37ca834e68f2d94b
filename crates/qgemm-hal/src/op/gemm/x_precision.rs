//! [`XPrecision`]: how far a product may round X.

use std::fmt;
use std::str::FromStr;

use qgemm_formats::{DType, XFormat};

use crate::error::HalError;

/// Permitted rounding of the activations. Kernels use it
/// where it makes them faster.
///
/// It allows and never forces: a product that rounds less is
/// always permitted, and is chosen when it is as fast.
/// [`TileConfig::x_format`](crate::TileConfig::x_format) of a plan tells
/// what the kernel does; `docs/guide/support.md` lists every device.
///
/// INT8, which [`XPrecision::Auto`] permits, costs a relative squared error
/// of 1e-5 to 1e-4 of the output, and 2.5e-4 for tokens
/// with a few large values. llama.cpp does the same on CPUs.
/// 4-bit weights cost much more (5e-3), 8-bit weights less (3e-5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum XPrecision {
    /// The fastest of the device, never coarser than llama.cpp:
    /// [`XPrecision::Int8`] on CPU and wgpu, f16 or bf16 on CUDA.
    /// For FP8 weights whose checkpoint declares dynamic FP8
    /// activations: [`XPrecision::E4M3`].
    #[default]
    Auto,
    /// No rounding.
    Exact,
    /// f16, after scaling each token by a power of two, so
    /// that values beyond the f16 range keep 11 bits. bf16 activations
    /// lose only values 2³¹ times smaller than the token's largest.
    F16,
    /// bf16, where matrix instructions support it.
    BF16,
    /// f32 to TF32, to nearest: 11 bits with the range of
    /// f32. Used by `matmul` on CUDA from Ampere on;
    /// elsewhere f32 is not rounded.
    Tf32,
    /// f32 as the sum of two bf16 numbers, each rounded to
    /// nearest, without the smallest partial product: three multiplications
    /// instead of one, 16 bits. Used by `matmul` on CUDA from
    /// Ampere on; elsewhere f32 is not rounded.
    Bf16x3,
    /// INT8 with a factor for every
    /// [`activation_block`](qgemm_formats::FormatDesc::activation_block)
    /// columns (every 32 on CUDA), for integer weights and table formats.
    /// Otherwise as [`XPrecision::F16`].
    Int8,
    /// INT8 with one factor for each token, where kernels
    /// multiply it with integer weights. Otherwise as
    /// [`XPrecision::Int8`], which rounds less.
    Int8Token,
    /// E4M3 (4 bits of precision) with a factor for every 128
    /// columns, where CUDA kernels multiply it with FP8 weights (Ada and
    /// newer), or with INT4 and MXFP4 weights (Hopper). Otherwise as
    /// [`XPrecision::Int8`], which rounds less.
    E4M3,
    /// E4M3 with one factor for each token, where that is faster
    /// than a factor for every 128 columns. Otherwise as
    /// [`XPrecision::E4M3`], which rounds less.
    E4M3Token,
    /// E4M3 with a power of two (UE8M0) for every 32 columns, where
    /// block-scaled instructions multiply it with MXFP8 and MXFP4
    /// weights (consumer Blackwell). Otherwise as
    /// [`XPrecision::Int8`].
    MxFp8,
    /// E2M1 (2 bits of precision) with a power of two for every 32
    /// columns, where block-scaled instructions multiply it with MXFP4
    /// weights (consumer Blackwell). Otherwise as
    /// [`XPrecision::MxFp8`], which rounds less.
    MxFp4,
    /// E2M1 with an E4M3 scale for every 16 columns and a factor for
    /// each token, where block-scaled instructions multiply it with
    /// NVFP4 weights (consumer Blackwell). Otherwise as
    /// [`XPrecision::Int8`], which rounds less.
    NvFp4,
}

impl XPrecision {
    /// All of them.
    pub const ALL: [XPrecision; 13] = [
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
        XPrecision::MxFp8,
        XPrecision::MxFp4,
        XPrecision::NvFp4,
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
            XPrecision::MxFp8 => XFormat::MxFp8.name(),
            XPrecision::MxFp4 => XFormat::MxFp4.name(),
            XPrecision::NvFp4 => XFormat::NvFp4.name(),
        }
    }

    /// Whether X may be multiplied as INT8 blocks, whatever its type
    /// in memory ([`XFormat::Q8_0`](qgemm_formats::XFormat::Q8_0)).
    pub const fn allows_q8(self) -> bool {
        use XPrecision::{Auto, E4M3, E4M3Token, Int8, Int8Token, MxFp4, MxFp8, NvFp4};
        matches!(self, Auto | Int8 | Int8Token | E4M3 | E4M3Token | MxFp8 | MxFp4 | NvFp4)
    }

    /// The 16-bit type to which X of `dtype` may be rounded;
    /// `None` when it is that type already. f16 is scaled by
    /// a power of two for each token.
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

//! Error limits of kernels (`docs/numerics.md`), as data.

use qgemm_formats::DType;
use qgemm_hal::Math;

/// Error limit of one arithmetic, for any output type.
#[derive(Clone, Copy, Debug)]
pub struct PathLimit {
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Largest normalized squared error.
    pub nmse: f64,
    /// Reason for the number.
    pub reason: &'static str,
}

/// Every arithmetic that the oracle models.
pub const PATHS: &[PathLimit] = &[
    PathLimit {
        math: Math::FmaF32,
        nmse: 1e-9,
        reason: "weights and products are exact in f32; what remains is f32 summation (2^-48 · K) and cancellation \
                 between codes and their offset",
    },
    PathLimit {
        math: Math::DotI8,
        nmse: 1e-9,
        reason: "products of codes are added up exactly; scales act on them in f32",
    },
    PathLimit { math: Math::TensorS8, nmse: 1e-9, reason: "as dot products of bytes" },
    PathLimit {
        math: Math::TensorF16,
        nmse: 1e-6,
        reason: "codes are exact and scales act on f32 sums, in f16 and bf16 alike",
    },
    PathLimit {
        math: Math::TensorTf32,
        nmse: 1e-6,
        reason: "on factors rounded to TF32: products are exact, and sums cut below 24 bits",
    },
    PathLimit {
        math: Math::TensorBf16x3,
        nmse: 2e-9,
        reason: "a product is off by at most 2^-15 of it, squared 1e-9; its sums of 16 are added in f32, as by FMA",
    },
    PathLimit {
        math: Math::TensorFp8,
        nmse: 1e-6,
        reason: "codes are exact; sums of 128 columns have 14 bits, and scales act on them in f32",
    },
    PathLimit {
        math: Math::TensorBlockScaled,
        nmse: 1e-6,
        reason: "codes and scales are exact; what is added to a sum is cut to its last bit, 64 columns at a time",
    },
];

/// Error limit of rounding weights to a type before the product.
#[derive(Clone, Copy, Debug)]
pub struct WeightRounding {
    /// The type.
    pub dtype: DType,
    /// Largest normalized squared error.
    pub nmse: f64,
    /// Reason for the number.
    pub reason: &'static str,
}

/// Limits for every type that kernels round weights to.
pub const WEIGHT_ROUNDING: &[WeightRounding] = &[
    WeightRounding {
        dtype: DType::F16,
        nmse: 6e-7,
        reason: "scales are rounded, too, each for its sub-block of 32: 32 (2^-11)^2 / 12 where X is constant",
    },
    WeightRounding {
        dtype: DType::BF16,
        nmse: 1.53e-5,
        reason: "each weight is rounded once: half a unit in the last place of 1, squared",
    },
];

/// Error limit of rounding the output once.
#[derive(Clone, Copy, Debug)]
pub struct OutputRounding {
    /// Type of the output.
    pub dtype: DType,
    /// Half a unit in the last place of 1, squared.
    /// Large outputs average a sixth of it. A tile of a few elements
    /// can come near.
    pub nmse: f64,
    /// Half the distance of subnormal numbers, if products reach
    /// them.
    pub absolute: f64,
    /// The smallest magnitude that rounds to infinity: half a unit in
    /// the last place beyond the largest number.
    pub overflow: f64,
}

/// Limits for every output type.
pub const OUTPUT_ROUNDING: &[OutputRounding] = &[
    OutputRounding { dtype: DType::F32, nmse: 0.0, absolute: 0.0, overflow: 3.402_823_567_797_336_6e38 },
    OutputRounding { dtype: DType::F16, nmse: 2.4e-7, absolute: 2.99e-8, overflow: 65520.0 },
    OutputRounding { dtype: DType::BF16, nmse: 1.53e-5, absolute: 0.0, overflow: 3.396_177_549_579_548_6e38 },
];

/// Limit after exact sums, if an activation or the product of a
/// gated pair follows.
/// It covers single f32 roundings. In the tails of an activation,
/// with v² in an exponent, they reach 4e-6 of a value.
pub const EXACT_SUMS: f64 = 3e-11;

/// Error limit of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Largest normalized squared error of the output and of each
    /// tile.
    pub nmse: f64,
    /// Errors of single elements up to this are ignored.
    pub absolute: f64,
    /// Results of at least this magnitude are infinite.
    pub overflow: f64,
}

impl Tolerance {
    /// Limits the normalized error only; no result overflows.
    pub const fn relative(nmse: f64) -> Self {
        Self { nmse, absolute: 0.0, overflow: f64::INFINITY }
    }
}

/// Limit of a result with error `nmse` that is rounded to `d`.
pub fn rounded_to(d: DType, nmse: f64) -> Tolerance {
    match OUTPUT_ROUNDING.iter().find(|r| r.dtype == d) {
        None => Tolerance::relative(nmse),
        Some(r) => Tolerance { nmse: nmse + r.nmse, absolute: r.absolute, overflow: r.overflow },
    }
}

/// The limit of kernels with arithmetic `math`; `None` if the
/// oracle does not model it.
pub fn path(math: Math) -> Option<&'static PathLimit> {
    PATHS.iter().find(|p| p.math == math)
}

impl PathLimit {
    /// Limit of sums, with weights rounded to `weights`.
    pub fn of_sums(&self, weights: Option<DType>) -> f64 {
        let rounding = WEIGHT_ROUNDING.iter().find(|r| Some(r.dtype) == weights);
        self.nmse + rounding.map_or(0.0, |r| r.nmse)
    }

    /// Limit of results stored as `d`, with weights rounded to
    /// `weights`.
    pub fn tolerance(&self, weights: Option<DType>, d: DType) -> Tolerance {
        rounded_to(d, self.of_sums(weights))
    }
}

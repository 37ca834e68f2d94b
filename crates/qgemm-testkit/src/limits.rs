//! How far a kernel may be off: the error limits of `docs/numerics.md`, as data.

use qgemm_formats::DType;
use qgemm_hal::Math;

/// The error that one way of computing may add, whatever the output type.
#[derive(Clone, Copy, Debug)]
pub struct PathLimit {
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// The type to which activations are rounded before the multiplication; `None` leaves them as they come.
    pub rounds_f32_to: Option<DType>,
    /// Largest normalised squared error.
    pub nmse: f64,
    /// Why this number.
    pub reason: &'static str,
}

/// Every way of computing that the oracle models.
pub const PATHS: &[PathLimit] = &[
    PathLimit {
        math: Math::FmaF32,
        rounds_f32_to: None,
        nmse: 1e-9,
        reason: "weights and products are exact in f32; what remains is f32 summation (2^-48 · K) and cancellation \
                 between codes and their offset",
    },
    PathLimit {
        math: Math::TensorF16,
        rounds_f32_to: Some(DType::F16),
        nmse: 1e-6,
        reason: "kernels keep codes exact and scale f32 sums, so that bf16 needs no wider limit than f16",
    },
];

/// The squared error that rounding the output once may add: half a unit in the last place, squared.
pub const OUTPUT_ROUNDING: &[(DType, f64)] = &[(DType::F32, 0.0), (DType::F16, 2.4e-7), (DType::BF16, 4e-6)];

/// A limit for one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The way it computes.
    pub path: &'static PathLimit,
    /// Largest normalised squared error, output rounding included.
    pub nmse: f64,
}

/// The limit for a kernel that computes by `math` and stores `d`; `None` where the oracle has no model of such
/// kernels (integer activations).
pub fn limit(math: Math, d: DType) -> Option<Limit> {
    let path = PATHS.iter().find(|p| p.math == math)?;
    let (_, rounding) = OUTPUT_ROUNDING.iter().find(|(dtype, _)| *dtype == d)?;
    Some(Limit { path, nmse: path.nmse + rounding })
}

impl PathLimit {
    /// The type that activations of type `x` have when they are multiplied.
    pub fn multiplied_as(&self, x: DType) -> DType {
        match self.rounds_f32_to {
            Some(narrow) if x == DType::F32 => narrow,
            _ => x,
        }
    }
}

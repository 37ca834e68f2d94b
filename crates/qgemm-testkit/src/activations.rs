//! Activation generators; each provokes one kind of mistake.

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Kind of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// Normal with mean 0.
    Normal,
    /// Normal with mean 2: detects minimums and zero points that are
    /// not rounded together with their scales.
    PositiveMean,
    /// Integers from −2 to 2: with exact weights every sum is exact,
    /// in any order.
    SmallIntegers,
    /// Normal, with one in 64 values a hundred times larger.
    Outliers,
    /// Subnormal numbers of the type.
    /// In f32 and bf16 every other value is normal, because a GPU may
    /// flush their subnormals to zero.
    Denormals,
    /// One constant.
    AllEqual,
    /// One value per token: detects swapped rows.
    ConstantRows,
    /// Tokens of about 10³⁰, about 10⁻³⁰, 0 and about 1, in turn:
    /// detects factors and ranges that tokens wrongly share.
    /// Not for X or outputs in f16.
    MixedMagnitudes,
    /// An infinity in every fourth token, NaN in the next token:
    /// detects what spreads to other tokens.
    NotFinite,
}

impl ActivationKind {
    /// Every kind that all types can hold.
    pub const ALL: [ActivationKind; 7] = [
        ActivationKind::Normal,
        ActivationKind::PositiveMean,
        ActivationKind::SmallIntegers,
        ActivationKind::Outliers,
        ActivationKind::Denormals,
        ActivationKind::AllEqual,
        ActivationKind::ConstantRows,
    ];

    /// Lower-case name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            ActivationKind::Normal => "normal",
            ActivationKind::PositiveMean => "positive-mean",
            ActivationKind::SmallIntegers => "small-integers",
            ActivationKind::Outliers => "outliers",
            ActivationKind::Denormals => "denormals",
            ActivationKind::AllEqual => "all-equal",
            ActivationKind::ConstantRows => "constant-rows",
            ActivationKind::MixedMagnitudes => "mixed-magnitudes",
            ActivationKind::NotFinite => "not-finite",
        }
    }
}

/// `X[M, K]`, contiguous; every value is representable in
/// `dtype`. The same arguments give the same values.
pub fn activations(kind: ActivationKind, m: usize, k: usize, dtype: DType, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0xac71_4a71_0915_0000);
    let value = |i: usize, rng: &mut StdRng| match kind {
        ActivationKind::Normal => normal(rng),
        ActivationKind::PositiveMean => normal(rng) + 2.0,
        ActivationKind::SmallIntegers => rng.random_range(-2i32..=2) as f32,
        ActivationKind::Outliers if rng.random_range(0..64) == 0 => 100.0 * normal(rng),
        ActivationKind::Outliers => normal(rng),
        ActivationKind::Denormals => denormal(dtype, i, rng),
        ActivationKind::AllEqual => 0.7,
        ActivationKind::ConstantRows => 0.25 + (i / k) as f32 * 0.125,
        ActivationKind::MixedMagnitudes => normal(rng) * [1e30, 1e-30, 0.0, 1.0][i / k % 4],
        ActivationKind::NotFinite => match (i / k % 4, i % k == k / 2) {
            (1, true) => f32::INFINITY,
            (2, true) => f32::NAN,
            _ => normal(rng),
        },
    };
    let values: Vec<f32> = (0..m * k).map(|i| value(i, &mut rng)).collect();
    dtype.decode(&dtype.encode(&values))
}

/// A standard normal number (Box–Muller).
pub(crate) fn normal(rng: &mut StdRng) -> f32 {
    // 1 − u is never 0, so its logarithm is finite.
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

/// Draws what `count` calls of [`normal`] would draw.
pub(crate) fn skip_normal(count: usize, rng: &mut StdRng) {
    for _ in 0..2 * count {
        let _: f64 = rng.random();
    }
}

fn denormal(dtype: DType, i: usize, rng: &mut StdRng) -> f32 {
    let sign = if rng.random() { 1.0 } else { -1.0 };
    match dtype {
        DType::F16 => sign * rng.random_range(1..1024) as f32 * 2.0f32.powi(-24),
        DType::F32 | DType::BF16 if i.is_multiple_of(2) => normal(rng),
        DType::F32 | DType::BF16 => sign * rng.random_range(0.01f32..0.99) * f32::MIN_POSITIVE,
    }
}

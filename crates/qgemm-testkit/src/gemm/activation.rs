//! Activations and their slopes in f64.

use std::f64::consts::{PI, SQRT_2};

use qgemm_hal::{Activation, ClampedSwiglu};

/// Scales ordinary products, about 20 at K = 512, to where
/// activations bend.
pub(super) const BENT: f32 = 1.0 / 16.0;

/// Activations of gated pairs alone: the numbers of gpt-oss with a
/// limit that usual sums exceed, and those of DeepSeek V4.
pub const OF_PAIRS: [Activation; 2] = [
    Activation::ClampedSwiglu(ClampedSwiglu::new(1.702, 1.0, 0.75)),
    Activation::ClampedSwiglu(ClampedSwiglu::silu(1.5)),
];

/// `activation(v)` and its slope there, which an error of `v` is
/// multiplied by.
/// At the bend of ReLU an error may take either side, so it
/// counts as steep everywhere.
pub fn activate(activation: Activation, v: f64) -> (f64, f64) {
    match activation {
        Activation::Identity => (v, 1.0),
        // Unlike `max`, this keeps NaN.
        Activation::Relu => (if v < 0.0 { 0.0 } else { v }, 1.0),
        Activation::ReluSquared => (if v < 0.0 { 0.0 } else { v * v }, if v < 0.0 { 0.0 } else { 2.0 * v }),
        Activation::Silu => times_sigmoid(v, v, 1.0),
        Activation::GeluTanh => {
            // (1 + tanh(u)) / 2 = sigmoid(2u).
            let (factor, cubic) = (2.0 * (2.0 / PI).sqrt(), 0.044715);
            times_sigmoid(v, factor * (v + cubic * v.powi(3)), factor * (1.0 + 3.0 * cubic * v * v))
        }
        Activation::GeluErf => {
            let cdf = 0.5 * libm::erfc(-v / SQRT_2);
            let density = (-0.5 * v * v).exp() / (2.0 * PI).sqrt();
            (v * cdf, cdf + v * density)
        }
        Activation::ClampedSwiglu(ClampedSwiglu { alpha, limit, .. }) => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = if v > limit { limit } else { v };
            times_sigmoid(gate, alpha * gate, alpha)
        }
    }
}

/// Factor of the gate's value, from the up, and the energy
/// that an addend has.
pub fn of_up(activation: Activation, up: f64) -> (f64, f64) {
    let Activation::ClampedSwiglu(ClampedSwiglu { beta, limit, .. }) = activation else { return (up, 0.0) };
    let (beta, limit) = (f64::from(beta), f64::from(limit));
    // Unlike `min` and `max`, comparisons keep NaN.
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    (up + beta, beta * beta)
}

/// The steepest secant of `activation` from `v` to points within
/// three times `reach`.
/// Where the activation bends, an error of `v` grows more than
/// the slope says: near a minimum, and in exponential tails.
pub fn steepest(activation: Activation, v: f64, reach: f64) -> f64 {
    let reach = 3.0 * reach;
    let (value, _) = activate(activation, v);
    let secant = |part: f64| ((activate(activation, v + part * reach).0 - value) / (part * reach)).abs();
    [-1.0, -0.5, 0.5, 1.0].map(secant).into_iter().filter(|secant| secant.is_finite()).fold(0.0, f64::max)
}

/// The magnitude below which results of `activation` may be 0:
/// near the end of f32's normal range.
pub fn flushes(activation: Activation) -> f64 {
    match activation {
        Activation::Identity | Activation::Relu => 0.0,
        _ => 1e-35,
    }
}

/// `v · sigmoid(x)` and its slope, with `dx` the derivative of x.
fn times_sigmoid(v: f64, x: f64, dx: f64) -> (f64, f64) {
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    let slope = sigmoid + v * dx * sigmoid * (1.0 - sigmoid);
    // Where x overflows, 0 · infinity stands for a slope of 0.
    (v * sigmoid, if slope.is_finite() { slope } else { sigmoid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // From the definitions, to ten digits.
        for (activation, v, expected) in [
            (Activation::Relu, -2.0, 0.0),
            (Activation::Silu, 1.0, 0.731_058_578_6),
            (Activation::Silu, -3.0, -0.142_277_619_8),
            (Activation::GeluTanh, 1.0, 0.841_191_990_6),
            (Activation::GeluErf, 1.0, 0.841_344_746_1),
            (Activation::GeluErf, -2.0, -0.045_500_263_9),
            (Activation::ReluSquared, -2.0, 0.0),
            (Activation::ReluSquared, 3.0, 9.0),
            (OF_PAIRS[1], -3.0, -0.142_277_619_8),
            // SiLU of 1.5, the limit.
            (OF_PAIRS[1], 1e9, 1.226_361_713_9),
        ] {
            let (got, _) = activate(activation, v);
            assert!((got - expected).abs() < 1e-9, "{activation:?}({v}) is {got}");
        }
    }

    #[test]
    fn slopes_are_those_of_the_values() {
        use Activation::{GeluErf, GeluTanh, Identity, ReluSquared, Silu};
        for activation in [Identity, Silu, GeluTanh, GeluErf, ReluSquared] {
            for i in -80..=80 {
                let (v, h) = (f64::from(i) / 8.0, 1e-6);
                let secant = (activate(activation, v + h).0 - activate(activation, v - h).0) / (2.0 * h);
                let (_, slope) = activate(activation, v);
                // The slope of ReLU² bends at 0.
                assert!((secant - slope).abs() < h, "{activation:?} at {v}: {secant} and {slope}");
            }
        }
    }

    #[test]
    fn ups_are_clamped_and_keep_nan() {
        let of = |up| of_up(OF_PAIRS[0], up).0;
        assert_eq!([-9.0, -0.5, 0.5, f64::INFINITY].map(of), [0.25, 0.5, 1.5, 1.75]);
        assert!(of(f64::NAN).is_nan() && activate(OF_PAIRS[0], f64::NAN).0.is_nan());
        assert_eq!(of_up(Activation::Silu, -9.0), (-9.0, 0.0));
    }

    #[test]
    fn secants_see_bends() {
        // SiLU is flat at its minimum, and e times as large at -50 as at -51.
        let (minimum, reach) = (-1.278_464_542_761_074, 0.1);
        assert!(activate(Activation::Silu, minimum).1.abs() < 1e-9);
        assert!(steepest(Activation::Silu, minimum, reach) > 0.03);
        let (value, slope) = activate(Activation::Silu, -50.0);
        assert!(steepest(Activation::Silu, -50.0, 1.0) > 5.0 * slope.abs() && slope.abs() < 1.1 * value.abs());
        assert_eq!(steepest(Activation::Silu, f64::NAN, 1.0), 0.0);
        assert_eq!(steepest(Activation::Identity, 3.0, 0.0), 0.0);
        assert!((steepest(Activation::Identity, 3.0, 2.0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn values_and_slopes_are_finite() {
        for activation in Activation::ALL.into_iter().chain(OF_PAIRS) {
            for v in [-1e30, -1e6, 0.0, 1e6, 1e30] {
                let (value, slope) = activate(activation, v);
                assert!(value.is_finite() && slope.is_finite(), "{activation:?}({v}) is {value}, slope {slope}");
            }
        }
    }
}

//! Activations and their slopes in f64.

use std::f64::consts::{PI, SQRT_2};

use qgemm_hal::Activation;

/// `activation(v)` and its slope there, which an error of `v` is
/// multiplied by.
/// At the bend of ReLU an error may take either side, so it
/// counts as steep everywhere.
pub fn activate(activation: Activation, v: f64) -> (f64, f64) {
    match activation {
        Activation::Identity => (v, 1.0),
        // Unlike `max`, this keeps NaN.
        Activation::Relu => (if v < 0.0 { 0.0 } else { v }, 1.0),
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
    }
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
        Activation::Silu | Activation::GeluTanh | Activation::GeluErf => 1e-35,
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
        ] {
            let (got, _) = activate(activation, v);
            assert!((got - expected).abs() < 1e-9, "{activation:?}({v}) is {got}");
        }
    }

    #[test]
    fn slopes_are_those_of_the_values() {
        for activation in [Activation::Identity, Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            for i in -80..=80 {
                let (v, h) = (f64::from(i) / 8.0, 1e-6);
                let secant = (activate(activation, v + h).0 - activate(activation, v - h).0) / (2.0 * h);
                let (_, slope) = activate(activation, v);
                assert!((secant - slope).abs() < 1e-7, "{activation:?} at {v}: {secant} and {slope}");
            }
        }
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
        for activation in Activation::ALL {
            for v in [-1e30, -1e6, 0.0, 1e6, 1e30] {
                let (value, slope) = activate(activation, v);
                assert!(value.is_finite() && slope.is_finite(), "{activation:?}({v}) is {value}, slope {slope}");
            }
        }
    }
}

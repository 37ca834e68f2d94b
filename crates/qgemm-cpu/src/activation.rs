//! Functions applied to what has been added up, in f32.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use qgemm_hal::Activation;

/// `activation(v)`.
pub fn activate(activation: Activation, v: f32) -> f32 {
    match activation {
        Activation::Identity => v,
        // Not `max`, which makes a number of NaN.
        Activation::Relu if v < 0.0 => 0.0,
        Activation::Relu => v,
        Activation::Silu => times_sigmoid(v, v),
        // (1 + tanh(u)) / 2 is the sigmoid of 2u, which does not cancel; √(2/π) is 2/√π · 1/√2.
        Activation::GeluTanh => times_sigmoid(v, SQRT_2 * FRAC_2_SQRT_PI * (v + 0.044715 * v * v * v)),
        Activation::GeluErf => 0.5 * v * libm::erfcf(-v * FRAC_1_SQRT_2),
    }
}

fn times_sigmoid(v: f32, x: f32) -> f32 {
    v / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_formulas_in_f64() {
        let exact = |activation, v: f64| match activation {
            Activation::Identity => v,
            Activation::Relu => v.max(0.0),
            Activation::Silu => v / (1.0 + (-v).exp()),
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3));
                v / (1.0 + (-2.0 * u).exp())
            }
            Activation::GeluErf => 0.5 * v * libm::erfc(-v / 2f64.sqrt()),
        };
        for activation in Activation::ALL {
            for i in -1200..=1200 {
                let v = i as f32 / 100.0;
                let (got, expected) = (f64::from(activate(activation, v)), exact(activation, f64::from(v)));
                // Where v is −12, its product with itself, rounded, is in the exponent.
                let limit = 1e-5 * expected.abs() + 1e-37;
                assert!((got - expected).abs() <= limit, "{activation:?}({v}) is {got:e}, expected {expected:e}");
            }
        }
    }

    #[test]
    fn large_values_and_nan_pass() {
        for activation in Activation::ALL.into_iter().filter(|a| *a != Activation::Identity) {
            assert_eq!(activate(activation, 1e30), 1e30, "{activation:?}");
            assert_eq!(activate(activation, -1e6), 0.0, "{activation:?}");
            assert!(activate(activation, f32::NAN).is_nan(), "{activation:?}");
        }
    }
}

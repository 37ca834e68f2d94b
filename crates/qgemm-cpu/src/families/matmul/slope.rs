//! Derivatives of the activations, one value at a time. The
//! multiply-adds before dominate the time.

use qgemm_hal::Activation;

/// The derivative of `activation` at `v`, within 2·10⁻⁷ of its maximum.
pub fn slope(activation: Activation, v: f32) -> f32 {
    match activation {
        Activation::Identity => 1.0,
        // NaN stays NaN.
        Activation::Relu if v.is_nan() => v,
        Activation::Relu => f32::from(u8::from(v > 0.0)),
        Activation::ReluSquared if v < 0.0 => 0.0,
        Activation::ReluSquared => 2.0 * v,
        Activation::Silu => of_product(v, v, 1.0),
        Activation::GeluTanh => {
            // (1 + tanh(u)) / 2 is the sigmoid of 2u.
            const FACTOR: f32 = 1.595_769;
            const CUBIC: f32 = 0.044_715;
            let v = within(v);
            of_product(v, FACTOR * (v + CUBIC * v * v * v), FACTOR * (1.0 + 3.0 * CUBIC * v * v))
        }
        Activation::GeluErf => {
            const DENSITY: f32 = 0.398_942_3;
            let v = within(v);
            let e = (-0.5 * v * v).exp();
            normal_cdf(v, e) + v * DENSITY * e
        }
        // The API refuses it without a pair.
        Activation::ClampedSwiglu(_) => f32::NAN,
    }
}

/// Beyond 64, slopes are 0 or 1 in f32, and powers
/// stay within its range.
fn within(v: f32) -> f32 {
    v.clamp(-64.0, 64.0)
}

/// Derivative of `v · sigmoid(x)`, where x grows
/// `dx` times as fast as v.
fn of_product(v: f32, x: f32, dx: f32) -> f32 {
    let v = within(v);
    let sigmoid = |x: f32| {
        let e = (-x.abs()).exp();
        (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
    };
    sigmoid(x) + v * dx * sigmoid(x) * sigmoid(-x)
}

/// Normal distribution function, with `e = exp(-v² / 2)`. The polynomial
/// is that of the SIMD kernels (`simd/activation.rs`).
fn normal_cdf(v: f32, e: f32) -> f32 {
    const POLYNOMIAL: [f32; 9] = [
        0.072_639_68,
        -0.390_246_42,
        0.684_632_5,
        -0.386_718_9,
        0.427_957_62,
        0.126_142_56,
        0.241_572_8,
        0.223_938_85,
        8.121_467e-5,
    ];
    let t = 1.0 / (1.0 + 0.282_842_7 * v.abs());
    let tail = 0.5 * e * POLYNOMIAL.iter().fold(0.0, |sum, coefficient| sum * t + coefficient);
    if v < 0.0 { tail } else { 1.0 - tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_functions() {
        let value = |activation, v: f64| match activation {
            Activation::Silu => v / (1.0 + (-v).exp()),
            Activation::GeluTanh => {
                0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh())
            }
            Activation::ReluSquared => v.max(0.0).powi(2),
            _ => v.max(0.0),
        };
        for activation in [Activation::Relu, Activation::ReluSquared, Activation::Silu, Activation::GeluTanh] {
            for i in -79..80 {
                let (v, h) = (f64::from(i) / 8.0 + 0.01, 1e-6);
                let secant = (value(activation, v + h) - value(activation, v - h)) / (2.0 * h);
                let got = f64::from(slope(activation, v as f32));
                assert!((got - secant).abs() < 1e-6 * secant.abs().max(1.0), "{activation:?} at {v}: {got}, {secant}");
            }
        }
        assert!((slope(Activation::GeluErf, 1.0) - 1.083_315_5).abs() < 1e-6);
        for activation in Activation::ALL {
            let most = if activation == Activation::ReluSquared { f32::INFINITY } else { 1.0 };
            assert_eq!(slope(activation, f32::INFINITY), most, "{activation:?}");
            assert!(
                activation == Activation::Identity || slope(activation, f32::NEG_INFINITY) == 0.0,
                "{activation:?}"
            );
        }
    }
}

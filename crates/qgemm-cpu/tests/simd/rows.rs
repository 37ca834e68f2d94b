//! Convolutions and gates at every level.

use qgemm_cpu::simd::Taps;
use qgemm_hal::{GateFunction, SimdLevel};

use super::*;

/// Numbers from −8 to 8.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut word = words(seed);
    (0..count).map(|_| word() as f32 / (1 << 20) as f32 - 8.0).collect()
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

fn check(level: SimdLevel, got: f32, expected: f64) {
    assert!(
        (f64::from(got) - expected).abs() <= 2e-5 * (1.0 + expected.abs()),
        "{level:?}: {got}, expected {expected}"
    );
}

#[test]
fn a_token_is_the_weighted_sum_of_its_window() {
    let (pitch, count) = (48, 32);
    let (inputs, bias) = (numbers(1, 4 * pitch), numbers(2, pitch));
    for (width, silu) in [(2, false), (3, true), (4, true)] {
        let weights = numbers(3, width * pitch);
        let taps = Taps { weights: &weights, bias: &bias, width, pitch, silu };
        for simd in levels() {
            let mut out = vec![0.0; count];
            simd.convolve(&taps, &inputs, &mut out);
            for (i, &got) in out.iter().enumerate() {
                let products =
                    (0..width).map(|tap| f64::from(weights[tap * pitch + i]) * f64::from(inputs[tap * pitch + i]));
                let sum = f64::from(bias[i]) + products.sum::<f64>();
                check(simd.level(), got, if silu { sum * sigmoid(sum as f32) } else { sum });
            }
        }
    }
}

#[test]
fn every_value_has_its_gate() {
    for count in [0, 1, 15, 16, 17, 40] {
        let (z, values) = (numbers(4, count), numbers(5, count));
        for simd in levels() {
            for function in GateFunction::ALL {
                let mut out = values.clone();
                simd.gate(function, &z, &mut out);
                for ((&got, &value), &z) in out.iter().zip(&values).zip(&z) {
                    let factor = if function == GateFunction::Silu { f64::from(z) } else { 1.0 };
                    check(simd.level(), got, f64::from(value) * factor * sigmoid(z));
                }
            }
        }
    }
}

//! Epilogue tests.

use qgemm_cpu::simd::{BLOCK_ROWS, Epilogue, OfRows, OfToken};
use qgemm_hal::{Activation, ClampedSwiglu};

use super::*;

#[test]
fn every_level_computes_activations_as_their_formulas_say() {
    let exact = |activation, v: f64| match activation {
        Activation::Identity => v,
        Activation::Relu => v.max(0.0),
        Activation::Silu => v / (1.0 + (-v).exp()),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3));
            v / (1.0 + (-2.0 * u).exp())
        }
        Activation::GeluErf => 0.5 * v * libm::erfc(-v / 2f64.sqrt()),
        Activation::ReluSquared => v.max(0.0).powi(2),
        Activation::ClampedSwiglu(_) => panic!("of pairs"),
    };
    let values: Vec<f32> = (-1280..1280).map(|i| i as f32 / 100.0).collect();
    for simd in levels() {
        for activation in Activation::ALL {
            let (mut error, mut size) = (0.0, 0.0);
            for values in values.as_chunks().0 {
                let mut outputs: OfRows = *values;
                simd.finish(&Epilogue { activation, ..PLAIN }, &OF_TOKEN, &mut outputs);
                for (&v, got) in values.iter().zip(outputs) {
                    let expected = exact(activation, f64::from(v));
                    let off = (f64::from(got) - expected).abs();
                    // At v = −10 the exponent contains the
                    // rounded square of v.
                    let limit = if v < -3.0 { 2e-5 } else { 1e-6 } * expected.abs() + 1e-35;
                    assert!(off <= limit, "{:?} {activation:?}({v}) is {got:e}, expected {expected:e}", simd.level());
                    (error, size) = (error + off * off, size + expected * expected);
                }
            }
            assert!(error <= 1e-14 * size, "{:?} {activation:?}: {:e}", simd.level(), error / size);
        }
    }
}

#[test]
fn large_values_and_nan_pass_activations() {
    for simd in levels() {
        for activation in Activation::ALL.into_iter().filter(|a| *a != Activation::Identity) {
            let mut outputs = [0.0; BLOCK_ROWS];
            // NaN of both signs, because CPUs produce negative ones.
            outputs[..6].copy_from_slice(&[1e30, -1e6, f32::NAN, -f32::NAN, f32::INFINITY, -1e30]);
            simd.finish(&Epilogue { activation, ..PLAIN }, &OF_TOKEN, &mut outputs);
            let what = format!("{:?} {activation:?}: {:?}", simd.level(), &outputs[..6]);
            let large = if activation == Activation::ReluSquared { f32::INFINITY } else { 1e30 };
            assert_eq!((outputs[0], outputs[1]), (large, 0.0), "{what}");
            assert!(outputs[2].is_nan() && outputs[3].is_nan(), "{what}");
            assert_eq!((outputs[4], outputs[5]), (f32::INFINITY, 0.0), "{what}");
        }
    }
}

#[test]
fn clamped_swiglu_is_as_its_formula_says_and_keeps_nan() {
    let swiglu = ClampedSwiglu::new(1.702, 1.0, 7.0);
    let how = Epilogue { activation: Activation::ClampedSwiglu(swiglu), gated: true, ..PLAIN };
    let values = [-1e30, -40.0, -7.5, -1.0, 0.0, 0.5, 6.9, 7.0, 9.0, f32::INFINITY];
    let exact = |gate: f64, up: f64| {
        let g = gate.min(7.0);
        (up.clamp(-7.0, 7.0) + 1.0) * g / (1.0 + (-f64::from(1.702f32) * g).exp())
    };
    for simd in levels() {
        for gate in values {
            for up in values {
                let mut outputs: OfRows = std::array::from_fn(|row| if row % 16 < 8 { gate } else { up });
                simd.finish(&how, &OF_TOKEN, &mut outputs);
                let expected = exact(gate.into(), up.into());
                let off = (f64::from(outputs[BLOCK_ROWS / 2 - 1]) - expected).abs();
                assert!(off <= 1e-6 * expected.abs() + 1e-30, "{:?} {gate} {up}: {}", simd.level(), outputs[0]);
            }
        }
        // The gate, then the up is NaN.
        for nan in [0, 1] {
            let of = |row: usize| if row % 16 / 8 == nan { f32::NAN } else { 1.0 };
            let mut outputs: OfRows = std::array::from_fn(of);
            simd.finish(&how, &OF_TOKEN, &mut outputs);
            assert!(outputs[..BLOCK_ROWS / 2].iter().all(|d| d.is_nan()), "{:?} {nan}", simd.level());
        }
    }
}

#[test]
fn every_level_finishes_accumulators_as_the_epilogue_says() {
    let mut word = words(33);
    let mut numbers = || -> OfRows { std::array::from_fn(|_| word() as f32 / (1 << 23) as f32 - 1.0) };
    let [sums, row_scale, bias, c, residual] = [(); 5].map(|()| numbers());
    let exact = |activation, v: f64| match activation {
        Activation::Silu => v / (1.0 + (-v).exp()),
        _ => v,
    };
    for (gated, activation, bits) in
        (0..64).map(|i| (i % 2 == 1, [Activation::Identity, Activation::Silu][i / 2 % 2], i / 4))
    {
        let given = |bit: usize, of_rows| (bits >> bit & 1 == 1).then_some(of_rows);
        let how = Epilogue {
            alpha: -0.75,
            beta: 1.5,
            row_scale: given(0, &row_scale),
            bias: given(1, &bias),
            activation,
            gated,
        };
        let token = OfToken { scale: 3.0, c: given(2, &c).filter(|_| !gated), residual: given(3, &residual) };
        let number = |of_rows: Option<&OfRows>, i: usize, absent| of_rows.map_or(absent, |rows| f64::from(rows[i]));
        let v = |row: usize| {
            -2.25 * f64::from(sums[row]) * number(how.row_scale, row, 1.0)
                + 1.5 * number(token.c, row, 0.0)
                + number(how.bias, row, 0.0)
        };
        for simd in levels() {
            let mut outputs = sums;
            simd.finish(&how, &token, &mut outputs);
            for (i, &got) in outputs[..if gated { BLOCK_ROWS / 2 } else { BLOCK_ROWS }].iter().enumerate() {
                let value = match gated {
                    // Eight features of the gate, then their ups.
                    true => exact(activation, v(i / 8 * 16 + i % 8)) * v(i / 8 * 16 + 8 + i % 8),
                    false => exact(activation, v(i)),
                };
                let expected = value + number(token.residual, i, 0.0);
                let what = format!("{:?} {how:?} {token:?} output {i}", simd.level());
                assert!((f64::from(got) - expected).abs() <= 2e-6, "{got} for {expected}: {what}");
            }
        }
    }
}

/// An epilogue that keeps accumulators unchanged.
const PLAIN: Epilogue<'_> =
    Epilogue { alpha: 1.0, beta: 0.0, row_scale: None, bias: None, activation: Activation::Identity, gated: false };
const OF_TOKEN: OfToken<'_> = OfToken { scale: 1.0, c: None, residual: None };

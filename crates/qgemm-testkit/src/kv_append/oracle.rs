//! Head norm, rotary embedding and Hadamard rotation in f64, from their
//! definitions.

use std::f64::consts::TAU;

use qgemm_api::RotaryScaling;
use qgemm_hal::RotaryPairs;

use super::case::{KvAppendCase, RotaryCase};

/// Cosine and sine of every pair at a position, with the
/// attention factor; `None` past the tables.
pub(super) fn angles(case: &KvAppendCase, position: u32, tables: &[Vec<f32>; 2]) -> Option<Vec<(f64, f64)>> {
    let Some(rotary) = &case.rotary else { return Some(Vec::new()) };
    let pairs = 0..rotary.dim / 2;
    if let Some(positions) = rotary.tables {
        let at = |pair| position as usize * rotary.table_row() + pair;
        let of_pair = |pair| (f64::from(tables[0][at(pair)]), f64::from(tables[1][at(pair)]));
        return ((position as usize) < positions).then(|| pairs.map(of_pair).collect());
    }
    let amplitude = match rotary.scaling {
        RotaryScaling::Yarn { factor, .. } => f64::from((0.1 * factor.ln() + 1.0) as f32),
        _ => 1.0,
    };
    // The inverse undoes the amplitude, too.
    let amplitude = if rotary.inverse { 1.0 / amplitude } else { amplitude };
    let of_pair = |pair| {
        let (sin, cos) = (f64::from(position) * frequency(rotary, pair)).sin_cos();
        (cos * amplitude, sin * amplitude)
    };
    Some(pairs.map(of_pair).collect())
}

/// Radians per position, from the papers and reference
/// implementations.
fn frequency(rotary: &RotaryCase, pair: usize) -> f64 {
    let (dim, base) = (rotary.dim as f64, rotary.base);
    let plain = 1.0 / base.powf(2.0 * pair as f64 / dim);
    match rotary.scaling {
        RotaryScaling::Linear { factor } => plain / factor,
        RotaryScaling::Llama3 { factor, low, high, original } => {
            let (original, wavelength) = (original as f64, TAU / plain);
            if wavelength < original / high {
                plain
            } else if wavelength > original / low {
                plain / factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * plain / factor + smooth * plain
            }
        }
        RotaryScaling::Yarn { factor, fast, slow, original, truncate } => {
            let of_turns = |turns: f64| dim * (original as f64 / (turns * TAU)).ln() / (2.0 * base.ln());
            let ends = match truncate {
                true => (of_turns(fast).floor(), of_turns(slow).ceil()),
                false => (of_turns(fast), of_turns(slow)),
            };
            let (first, last) = (ends.0.max(0.0), ends.1.min(dim - 1.0));
            let ramp = ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0);
            plain / factor * ramp + plain * (1.0 - ramp)
        }
        _ => plain,
    }
}

/// Features, and the energy of each one's summands.
type Head = (Vec<f64>, Vec<f64>);

/// A query or a key after its norm and rotations. Without a norm, `gamma` is empty.
pub(super) fn rotated(case: &KvAppendCase, angles: &[(f64, f64)], gamma: &[f32], head: &[f32]) -> Head {
    let given = |head: &[f32]| case.head_norm.map_or_else(|| given(head), |(eps, _)| normed(head, gamma, eps));
    let hadamard = |head: Head| if case.hadamard[0] { hadamard(head) } else { head };
    match &case.rotary {
        None => hadamard(given(head)),
        Some(rotary) if rotary.inverse => rotary_embedding(rotary, angles, hadamard(given(head))),
        Some(rotary) => hadamard(rotary_embedding(rotary, angles, given(head))),
    }
}

/// A value after its rotation.
pub(super) fn rotated_value(case: &KvAppendCase, head: &[f32]) -> Head {
    if case.hadamard[1] { hadamard(given(head)) } else { given(head) }
}

fn normed(head: &[f32], gamma: &[f32], eps: f32) -> Head {
    let squares: f64 = head.iter().map(|&value| f64::from(value).powi(2)).sum();
    let root = (squares / head.len() as f64 + f64::from(eps)).sqrt();
    let of_pair = |(&value, &gamma): (&f32, &f32)| f64::from(value) / root * f64::from(gamma);
    head.iter().zip(gamma).map(of_pair).map(|value| (value, value.powi(2))).unzip()
}

fn given(head: &[f32]) -> Head {
    head.iter().map(|&value| (f64::from(value), f64::from(value).powi(2))).unzip()
}

/// Rotary embedding of a head, with the energy of each value.
fn rotary_embedding(rotary: &RotaryCase, angles: &[(f64, f64)], (mut values, mut energy): Head) -> Head {
    for (pair, &(cos, sin)) in angles.iter().enumerate() {
        let (first, second) = match rotary.pairs {
            RotaryPairs::Neox => (pair, pair + rotary.dim / 2),
            RotaryPairs::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let sin = if rotary.inverse { -sin } else { sin };
        let (a, b) = (values[first], values[second]);
        (values[first], values[second]) = (a * cos - b * sin, a * sin + b * cos);
        let (a, b) = (energy[first], energy[second]);
        energy[first] = a * cos.powi(2) + b * sin.powi(2);
        energy[second] = a * sin.powi(2) + b * cos.powi(2);
    }
    (values, energy)
}

/// Product with the orthonormal Walsh–Hadamard matrix. The sign of entry
/// `(i, j)` is the parity of the ones in `i & j`.
fn hadamard((values, energy): Head) -> Head {
    let block = (1..=values.len()).rev().find(|n| n.is_power_of_two() && values.len().is_multiple_of(*n)).unwrap_or(1);
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let product = |values: &[f64]| -> Vec<f64> {
        let of_row = |i| values.iter().enumerate().map(|(j, value)| sign(i, j) * value).sum::<f64>();
        (0..block).map(|i| of_row(i) / (block as f64).sqrt()).collect()
    };
    let mean = |energy: &[f64]| vec![energy.iter().sum::<f64>() / block as f64; block];
    (values.chunks(block).flat_map(product).collect(), energy.chunks(block).flat_map(mean).collect())
}

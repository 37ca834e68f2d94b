//! Norms in f64.

use qgemm_api::{GateFunction, NormFunction, NormKind};

use super::case::{NormCase, NormGateCase};
use crate::expected::Expected;

/// Error of f32 statistics, relative to a row's largest value:
/// the rest of a mean's rounding after its correction.
/// It matters only if a row's values are nearly equal.
const CENTERING: f64 = 1.0 / (1u64 << 40) as f64;

/// A normalized row without gamma and beta, and the largest
/// effect of a centering error.
fn normalized(function: &NormFunction, row: &[f64]) -> (Vec<f64>, f64) {
    let count = row.len() as f64;
    let values = || row.iter().copied();
    let mean = if function.kind == NormKind::Layer { values().sum::<f64>() / count } else { 0.0 };
    let squares: f64 = values().map(|value| (value - mean) * (value - mean)).sum();
    let inverse = 1.0 / (squares / count + f64::from(function.eps)).sqrt();
    let largest = values().map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let floor = if function.kind == NormKind::Layer { largest * inverse * CENTERING } else { 0.0 };
    (values().map(|value| (value - mean) * inverse).collect(), floor)
}

/// `function` applied to a row: `gamma · y + beta`.
///
/// # Panics
/// When the numbers of gammas, betas and values differ.
pub fn normalized_row(function: &NormFunction, row: &[f32], gamma: &[f32], beta: &[f32]) -> Vec<f64> {
    assert!(gamma.len() == row.len() && beta.len() == row.len(), "gamma and beta are of columns");
    let row: Vec<f64> = row.iter().map(|&value| f64::from(value)).collect();
    let (values, _) = normalized(function, &row);
    let of_columns = gamma.iter().zip(beta);
    values.iter().zip(of_columns).map(|(y, (&gamma, &beta))| y * f64::from(gamma) + f64::from(beta)).collect()
}

/// Activation of a gate.
fn gate_of(function: GateFunction, z: f32) -> f64 {
    let z = f64::from(z);
    let sigmoid = 1.0 / (1.0 + (-z).exp());
    if function == GateFunction::Sigmoid { sigmoid } else { z * sigmoid }
}

/// Correct result for the normalized rows: X, or the sum as it
/// was written.
pub(super) fn expected(case: &NormCase, x: &[f32], z: &[f32], gamma: &[f32], beta: &[f32]) -> Expected {
    let (columns, of_group) = (case.columns, case.columns / case.groups);
    let gates: Vec<f64> = match case.gate {
        Some(NormGateCase { function, .. }) => z.iter().map(|&z| gate_of(function, z)).collect(),
        None => vec![1.0; x.len()],
    };
    let is_before = case.gate.is_some_and(|gate| gate.before);
    let inputs: Vec<f64> =
        x.iter().zip(&gates).map(|(&x, gate)| f64::from(x) * if is_before { *gate } else { 1.0 }).collect();
    let (mut values, mut energy, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    for (group, row) in inputs.chunks_exact(of_group).enumerate() {
        let (normalized, floor) = normalized(&case.function, row);
        for (i, y) in normalized.into_iter().enumerate() {
            let at = group * of_group + i;
            let (gamma, beta) = (f64::from(gamma[at % columns]), f64::from(beta[at % columns]));
            let gate = if is_before { 1.0 } else { gates[at] };
            let (scaled, beta) = (y * gamma * gate, beta * gate);
            values.push(scaled + beta);
            // `scaled` and `beta` may cancel.
            let own = scaled * scaled + beta * beta;
            energy.push(if own.is_finite() { own } else { 0.0 });
            floors.push(if floor.is_finite() { floor * (gamma * gate).abs() } else { 0.0 });
        }
    }
    Expected { m: x.len() / columns, n: columns, values, energy, floor: floors }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_norm_that_formulas_say() {
        let rms = NormFunction::rms(0.0);
        assert_eq!(normalized_row(&rms, &[3.0, -3.0], &[1.0, 2.0], &[0.0, 1.0]), [1.0, -1.0]);
        let layer = NormFunction::layer(0.0);
        assert_eq!(normalized_row(&layer, &[11.0, 9.0], &[1.0, 2.0], &[0.5, 0.0]), [1.5, -2.0]);
        assert_eq!(normalized_row(&NormFunction::layer(1e-5), &[7.0; 4], &[1.0; 4], &[0.25; 4]), [0.25; 4]);
        let not_finite = normalized_row(&rms, &[1.0, f32::INFINITY], &[1.0; 2], &[0.0; 2]);
        assert!(not_finite[0] == 0.0 && not_finite[1].is_nan());
    }
}

//! Oracle of MoE GEMM: that of `gemm` for each expert's rows,
//! then the weighted sum of slots.

use super::case::ExpertCase;
use super::index::Index;
use crate::expected::Expected;
use crate::gemm::host::{HostOperands, HostWeights};
use crate::gemm::{Added, Resolution};

/// Correct values of the rows that have experts.
pub(super) struct ExpectedRows {
    /// The rows of D that are written.
    pub rows: Vec<usize>,
    /// Whether the sum over slots is rounded on the way, because a
    /// slot's value, its weighted value or a partial sum is not an
    /// f32 number.
    pub rounded: Vec<bool>,
    /// Values of the rows, one after another.
    pub values: Expected,
}

/// Outputs of a row, with energy and floor.
type Row = [Vec<f64>; 3];

/// The products of all rows with their experts. `round` rounds
/// the X of some rows as the kernel does for an expert.
pub(super) fn multiply(
    case: &ExpertCase,
    weights: &[HostWeights],
    operands: &HostOperands,
    biases: &[Vec<f32>],
    index: &Index,
    resolution: Resolution,
    round: impl Fn(usize, &HostOperands) -> Vec<f64>,
) -> ExpectedRows {
    let n = case.each.n;
    let mut all: Vec<Option<Row>> = vec![None; case.each.m];
    for (expert, weight) in weights.iter().enumerate() {
        let rows: Vec<usize> = (0..case.each.m).filter(|&row| index.owner[row] == Some(expert)).collect();
        if rows.is_empty() {
            continue;
        }
        let own = operands.rows(&case.each, &rows, |row| case.x_row(row));
        let own_x = round(expert, &own);
        let mut added = own.added(&case.each, resolution);
        added.bias = case.each.epilogue.bias.map(|_| &*biases[expert]);
        if case.summed() > 1 || !index.router_weights.is_empty() {
            added = Added { residual: None, ..added };
        }
        let product = weight.multiply(&own_x, &added);
        for (i, &row) in rows.iter().enumerate() {
            let part = |values: &[f64]| values[i * n..][..n].to_vec();
            all[row] = Some([&product.values, &product.energy, &product.floor].map(|values| part(values)));
        }
    }
    match index.router_weights.is_empty() {
        true => {
            let rows: Vec<usize> = (0..case.each.m).filter(|&row| all[row].is_some()).collect();
            let of_all = |part: usize| all.iter().flatten().flat_map(|row| row[part].iter().copied()).collect();
            let values = Expected { m: rows.len(), n, values: of_all(0), energy: of_all(1), floor: of_all(2) };
            ExpectedRows { rows, rounded: vec![false; values.values.len()], values }
        }
        false => combine(case, index, &all, &operands.residual),
    }
}

/// Sums of every token's slots, plus the residual, which has a
/// row per token.
fn combine(case: &ExpertCase, index: &Index, all: &[Option<Row>], residual: &[f32]) -> ExpectedRows {
    let (n, top_k) = (case.each.n, case.summed());
    let tokens = case.each.m / top_k;
    let zeros = vec![0.0; tokens * n];
    let mut rounded = vec![false; tokens * n];
    let mut sums = Expected { m: tokens, n, values: zeros.clone(), energy: zeros.clone(), floor: zeros };
    for (slot, product) in all.iter().enumerate() {
        let weight = f64::from(index.router_weights[slot]);
        let Some([values, energy, floor]) = product.as_ref().filter(|_| !weight.is_nan()) else { continue };
        let first = slot / top_k * n;
        for column in 0..n {
            let term = weight * values[column];
            sums.values[first + column] += term;
            let steps = [values[column], term, sums.values[first + column]];
            rounded[first + column] |= steps.iter().any(|&step| f64::from(step as f32) != step);
            sums.energy[first + column] += weight * weight * energy[column];
            sums.floor[first + column] += weight.abs() * floor[column];
        }
    }
    for (at, residual) in residual.iter().take(tokens * n).enumerate() {
        let residual = f64::from(*residual);
        sums.values[at] += residual;
        sums.energy[at] += residual * residual;
    }
    ExpectedRows { rows: (0..tokens).collect(), rounded, values: sums }
}

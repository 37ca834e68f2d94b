//! The oracle of `merge_attention`, in f64.

use super::case::MergeAttentionCase;
use crate::expected::Expected;

/// Merged rows: results with the magnitude of their summands, and
/// log-sum-exps.
pub(super) struct Merged {
    pub d: Expected,
    pub lse: Vec<f64>,
}

/// Merges `partial`, `[parts, rows, dim]`, by `log_sums`, `[parts, rows]`.
pub(super) fn merge(case: &MergeAttentionCase, partial: &[f32], log_sums: &[f32]) -> Merged {
    let (rows, dim) = (case.rows(), case.dim);
    let (mut values, mut energy) = (vec![0.0; rows * dim], vec![0.0; rows * dim]);
    let lse = (0..rows).map(|row| {
        let of_part = |part: usize| f64::from(log_sums[part * rows + row]);
        let columns = row * dim..(row + 1) * dim;
        let most = (0..case.parts).map(of_part).fold(f64::NEG_INFINITY, f64::max);
        if most == f64::INFINITY || (0..case.parts).any(|part| of_part(part).is_nan()) {
            values[columns].fill(f64::NAN);
            return f64::NAN;
        }
        if most == f64::NEG_INFINITY {
            return most;
        }
        let weight = |part: usize| (of_part(part) - most).exp();
        let sum: f64 = (0..case.parts).map(weight).sum();
        for part in (0..case.parts).filter(|&part| weight(part) > 0.0) {
            let share = weight(part) / sum;
            let numbers = &partial[(part * rows + row) * dim..][..dim];
            for ((value, energy), number) in
                values[columns.clone()].iter_mut().zip(&mut energy[columns.clone()]).zip(numbers)
            {
                let product = share * f64::from(*number);
                *value += product;
                *energy += product * product;
            }
        }
        most + sum.ln()
    });
    let lse = lse.collect();
    let floor = vec![0.0; rows * dim];
    Merged { d: Expected { m: rows, n: dim, values, energy, floor }, lse }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_weighed_means() {
        let case = MergeAttentionCase::new(2, [3, 1, 8]);
        let partial: Vec<f32> = (0..48).map(|i| if i < 24 { 1.0 } else { f32::NAN }).collect();
        let none = f32::NEG_INFINITY;
        // Row 0 has one part, row 1 none, row 2 a NaN.
        let merged = merge(&case, &partial, &[2.5, none, f32::NAN, none, none, 1.0]);
        assert!(merged.d.values[..8] == [1.0; 8] && merged.d.values[8..16] == [0.0; 8]);
        assert!(merged.d.values[16..].iter().all(|value| value.is_nan()) && merged.lse[2].is_nan());
        assert_eq!(merged.lse[..2], [2.5, f64::NEG_INFINITY]);
        let equal = merge(&case, &[[1.0; 24], [3.0; 24]].concat(), &[0.5; 6]);
        assert!(equal.d.values.iter().all(|&value| value == 2.0) && equal.lse[0] == 0.5 + 2f64.ln());
    }
}

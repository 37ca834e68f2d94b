//! Softmax state of a row, and how states are combined.

/// Online softmax state of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Softmax {
    /// row_max: the largest score.
    pub row_max: f32,
    /// row_sum: the sum of `exp(score − row_max)`.
    pub row_sum: f32,
}

impl Softmax {
    /// The state without keys.
    pub const NONE: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// Adds keys whose largest score, with those before, is `row_max` and
    /// whose weights sum to `sum`; rescales the sums so far.
    pub fn add_keys(&mut self, sums: &mut [f32], row_max: f32, sum: f32) {
        let rescale = (self.row_max - row_max).exp();
        *self = Self { row_max, row_sum: self.row_sum * rescale + sum };
        if rescale != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= rescale);
        }
    }

    /// Merges the state and values of further keys into `self` and
    /// `sums`. The other state has a finite maximum or NaN.
    pub fn merge(&mut self, sums: &mut [f32], other: Self, values: &[f32]) {
        if other.row_sum == 0.0 {
            return;
        }
        let most = self.row_max.max(other.row_max);
        let rescale = if self.row_sum == 0.0 { 0.0 } else { (self.row_max - most).exp() };
        let added = (other.row_max - most).exp();
        *self = Self { row_max: most, row_sum: self.row_sum * rescale + other.row_sum * added };
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = *sum * rescale + value * added);
    }

    /// Adds a sink: a score whose value is zero.
    pub fn add_sink(&mut self, sums: &mut [f32], sink: f32) {
        if sink == f32::NEG_INFINITY {
            return;
        }
        let row_max = self.row_max.max(sink);
        self.add_keys(sums, row_max, (sink - row_max).exp());
    }

    /// Normalizes the sums, scaled by `factor`, and returns the
    /// log-sum-exp. Without keys: zeros and −∞.
    pub fn finish(self, sums: &mut [f32], factor: f32) -> f32 {
        if self.row_sum == 0.0 {
            return f32::NEG_INFINITY;
        }
        let factor = factor / self.row_sum;
        // Zero is positive, whatever masked values of zero weight
        // were added.
        sums.iter_mut().for_each(|sum| *sum = *sum * factor + 0.0);
        self.row_max + self.row_sum.ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_parts_add_up_to_those_of_all() {
        let parts = [
            (Softmax { row_max: 2.0, row_sum: 1.5 }, [3.0]),
            (Softmax::NONE, [0.0]),
            (Softmax { row_max: 90.0, row_sum: 2.0 }, [4.0]),
            (Softmax { row_max: 89.0, row_sum: 1.0 }, [-1.0]),
        ];
        let (mut all, mut sums) = (Softmax::NONE, [0.0]);
        parts.iter().for_each(|(weights, values)| all.merge(&mut sums, *weights, values));
        let e = (-1f32).exp();
        assert_eq!(all, Softmax { row_max: 90.0, row_sum: 2.0 + e });
        let lse = all.finish(&mut sums, 2.0);
        assert!((lse - (90.0 + (2.0 + e).ln())).abs() < 1e-5 && (sums[0] - 2.0 * (4.0 - e) / (2.0 + e)).abs() < 1e-6);
        let mut zeros = [0.0];
        assert_eq!((Softmax::NONE.finish(&mut zeros, 1.0), zeros), (f32::NEG_INFINITY, [0.0]));
        // NaN stays NaN, whatever the maximum of the part.
        all.merge(&mut sums, Softmax { row_max: f32::NEG_INFINITY, row_sum: f32::NAN }, &[f32::NAN]);
        assert!(all.finish(&mut sums, 1.0).is_nan() && sums[0].is_nan());
    }

    #[test]
    fn a_sink_is_a_score_without_a_value() {
        let (mut row, mut sums) = (Softmax { row_max: 1.0, row_sum: 2.0 }, [6.0]);
        row.add_sink(&mut sums, 3.0);
        let e = (-2f32).exp();
        let lse = row.finish(&mut sums, 1.0);
        assert!(
            (sums[0] - 6.0 * e / (2.0 * e + 1.0)).abs() < 1e-6 && (lse - (3.0 + (2.0 * e + 1.0).ln())).abs() < 1e-6
        );
        let (mut empty, mut zeros) = (Softmax::NONE, [0.0]);
        empty.add_sink(&mut zeros, f32::NEG_INFINITY);
        assert_eq!(empty, Softmax::NONE);
        empty.add_sink(&mut zeros, 0.5);
        assert_eq!((empty.finish(&mut zeros, 1.0), zeros), (0.5, [0.0]));
    }

    #[test]
    fn merging_into_nothing_keeps_the_bits() {
        let (mut all, mut sums) = (Softmax::NONE, [0.0; 3]);
        let (part, values) = (Softmax { row_max: -0.3, row_sum: 1.7 }, [0.1, -2.7, f32::MIN_POSITIVE]);
        all.merge(&mut sums, part, &values);
        assert_eq!((all, sums), (part, values));
    }
}

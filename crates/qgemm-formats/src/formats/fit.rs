//! Finding the scale of a few values: the searches that the quantizers of super-block formats share.
//!
//! Each searches for the scale (and minimum) with the least weighted error, in the order of operations of
//! ggml's `quantize_row_*_ref`, since its results are compared byte for byte; every sum is therefore taken in
//! f32 and in the order of the values.

use super::field;

/// Largest magnitude below which a sub-block counts as zeros.
pub(super) const ZERO: f32 = 1e-15;

/// `value` rounded to the nearest integer, ties to even, through the mantissa of a large f32.
///
/// Beyond ±2²² the result is not the nearest integer but still the same one everywhere; that happens where a
/// denormal scale was inverted.
pub(crate) fn nearest(value: f32) -> i32 {
    ((value + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// Replaces codes by the nearest ones in `0..=max_code` under a scale and minimum as they were stored:
/// `x ≈ scale · (code + lowest) − min`. A scale of 0 leaves the codes as the search found them.
pub(super) fn recode(x: &[f32], scale: f32, min: f32, lowest: i32, max_code: i32, codes: &mut [u32]) {
    if scale == 0.0 {
        return;
    }
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = (nearest((v + min) / scale) - lowest).clamp(0, max_code) as u32;
    }
}

/// `Σ w·x·l` and `Σ w·l²` with `w = x²`, over the integers `l` that `x · inverse` rounds to.
fn moments(x: &[f32], inverse: f32, levels: i32) -> (f32, f32) {
    x.iter().fold((0.0, 0.0), |(xl, ll), &v| {
        let l = nearest(inverse * v).clamp(-levels, levels - 1) as f32;
        let w = v * v;
        (xl + w * v * l, ll + w * l * l)
    })
}

/// Fits `x ≈ scale · (code − levels)` by trying the scale that maps the extreme value to code 0, and 18 others
/// up to 0.9 steps away from it. Returns the scale; 0, with codes of 0, for a sub-block of zeros.
pub(super) fn symmetric(x: &[f32], levels: i32, codes: &mut [u32]) -> f32 {
    let extreme = field::extreme(x);
    if extreme.abs() < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let mut inverse = -levels as f32 / extreme;
    let (xl, ll) = moments(x, inverse, levels);
    let mut scale = if ll == 0.0 { 0.0 } else { xl / ll };
    let mut best = scale * xl;
    for shift in (-9..=9).filter(|&s| s != 0) {
        let candidate = -(levels as f32 + 0.1 * shift as f32) / extreme;
        let (xl, ll) = moments(x, candidate, levels);
        if ll > 0.0 && xl * xl > best * ll {
            scale = xl / ll;
            best = scale * xl;
            inverse = candidate;
        }
    }
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = (nearest(inverse * v).clamp(-levels, levels - 1) + levels) as u32;
    }
    scale
}

/// Fits `x ≈ scale · (code − levels)` by coordinate descent: each value in turn moves to the code that the
/// other values' scale suggests, where that lowers the error; at most five rounds. Returns the scale; 0, with
/// codes of 0, for a sub-block of zeros.
pub(super) fn symmetric_descent(x: &[f32], levels: i32, codes: &mut [u32]) -> f32 {
    let extreme = field::extreme(x);
    if extreme.abs() < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let inverse = -levels as f32 / extreme;
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = (nearest(inverse * v).clamp(-levels, levels - 1) + levels) as u32;
    }
    let (mut xl, mut ll) = moments(x, inverse, levels);
    for _ in 0..5 {
        let mut changed = false;
        for (code, &v) in codes.iter_mut().zip(x) {
            let w = v * v;
            let l = (*code as i32 - levels) as f32;
            let others_xl = xl - w * v * l;
            if others_xl.is_nan() || others_xl <= 0.0 {
                continue;
            }
            let others_ll = ll - w * l * l;
            let moved = nearest(v * others_ll / others_xl).clamp(-levels, levels - 1);
            let to = moved as f32;
            let (new_xl, new_ll) = (others_xl + w * v * to, others_ll + w * to * to);
            if to != l && new_ll > 0.0 && new_xl * new_xl * ll > xl * xl * new_ll {
                *code = (moved + levels) as u32;
                (xl, ll) = (new_xl, new_ll);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    if ll > 0.0 { xl / ll } else { 0.0 }
}

/// Search for `x ≈ scale · code − min` with `min ≥ 0`.
pub(super) struct AffineSearch {
    /// Largest code.
    pub(super) max_code: i32,
    /// The range of the values is cut into `max_code + first`, `max_code + first + step`, … steps.
    pub(super) first: f32,
    /// See [`AffineSearch::first`].
    pub(super) step: f32,
    /// Candidates after the first.
    pub(super) tries: u8,
    /// Cost of a difference.
    pub(super) cost: fn(f32) -> f32,
}

impl AffineSearch {
    /// Scale and minimum with the least `Σ weight · cost` for at most 32 values, by a weighted linear
    /// regression of the values on the codes of each candidate; the range that a candidate cuts begins at the
    /// best minimum before it. The codes are those of the best candidate.
    pub(super) fn fit(&self, x: &[f32], weights: &[f32], codes: &mut [u32]) -> (f32, f32) {
        let (low, high) = field::min_max(x);
        let mut low = if low > 0.0 { 0.0 } else { low };
        if low == high {
            codes.fill(0);
            return (0.0, -low);
        }
        let sum_w = weights.iter().fold(0.0, |sum, &w| sum + w);
        let sum_x = x.iter().zip(weights).fold(0.0, |sum, (&v, &w)| sum + w * v);

        let inverse = self.max_code as f32 / (high - low);
        let mut best = self.levels(x, inverse, low);
        let mut scale = 1.0 / inverse;
        let mut least = self.error(x, weights, &best, scale, low);
        for i in 0..=self.tries {
            let inverse = (self.first + self.step * f32::from(i) + self.max_code as f32) / (high - low);
            let levels = self.levels(x, inverse, low);
            let (mut sum_l, mut sum_ll, mut sum_xl) = (0.0f32, 0.0f32, 0.0f32);
            for ((&v, &w), &l) in x.iter().zip(weights).zip(&levels) {
                sum_l += w * l;
                sum_ll += w * l * l;
                sum_xl += w * l * v;
            }
            let determinant = sum_w * sum_ll - sum_l * sum_l;
            if determinant.is_nan() || determinant <= 0.0 {
                continue;
            }
            let mut new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            let mut new_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
            if new_low > 0.0 {
                new_low = 0.0;
                new_scale = sum_xl / sum_ll;
            }
            let error = self.error(x, weights, &levels, new_scale, new_low);
            if error < least {
                (least, best, scale, low) = (error, levels, new_scale, new_low);
            }
        }
        for (code, level) in codes.iter_mut().zip(best) {
            *code = level as u32;
        }
        (scale, -low)
    }

    /// The codes of `(x − low) · inverse`, as numbers.
    fn levels(&self, x: &[f32], inverse: f32, low: f32) -> [f32; 32] {
        let mut levels = [0.0; 32];
        for (level, &v) in levels.iter_mut().zip(x) {
            *level = nearest(inverse * (v - low)).clamp(0, self.max_code) as f32;
        }
        levels
    }

    /// The weighted error of `scale · level + low`.
    fn error(&self, x: &[f32], weights: &[f32], levels: &[f32], scale: f32, low: f32) -> f32 {
        let triples = x.iter().zip(weights).zip(levels);
        triples.fold(0.0, |sum, ((&v, &w), &l)| sum + w * (self.cost)(scale * l + low - v))
    }
}

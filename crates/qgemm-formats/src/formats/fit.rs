//! Scale searches of the K-quant quantizers.
//!
//! Each search minimizes the weighted error over scale and minimum.
//! Operations follow ggml's `quantize_row_*_ref` in order, and with an
//! importance matrix `quantize_row_*_impl`, because results are compared
//! byte for byte. Sums are therefore f32, in the order of the values.

use super::field;

/// Largest magnitude of a sub-block that counts as zero.
pub(super) const ZERO: f32 = 1e-15;

/// Rounds `value` to the nearest integer, ties to even, through the
/// mantissa of a large f32.
///
/// Beyond ±2²² the result is wrong, but the same on every platform.
/// That occurs after inverting a subnormal scale.
pub(crate) fn nearest(value: f32) -> i32 {
    ((value + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// Requantizes with the stored scale and minimum:
/// `x ≈ scale · (code + lowest) − min`. Codes are in `0..=max_code`.
/// A scale of 0 leaves the codes unchanged.
pub(super) fn recode(x: &[f32], scale: f32, min: f32, lowest: i32, max_code: i32, codes: &mut [u32]) {
    if scale == 0.0 {
        return;
    }
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = (nearest((v + min) / scale) - lowest).clamp(0, max_code) as u32;
    }
}

/// Squares of values: their weights in a search without an
/// importance matrix.
pub(super) fn squares<const N: usize>(x: &[f32]) -> [f32; N] {
    std::array::from_fn(|i| x[i] * x[i])
}

/// Sum of squares.
pub(super) fn energy(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |sum, v| sum + v * v)
}

/// Weights of values in a search with an importance matrix.
///
/// `variance` is ggml's estimate for the surroundings of `x`.
pub(super) fn weigh<const N: usize>(x: &[f32], importance: &[f32], variance: f32) -> [f32; N] {
    std::array::from_fn(|i| importance[i] * (variance + x[i] * x[i]).sqrt())
}

/// Sum of weights.
pub(super) fn total(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |sum, w| sum + w)
}

/// Quantizes a row in blocks of 32 values and `block_bytes` bytes.
/// Weights of the search follow the importance of the columns and
/// the variance of the row.
pub(super) fn blocks_by_importance(
    values: &[f32],
    importance: &[f32],
    (out, block_bytes): (&mut [u8], usize),
    quantize: impl Fn(&[f32], &[f32], &mut [u8]),
) {
    let variance = energy(values) / values.len() as f32;
    let blocks = values.chunks_exact(32).zip(importance.chunks_exact(32)).zip(out.chunks_exact_mut(block_bytes));
    blocks.for_each(|((x, importance), block)| quantize(x, &weigh::<32>(x, importance, variance), block));
}

/// Fits scale and minimum of each sub-block by importance.
/// Scales become codes of up to `most` and a unit; minimums,
/// too.
pub(super) fn super_block_by_importance<const SUB: usize, const SUBS: usize>(
    search: &AffineSearch,
    (x, importance, variance): (&[f32], &[f32], f32),
    most: i32,
    codes: &mut [u32],
) -> [([u8; SUBS], f32); 2] {
    let (mut scales, mut mins, mut totals) = ([0.0; SUBS], [0.0; SUBS], [0.0; SUBS]);
    let subs = x.chunks_exact(SUB).zip(importance.chunks_exact(SUB)).zip(codes.chunks_exact_mut(SUB));
    for (sub, ((x, importance), codes)) in subs.enumerate() {
        let weights: [f32; SUB] = weigh(x, importance, variance);
        totals[sub] = total(&weights);
        (scales[sub], mins[sub]) = search.fit(x, &weights, codes);
    }
    [&scales, &mins].map(|numbers| {
        let mut coded = [0; SUBS];
        let unit = positive(numbers, &totals, most, &mut coded);
        (coded, unit)
    })
}

/// `Σ w·x·l` and `Σ w·l²`. `l` is `x · inverse`, rounded.
fn moments(x: &[f32], weights: &[f32], inverse: f32, levels: i32) -> (f32, f32) {
    x.iter().zip(weights).fold((0.0, 0.0), |(xl, ll), (&v, &w)| {
        let l = nearest(inverse * v).clamp(-levels, levels - 1) as f32;
        (xl + w * v * l, ll + w * l * l)
    })
}

/// Fits `x ≈ scale · (code − levels)` by a grid of 19 scales.
///
/// The first maps the value of largest magnitude to code 0. The others
/// are up to 0.9 steps away. Returns the scale. A sub-block of zeros
/// has scale 0 and codes 0.
pub(super) fn symmetric(x: &[f32], weights: &[f32], levels: i32, codes: &mut [u32]) -> f32 {
    let extreme = field::extreme(x);
    if extreme.abs() < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let mut inverse = -levels as f32 / extreme;
    let (xl, ll) = moments(x, weights, inverse, levels);
    let mut scale = if ll == 0.0 { 0.0 } else { xl / ll };
    let mut best = scale * xl;
    for shift in (-9..=9).filter(|&s| s != 0) {
        let candidate = -(levels as f32 + 0.1 * shift as f32) / extreme;
        let (xl, ll) = moments(x, weights, candidate, levels);
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

/// Fits 16 values `x ≈ scale · (code − levels)` by coordinate
/// descent, in at most five rounds.
///
/// Each step requantizes one value with the scale of the other values,
/// if that lowers the error. Returns the scale. A sub-block of zeros
/// has scale 0 and codes 0.
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
    let (mut xl, mut ll) = moments(x, &squares::<16>(x), inverse, levels);
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

/// Fits `x ≈ scale · code` with `x ≥ 0` by nine scales and then
/// coordinate descent, in at most five rounds.
///
/// Returns the scale. Zeros have scale 0 and codes 0.
pub(super) fn positive(x: &[f32], weights: &[f32], max_code: i32, codes: &mut [u8]) -> f32 {
    let max = x.iter().fold(0.0, |max: f32, &v| if max > v { max } else { v });
    if max < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let inverse = positive_inverse(x, weights, max_code, max);
    let (mut xl, mut ll) = (0.0f32, 0.0f32);
    for ((code, &v), &w) in codes.iter_mut().zip(x).zip(weights) {
        let l = nearest(inverse * v).min(max_code);
        *code = l as u8;
        (xl, ll) = (xl + w * v * l as f32, ll + w * l as f32 * l as f32);
    }
    for _ in 0..5 {
        let mut changed = false;
        for ((code, &v), &w) in codes.iter_mut().zip(x).zip(weights) {
            let l = f32::from(*code);
            let (others_xl, others_ll) = (xl - w * v * l, ll - w * l * l);
            if !(others_xl > 0.0 && others_ll > 0.0) {
                continue;
            }
            let moved = nearest(v * others_ll / others_xl).min(max_code);
            let to = moved as f32;
            let (new_xl, new_ll) = (others_xl + w * v * to, others_ll + w * to * to);
            if to != l && new_xl * new_xl * ll > xl * xl * new_ll {
                *code = moved as u8;
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

/// Inverse scale with the least error, of `max_code` steps to the
/// maximum and up to 0.4 more or fewer.
fn positive_inverse(x: &[f32], weights: &[f32], max_code: i32, max: f32) -> f32 {
    let error = |inverse: f32, limit: i32| {
        let scale = 1.0 / inverse;
        x.iter().zip(weights).fold(0.0, |sum, (&v, &w)| {
            let difference = v - scale * nearest(inverse * v).min(limit) as f32;
            sum + w * difference * difference
        })
    };
    let mut best = max_code as f32 / max;
    let mut least: f32 = error(best, i32::MAX);
    for shift in (-4..=4).filter(|&s| s != 0) {
        let candidate = (0.1 * shift as f32 + max_code as f32) / max;
        let error = error(candidate, max_code);
        if error < least {
            (least, best) = (error, candidate);
        }
    }
    best
}

/// Parameters of a search for `x ≈ scale · code − min` with `min ≥ 0`.
pub(super) struct AffineSearch {
    /// Largest code.
    pub(super) max_code: i32,
    /// Steps of the value range: candidates try `max_code + first`,
    /// `max_code + first + step`, …
    pub(super) first: f32,
    /// Increment between candidates, see [`AffineSearch::first`].
    pub(super) step: f32,
    /// Number of candidates after the first.
    pub(super) tries: u8,
    /// Cost function of an error.
    pub(super) cost: fn(f32) -> f32,
}

impl AffineSearch {
    /// Search of ggml's quantizers with an importance matrix.
    pub(super) const fn by_importance(max_code: i32) -> Self {
        Self { max_code, first: -0.9, step: 0.05, tries: 36, cost: |v| v * v }
    }

    /// Finds scale and minimum with the least `Σ weight · cost`
    /// for at most 32 values.
    ///
    /// Each candidate is refined by a weighted linear regression of values on
    /// codes. Its range begins at the best minimum so far. `codes` receives
    /// the codes of the best candidate.
    pub(super) fn fit(&self, x: &[f32], weights: &[f32], codes: &mut [u32]) -> (f32, f32) {
        let (low, high) = field::min_max(x);
        let mut low = if low > 0.0 { 0.0 } else { low };
        if low == high {
            codes.fill(0);
            return (0.0, -low);
        }
        let sum_w = total(weights);
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

    /// Codes of `(x − low) · inverse`, as floats.
    fn levels(&self, x: &[f32], inverse: f32, low: f32) -> [f32; 32] {
        let mut levels = [0.0; 32];
        for (level, &v) in levels.iter_mut().zip(x) {
            *level = nearest(inverse * (v - low)).clamp(0, self.max_code) as f32;
        }
        levels
    }

    /// Weighted error of `scale · level + low`.
    fn error(&self, x: &[f32], weights: &[f32], levels: &[f32], scale: f32, low: f32) -> f32 {
        let triples = x.iter().zip(weights).zip(levels);
        triples.fold(0.0, |sum, ((&v, &w), &l)| sum + w * (self.cost)(scale * l + low - v))
    }
}

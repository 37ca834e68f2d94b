//! Attention kernels: query-key products, exponentials, and weighted sums
//! of values, on f32 rows of whole vectors.

use super::activation::exp_nonpositive;
use super::vector::{LANES, Vector};

/// `out[row][key] = q[row] · k[key]`, with rows of `width` columns. The
/// order of additions depends on the width only.
///
/// # Safety
/// The CPU must support the level's instructions. `q`, `k` and `out`
/// must be whole rows, and `width` whole vectors.
#[inline(always)]
pub unsafe fn match_keys<V: Vector>(q: &[f32], k: &[f32], width: usize, out: &mut [f32]) {
    let (rows, keys) = (q.len() / width, k.len() / width);
    let mut row = 0;
    // SAFETY: guaranteed by the caller; blocks of rows and keys
    // are within `q`, `k` and `out`.
    unsafe {
        while row + 4 <= rows {
            of_rows::<V, 4, 2>(q, k, width, row, keys, out);
            row += 4;
        }
        while row < rows {
            of_rows::<V, 1, 4>(q, k, width, row, keys, out);
            row += 1;
        }
    }
}

/// # Safety
/// As for [`match_keys`]; `R` rows from `row` on must exist.
#[inline(always)]
unsafe fn of_rows<V: Vector, const R: usize, const C: usize>(
    q: &[f32],
    k: &[f32],
    width: usize,
    row: usize,
    keys: usize,
    out: &mut [f32],
) {
    let mut key = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while key + C <= keys {
            block::<V, R, C>(q, k, width, [row, key], keys, out);
            key += C;
        }
        while key < keys {
            block::<V, R, 1>(q, k, width, [row, key], keys, out);
            key += 1;
        }
    }
}

/// # Safety
/// As for [`match_keys`]; `R` rows and `C` keys from
/// `row` and `key` on must exist.
#[inline(always)]
unsafe fn block<V: Vector, const R: usize, const C: usize>(
    q: &[f32],
    k: &[f32],
    width: usize,
    [row, key]: [usize; 2],
    keys: usize,
    out: &mut [f32],
) {
    // SAFETY: guaranteed by the caller: columns are within whole rows.
    unsafe {
        let mut sums = [[V::splat(0.0); C]; R];
        for column in (0..width).step_by(LANES) {
            let q: [V::Floats; R] = std::array::from_fn(|r| V::load(q.as_ptr().add((row + r) * width + column)));
            let k: [V::Floats; C] = std::array::from_fn(|c| V::load(k.as_ptr().add((key + c) * width + column)));
            for (sums, q) in sums.iter_mut().zip(q) {
                for (sum, k) in sums.iter_mut().zip(k) {
                    *sum = V::multiply_add(q, k, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                *out.get_unchecked_mut((row + r) * keys + key + c) = total::<V>(sum);
            }
        }
    }
}

/// Sum of all lanes, pairwise.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub(super) unsafe fn total<V: Vector>(floats: V::Floats) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: the array has sixteen floats.
    unsafe { V::store(lanes.as_mut_ptr(), floats) };
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Replaces every score by `exp(score − most)` and
/// returns their sum. No score exceeds `most`. NaN stays
/// NaN and makes the sum NaN.
///
/// # Safety
/// The CPU must support the level's instructions.
/// `scores` must be whole vectors.
#[inline(always)]
pub unsafe fn exponentials<V: Vector>(scores: &mut [f32], most: f32) -> f32 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (one, least) = (V::splat(1.0), V::splat(-87.0));
        let mut sum = V::splat(0.0);
        for scores in scores.chunks_exact_mut(LANES) {
            let x = V::multiply_add(V::splat(most), V::splat(-1.0), V::load(scores.as_ptr()));
            // Zero for numbers, NaN for NaN, so that the
            // exponential of NaN is NaN.
            let difference = V::multiply_add(x, V::splat(-1.0), x);
            let power = V::multiply_add(exp_nonpositive::<V>(x), one, difference);
            let power = V::where_less(x, least, V::splat(0.0), power);
            V::store(scores.as_mut_ptr(), power);
            sum = V::multiply_add(power, one, sum);
        }
        total::<V>(sum)
    }
}

/// `sums[row] += Σ weights[row][key] · v[key]`, with rows of
/// `width` columns, key by key.
///
/// # Safety
/// As for [`match_keys`]; `weights` must have a row for each of
/// `sums`, with as many keys as `v` has rows.
#[inline(always)]
pub unsafe fn add_values<V: Vector>(weights: &[f32], v: &[f32], width: usize, sums: &mut [f32]) {
    let (rows, keys) = (sums.len() / width, v.len() / width);
    let mut row = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while row + 4 <= rows {
            add_to_rows::<V, 4>(weights, v, width, row, keys, sums);
            row += 4;
        }
        while row < rows {
            add_to_rows::<V, 1>(weights, v, width, row, keys, sums);
            row += 1;
        }
    }
}

/// # Safety
/// As for [`add_values`]; `R` rows from `row` on must exist.
#[inline(always)]
unsafe fn add_to_rows<V: Vector, const R: usize>(
    weights: &[f32],
    v: &[f32],
    width: usize,
    row: usize,
    keys: usize,
    sums: &mut [f32],
) {
    // SAFETY: guaranteed by the caller: columns are within whole rows.
    unsafe {
        for column in (0..width).step_by(LANES) {
            let to: [*mut f32; R] = std::array::from_fn(|r| sums.as_mut_ptr().add((row + r) * width + column));
            let mut own: [V::Floats; R] = to.map(|to| V::load(to));
            for key in 0..keys {
                let v = V::load(v.as_ptr().add(key * width + column));
                for (r, own) in own.iter_mut().enumerate() {
                    *own = V::multiply_add(V::splat(*weights.get_unchecked((row + r) * keys + key)), v, *own);
                }
            }
            for (to, own) in to.into_iter().zip(own) {
                V::store(to, own);
            }
        }
    }
}

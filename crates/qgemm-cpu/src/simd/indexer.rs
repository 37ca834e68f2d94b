//! Indexer kernel: query-key products of heads and keys, both by
//! rows.

use super::attention::total;
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

//! Norm kernels: row statistics and normalization.

use super::attention::total;
use super::vector::{LANES, Vector};

/// Normalization of a value:
/// `((value · scale − mean) − correction) · inverse`.
#[derive(Clone, Copy, Debug)]
pub struct Normalization {
    /// A power of two.
    pub scale: f32,
    /// Mean of the scaled values.
    pub mean: f32,
    /// Mean of the differences to `mean`, which corrects its rounding.
    pub correction: f32,
    /// Inverse standard deviation (or RMS) of the scaled values.
    pub inverse: f32,
}

/// `[Σ (value · scale − mean), Σ (value · scale − mean)²]`,
/// in an order that depends on the length only.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub unsafe fn moments<V: Vector>(values: &[f32], scale: f32, mean: f32) -> [f32; 2] {
    let whole = values.len() / LANES * LANES;
    let mut rest = [0.0, 0.0];
    for value in &values[whole..] {
        let beside = value * scale - mean;
        rest[0] += beside;
        rest[1] += beside * beside;
    }
    // SAFETY: guaranteed by the caller; vectors from
    // `first` on are in `values`.
    unsafe {
        let (one, scale, mean) = (V::splat(1.0), V::splat(scale), V::splat(-mean));
        let mut sums = [[V::splat(0.0); 2]; 2];
        let mut first = 0;
        // Two vectors at a time, with independent sums.
        while first < whole {
            for sums in sums.iter_mut().take((whole - first) / LANES) {
                let beside = V::multiply_add(V::load(values.as_ptr().add(first)), scale, mean);
                sums[0] = V::multiply_add(beside, one, sums[0]);
                sums[1] = V::multiply_add(beside, beside, sums[1]);
                first += LANES;
            }
        }
        // Not `from_fn`, because compilers do not propagate the
        // level's instructions into it.
        let [first, second] = sums;
        let beside = total::<V>(V::multiply_add(first[0], one, second[0]));
        let squares = total::<V>(V::multiply_add(first[1], one, second[1]));
        [beside + rest[0], squares + rest[1]]
    }
}

/// Normalizes values, then applies `gamma` and `beta`. Each is
/// as long as `values`, or empty.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub unsafe fn normalize<V: Vector>(how: &Normalization, gamma: &[f32], beta: &[f32], values: &mut [f32]) {
    let Normalization { scale, mean, correction, inverse } = *how;
    let whole = values.len() / LANES * LANES;
    // SAFETY: guaranteed by the caller; vectors from `first` on are in
    // `values`, and in gamma and beta unless empty.
    unsafe {
        let one = V::splat(1.0);
        let (scale, mean, correction) = (V::splat(scale), V::splat(-mean), V::splat(-correction));
        let inverse = V::splat(inverse);
        for first in (0..whole).step_by(LANES) {
            let at = values.as_mut_ptr().add(first);
            let beside = V::multiply_add(V::load(at), scale, mean);
            let mut value = V::multiply(V::multiply_add(beside, one, correction), inverse);
            if !gamma.is_empty() {
                value = V::multiply(value, V::load(gamma.as_ptr().add(first)));
            }
            if !beta.is_empty() {
                value = V::multiply_add(value, one, V::load(beta.as_ptr().add(first)));
            }
            V::store(at, value);
        }
    }
    for (i, value) in values.iter_mut().enumerate().skip(whole) {
        let normalized = ((*value * scale - mean) - correction) * inverse;
        *value = normalized * gamma.get(i).copied().unwrap_or(1.0) + beta.get(i).copied().unwrap_or(0.0);
    }
}

/// Adds `other`, which is as long as `values`, elementwise.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub unsafe fn add<V: Vector>(other: &[f32], values: &mut [f32]) {
    let whole = values.len() / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        // SAFETY: guaranteed by the caller; vectors from
        // `first` on are in both.
        unsafe {
            let at = values.as_mut_ptr().add(first);
            V::store(at, V::multiply_add(V::load(at), V::splat(1.0), V::load(other.as_ptr().add(first))));
        }
    }
    for (value, other) in values[whole..].iter_mut().zip(&other[whole..]) {
        *value += other;
    }
}

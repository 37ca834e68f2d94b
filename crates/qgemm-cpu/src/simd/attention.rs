//! Attention kernels: products of a block of queries with a tile of keys or
//! values, and softmax of a row of scores.

use super::activation::exp_nonpositive;
use super::vector::{LANES, Vector};

/// A matrix in scratch memory.
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a> {
    /// Its values, row-major.
    pub values: &'a [f32],
    /// From one row to the next.
    pub stride: usize,
}

/// Extent of [`super::Simd::add_products`]: `rows × depth` times `depth × columns`.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Rows of A and of the sums.
    pub rows: usize,
    /// Columns of A, rows of B.
    pub depth: usize,
    /// Columns of B and of the sums: whole vectors.
    pub columns: usize,
}

/// `sums += A · B`. Each sum adds its products in
/// the order of the depth, whatever the block.
///
/// `C` vectors are accumulated at once.
///
/// # Safety
/// The CPU must support the level's instructions. A, B and the sums, with
/// rows `stride` apart, must have the extent.
#[inline(always)]
pub unsafe fn add_products<V: Vector, const C: usize>(
    extent: Extent,
    a: Panel<'_>,
    b: Panel<'_>,
    sums: &mut [f32],
    stride: usize,
) {
    let mut column = 0;
    // SAFETY: guaranteed by the caller; blocks are within the extent.
    unsafe {
        while column + C * LANES <= extent.columns {
            add_to_columns::<V, C>(extent, a, b, column, sums, stride);
            column += C * LANES;
        }
        while column < extent.columns {
            add_to_columns::<V, 1>(extent, a, b, column, sums, stride);
            column += LANES;
        }
    }
}

/// # Safety
/// As for [`add_products`]; `C` vectors from `column` on must exist.
#[inline(always)]
unsafe fn add_to_columns<V: Vector, const C: usize>(
    extent: Extent,
    a: Panel<'_>,
    b: Panel<'_>,
    column: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let mut row = 0;
    // SAFETY: guaranteed by the caller; rows are within the extent.
    unsafe {
        while row < extent.rows {
            let strides = [a.stride, b.stride, stride];
            let (of_a, of_b) = (a.values.as_ptr().add(row * a.stride), b.values.as_ptr().add(column));
            let to = sums.as_mut_ptr().add(row * stride + column);
            match extent.rows - row {
                1 => add_block::<V, 1, C>(extent.depth, of_a, of_b, to, strides),
                2 => add_block::<V, 2, C>(extent.depth, of_a, of_b, to, strides),
                3 => add_block::<V, 3, C>(extent.depth, of_a, of_b, to, strides),
                _ => add_block::<V, 4, C>(extent.depth, of_a, of_b, to, strides),
            }
            row += 4;
        }
    }
}

/// `R × C` accumulators in registers. `strides` are those
/// of A, B and the sums.
///
/// # Safety
/// As for [`add_products`]; the pointers must be at
/// the block's first values.
#[inline(always)]
unsafe fn add_block<V: Vector, const R: usize, const C: usize>(
    depth: usize,
    a: *const f32,
    b: *const f32,
    to: *mut f32,
    strides: [usize; 3],
) {
    let [a_stride, b_stride, stride] = strides;
    // SAFETY: guaranteed by the caller. Loops instead of `from_fn`, because
    // compilers do not propagate the level's instructions into closures.
    unsafe {
        let mut sums = [[V::splat(0.0); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(to.add(r * stride + c * LANES));
            }
        }
        for k in 0..depth {
            let mut of_b = [V::splat(0.0); C];
            for (c, b_vector) in of_b.iter_mut().enumerate() {
                *b_vector = V::load(b.add(k * b_stride + c * LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let a = V::splat(*a.add(r * a_stride + k));
                for (sum, b) in sums.iter_mut().zip(of_b) {
                    *sum = V::multiply_add(a, b, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                V::store(to.add(r * stride + c * LANES), sum);
            }
        }
    }
}

/// Multiplies scores by `scale` and returns the largest, at least
/// `most`. NaN is never the largest.
///
/// # Safety
/// The CPU must support the level's instructions.
/// `scores` must be whole vectors.
#[inline(always)]
pub unsafe fn scale_scores<V: Vector>(scores: &mut [f32], scale: f32, most: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: guaranteed by the caller; the array has sixteen floats.
    unsafe {
        let (mut largest, scale) = (V::splat(most), V::splat(scale));
        for scores in scores.chunks_exact_mut(LANES) {
            let scaled = V::multiply(V::load(scores.as_ptr()), scale);
            V::store(scores.as_mut_ptr(), scaled);
            largest = V::where_less(largest, scaled, scaled, largest);
        }
        V::store(lanes.as_mut_ptr(), largest);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = if lanes[i] < lanes[i + half] { lanes[i + half] } else { lanes[i] };
        }
    }
    lanes[0]
}

/// Whether no value is infinite or NaN.
///
/// # Safety
/// The CPU must support the level's instructions.
/// `values` must be whole vectors.
#[inline(always)]
pub unsafe fn are_finite<V: Vector>(values: &[f32]) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sum = V::splat(0.0);
        for values in values.chunks_exact(LANES) {
            // Zero for numbers, NaN otherwise.
            sum = V::multiply_add(V::load(values.as_ptr()), V::splat(0.0), sum);
        }
        total::<V>(sum) == 0.0
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

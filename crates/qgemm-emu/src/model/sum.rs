//! D += A · B of small matrices, summed
//! according to a [`Sum`].

use super::precision::{Accumulator, Aligned, Order, Rounding, Sum};

/// The NaN of every NaN result.
pub(crate) const NAN: u32 = 0x7fff_ffff;

/// Exponent of zero, below all others even when two are added.
const ZERO: i32 = -4096;

/// Maximum fraction bits for which four terms fit in an i32.
const MOST_FRACTION_BITS: u32 = 26;

/// Minimum normal exponent of f32.
pub(crate) const LEAST_F32: i32 = -126;

/// D += A · B, with B as rows of K.
/// `least` are the minimum normal exponents of A's and B's formats,
/// which subnormal factors use for the alignment.
pub(crate) fn multiply<const M: usize, const N: usize, const K: usize>(
    a: &[[f32; K]; M],
    b: &[[f32; N]; K],
    d: &mut [[f32; N]; M],
    least: [i32; 2],
    sum: &Sum,
) {
    match sum {
        Sum::Wide => wide(a, b, d),
        Sum::FmaChain => fma_chain(a, b, d),
        Sum::Aligned(how) => aligned(a, b, d, least, how),
    }
    for value in d.as_flattened_mut() {
        *value = if value.is_nan() { f32::from_bits(NAN) } else { *value };
    }
}

fn wide<const M: usize, const N: usize, const K: usize>(a: &[[f32; K]; M], b: &[[f32; N]; K], d: &mut [[f32; N]; M]) {
    for (a, d) in a.iter().zip(d) {
        let mut sum = d.map(f64::from);
        for (&a, b) in a.iter().zip(b) {
            for (sum, &b) in sum.iter_mut().zip(b) {
                *sum += f64::from(a) * f64::from(b);
            }
        }
        *d = sum.map(|sum| sum as f32);
    }
}

fn fma_chain<const M: usize, const N: usize, const K: usize>(
    a: &[[f32; K]; M],
    b: &[[f32; N]; K],
    d: &mut [[f32; N]; M],
) {
    for (a, d) in a.iter().zip(d) {
        for (column, d) in d.iter_mut().enumerate() {
            *d += a.iter().zip(b).fold(0.0, |sum: f32, (a, b)| a.mul_add(b[column], sum));
        }
    }
}

/// A finite number as a signed significand (magnitude
/// below 2) times a power of two.
#[derive(Clone, Copy)]
pub(crate) struct Split {
    pub(crate) significand: f32,
    pub(crate) exponent: i32,
}

/// Splits `value`, whose format has the minimum normal exponent `least`.
/// Infinities and NaN count as zero.
#[inline]
pub(crate) fn split(value: f32, least: i32) -> Split {
    let bits = value.to_bits();
    let field = (bits >> 23 & 0xff) as i32;
    let normal = f32::from_bits(bits & 0x807f_ffff | 127 << 23);
    // 2^-least in two factors, because f32 cannot represent 2^128.
    let half_way = f32::from_bits(((127 - least / 2) as u32) << 23);
    let subnormal = value * half_way * f32::from_bits(((127 - (least - least / 2)) as u32) << 23);
    if field == 0xff || bits << 1 == 0 {
        Split { significand: 0.0, exponent: ZERO }
    } else if field - 127 >= least && field != 0 {
        Split { significand: normal, exponent: field - 127 }
    } else {
        Split { significand: subnormal, exponent: least }
    }
}

/// Integer part of `significand` times 2^`power`. The significand is
/// below 4, and power at most 26.
#[inline]
fn cut(significand: f32, power: i16) -> i32 {
    // Exact from f32's minimum exponent on; below it
    // the result is zero anyway.
    let power = power.max(LEAST_F32 as i16).wrapping_add(127);
    let scaled = significand * f32::from_bits(u32::from(power as u16) << 23);
    // SAFETY: `split` makes significands finite and less than 2, and their
    // products less than 4. The result is less than 2^28 in
    // magnitude, because no caller's power exceeds 26, the maximum number of
    // fraction bits: no term's exponent exceeds the largest of its group.
    unsafe { scaled.to_int_unchecked() }
}

/// A matrix of [`Split`]s. Sixteen bits hold any
/// sum of three exponents.
struct Splits<const R: usize, const C: usize> {
    significand: [[f32; C]; R],
    exponent: [[i16; C]; R],
}

impl<const R: usize, const C: usize> Splits<R, C> {
    fn new(values: &[[f32; C]; R], least: i32) -> Splits<R, C> {
        let mut splits = Splits { significand: [[0.0; C]; R], exponent: [[0; C]; R] };
        let places = splits.significand.as_flattened_mut().iter_mut().zip(splits.exponent.as_flattened_mut());
        for (&value, (significand, exponent)) in values.as_flattened().iter().zip(places) {
            let split = split(value, least);
            (*significand, *exponent) = (split.significand, split.exponent as i16);
        }
        splits
    }
}

fn aligned<const M: usize, const N: usize, const K: usize>(
    a: &[[f32; K]; M],
    b: &[[f32; N]; K],
    d: &mut [[f32; N]; M],
    least: [i32; 2],
    how: &Aligned,
) {
    let order: [usize; K] = match how.order {
        Order::Natural => std::array::from_fn(|k| k),
        Order::PairsOfFour => std::array::from_fn(|i| 4 * (i % (K / 2) / 2) + i / (K / 2) * 2 + i % 2),
    };
    let finite = a.as_flattened().iter().chain(b.as_flattened()).fold(true, |all, v| all & v.is_finite());
    let (a_split, b_split) = (Splits::new(a, least[0]), Splits::new(b, least[1]));
    for (m, d) in d.iter_mut().enumerate() {
        let mut sums = match how.accumulator {
            Accumulator::WithProducts => *d,
            Accumulator::After => [0.0; N],
        };
        for group in order.chunks(how.group_k.clamp(1, K)) {
            let before = sums;
            sums = add_group((&a_split.significand[m], &a_split.exponent[m]), &b_split, before, group, how);
            if !finite || before.iter().any(|c| !c.is_finite()) {
                for n in 0..N {
                    let terms = group.iter().map(|&k| f64::from(a[m][k]) * f64::from(b[k][n]));
                    let exact = terms.fold(f64::from(before[n]), |sum, term| sum + term);
                    if !exact.is_finite() {
                        sums[n] = exact as f32;
                    }
                }
            }
        }
        match how.accumulator {
            Accumulator::WithProducts => *d = sums,
            Accumulator::After => {
                for (d, sum) in d.iter_mut().zip(sums) {
                    *d += sum;
                }
            }
        }
    }
}

/// Adds the products of the K elements in `group` to one
/// row's `sums`. Infinities and NaN count as zero.
#[inline]
fn add_group<const N: usize, const K: usize>(
    (significand, exponent): (&[f32; K], &[i16; K]),
    b: &Splits<K, N>,
    sums: [f32; N],
    group: &[usize],
    how: &Aligned,
) -> [f32; N] {
    let fraction_bits = how.fraction_bits.min(MOST_FRACTION_BITS) as i16;
    let c = Splits::new(&[sums], LEAST_F32);
    // Beyond all exponents of f32, but within
    // those of f64 and 16 bits.
    let mut top = [how.least_exponent.clamp(-900, 900) as i16; N];
    for (top, &c) in top.iter_mut().zip(&c.exponent[0]) {
        *top = c.max(*top);
    }
    // Indexing keeps the compiler from vectorising over K instead of N.
    for &k in group {
        for (n, top) in top.iter_mut().enumerate() {
            *top = exponent[k].wrapping_add(b.exponent[k][n]).max(*top);
        }
    }
    // The power of two for truncating a term,
    // before its own exponent.
    let mut base = [0; N];
    let mut total = [0.0; N];
    for n in 0..N {
        base[n] = fraction_bits.wrapping_sub(top[n]);
        total[n] = f64::from(cut(c.significand[0][n], base[n].wrapping_add(c.exponent[0][n])));
    }
    // Four terms below 2^28 fit in an i32.
    for ks in group.chunks(4) {
        let mut part = [0i32; N];
        for &k in ks {
            for n in 0..N {
                let power = base[n].wrapping_add(exponent[k]).wrapping_add(b.exponent[k][n]);
                part[n] = part[n].wrapping_add(cut(significand[k] * b.significand[k][n], power));
            }
        }
        for n in 0..N {
            total[n] += f64::from(part[n]);
        }
    }
    let mut rounded = [0.0; N];
    for n in 0..N {
        rounded[n] = round(total[n], -i32::from(base[n]), how.rounding);
    }
    rounded
}

/// 2^`exponent`, for exponents from -1022 to 1023.
#[inline]
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// `integer` times 2^`exponent` as f32. The integer is exact in f64,
/// and the exponent far from f64's limits.
#[inline]
pub(crate) fn round(integer: f64, exponent: i32, rounding: Rounding) -> f32 {
    let value = integer * power_of_two(exponent);
    match rounding {
        Rounding::NearestEven => value as f32,
        Rounding::TowardZero { fraction_bits } => {
            let fraction_bits = fraction_bits.min(23);
            let subnormal = value.abs() < f64::from(f32::MIN_POSITIVE);
            if subnormal {
                // In units of the smallest number with this many fraction
                // bits. A zero result is positive.
                let units = value * power_of_two(fraction_bits as i32 - LEAST_F32);
                ((units as i64) as f64 * power_of_two(LEAST_F32 - fraction_bits as i32)) as f32
            } else {
                // The remaining bits fit in f32, unless the value is 2^128
                // or more, which becomes infinite.
                f64::from_bits(value.to_bits() & !((1 << (52 - fraction_bits)) - 1)) as f32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Precision;
    use qgemm_hal::Variant;

    const F16: i32 = -14;
    const BF16: i32 = -126;

    fn with(group_k: usize, fraction_bits: u32) -> Aligned {
        let Sum::Aligned(hopper) = Precision::of(Variant::Sm90).half else { panic!("Hopper aligns") };
        Aligned { group_k, fraction_bits, ..hopper }
    }

    /// One row times one column.
    fn dot<const K: usize>(a: [f32; K], b: [f32; K], c: f32, least: i32, sum: Sum) -> f32 {
        let mut d = [[c]];
        multiply(&[a], &b.map(|value| [value]), &mut d, [least; 2], &sum);
        d[0][0]
    }

    #[test]
    fn bits_below_the_kept_ones_are_cut() {
        // 2^12 and three times 2^-13. With 24 fraction bits each small
        // term is below the last kept bit, 2^-12.
        let a = [64.0, 2f32.powi(-7), 2f32.powi(-7), 2f32.powi(-7)];
        let b = [64.0, 2f32.powi(-6), 2f32.powi(-6), 2f32.powi(-6)];
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 24))), 4096.0);
        // With 25 bits the three terms sum to 2^-12 + 2^-13,
        // but the last bit of f32 is 2^-11 here.
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 25))), 4096.0);
        // Subtracting the large term afterwards shows the small ones. Within the
        // group, only the first case keeps them.
        let (a, b) = ([64.0, 2f32.powi(-7), 2f32.powi(-7), -64.0], [64.0, 2f32.powi(-6), 2f32.powi(-6), 64.0]);
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 24))), 0.0);
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 25))), 2f32.powi(-12));
        assert_eq!(dot(a, b, 0.0, F16, Sum::Wide), 2f32.powi(-12));
    }

    #[test]
    fn terms_are_cut_toward_zero_each_on_its_own() {
        // Four terms of minus three quarters of the last kept
        // bit: each becomes zero.
        let a = [1.0, -0.75, -0.75, -0.75, -0.75, 0.0, 0.0, 0.0];
        let small = 2f32.powi(-12);
        let b = [2048.0, small, small, small, small, 0.0, 0.0, 0.0];
        let (top, last) = (2048.0, 2f32.powi(-12));
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(8, 23))), top);
        assert_eq!(f64::from(dot(a, b, 0.0, F16, Sum::Wide)), f64::from((2048.0 - 3.0 * f64::from(last)) as f32));
    }

    #[test]
    fn a_product_of_significands_is_not_normalized() {
        // 1.5 * 1.5 = 2.25 = 2^1 * 1.125, but its
        // exponent counts as 0, so with 24 bits 2^-24 is kept.
        let small = 2f32.powi(-12);
        let products = ([1.5, small, -1.5, 0.0], [1.5, small, 1.5, 0.0]);
        assert_eq!(dot(products.0, products.1, 0.0, F16, Sum::Aligned(with(4, 24))), 2f32.powi(-24));
        assert_eq!(dot(products.0, products.1, 0.0, F16, Sum::Aligned(with(4, 23))), 0.0);
    }

    #[test]
    fn groups_round_one_after_another() {
        // After the first group of two, 2^12 + 2^-12 is truncated
        // to 2^12 in f32; then the large term is subtracted.
        let a = [64.0, 2f32.powi(-6), -64.0, 0.0];
        let b = [64.0, 2f32.powi(-6), 64.0, 0.0];
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(2, 25))), 0.0);
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 25))), 2f32.powi(-12));
    }

    #[test]
    fn the_accumulator_is_aligned_too() {
        let c = 2f32.powi(20);
        assert_eq!(dot([1.0, 0.0], [2f32.powi(-4), 0.0], c, F16, Sum::Aligned(with(2, 24))), c);
        assert_eq!(dot([1.0, 0.0], [2f32.powi(-3), 0.0], c, F16, Sum::Aligned(with(2, 24))), c + 0.125);
        // After: 2^20 + 0.1875 is rounded to nearest, up.
        // Aligned: it is truncated.
        let after = Aligned { accumulator: Accumulator::After, ..with(2, 24) };
        let three = ([0.1875, 0.0], [1.0, 0.0]);
        assert_eq!(dot(three.0, three.1, c, F16, Sum::Aligned(after)), c + 0.25);
        assert_eq!(dot(three.0, three.1, c, F16, Sum::Aligned(with(2, 24))), c + 0.125);
    }

    #[test]
    fn short_results_clear_their_last_bits() {
        let short = Aligned { rounding: Rounding::TowardZero { fraction_bits: 13 }, ..with(2, 13) };
        assert_eq!(dot([1.0, 1.0], [1.0, 2f32.powi(-13)], 0.0, F16, Sum::Aligned(short)), 1.0 + 2f32.powi(-13));
        assert_eq!(dot([1.0, 1.0], [1.0, 2f32.powi(-14)], 0.0, F16, Sum::Aligned(short)), 1.0);
        // The sum has one bit more than its terms
        // and loses its last bit.
        assert_eq!(
            dot([1.0, 1.0], [1.0, 1.0 + 2f32.powi(-10)], 2f32.powi(-13), F16, Sum::Aligned(short)),
            2.0 + 2f32.powi(-10)
        );
    }

    #[test]
    fn pairs_of_four_are_groups() {
        // The large terms are in the first and second half of
        // fours, so they are in different groups.
        let how = Aligned { order: Order::PairsOfFour, ..with(4, 24) };
        let a = [64.0, 2f32.powi(-7), -64.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let b = [64.0, 2f32.powi(-6), 64.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(how)), 0.0);
        let a = [64.0, -64.0, 2f32.powi(-7), 0.0, 0.0, 0.0, 0.0, 0.0];
        let b = [64.0, 64.0, 2f32.powi(-6), 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(how)), 2f32.powi(-13));
        assert_eq!(dot(a, b, 0.0, F16, Sum::Aligned(with(4, 24))), 0.0);
    }

    #[test]
    fn fmas_round_at_each_step() {
        let e = 2f32.powi(-24);
        assert_eq!(dot([1.0, e, e, 0.0], [1.0; 4], 0.0, BF16, Sum::FmaChain), 1.0);
        assert_eq!(dot([e, e, 1.0, 0.0], [1.0; 4], 0.0, BF16, Sum::FmaChain), 1.0 + 2.0 * e);
        assert_eq!(dot([e, e, 0.0, 0.0], [1.0; 4], 1.0, BF16, Sum::FmaChain), 1.0 + 2.0 * e);
    }

    #[test]
    fn subnormals_overflow_and_specials() {
        let hopper = Sum::Aligned(with(16, 25));
        let least_f16 = 2f32.powi(-24);
        assert_eq!(dot([least_f16, 0.0], [least_f16, 0.0], 0.0, F16, hopper), 2f32.powi(-48));
        // A subnormal factor uses its format's minimum
        // exponent: -14 instead of -24.
        let (a, b) = ([least_f16, 1.0], [1.0, 2f32.powi(-24)]);
        assert_eq!(dot(a, b, 0.0, F16, hopper), 2f32.powi(-23));
        let least_f32 = f32::from_bits(1);
        assert_eq!(dot([0.0; 2], [0.0; 2], least_f32, F16, hopper), least_f32);
        assert_eq!(dot([2f32.powi(-100), 0.0], [2f32.powi(-49), 0.0], 0.0, BF16, hopper), least_f32);
        assert_eq!(dot([2f32.powi(-100), 0.0], [2f32.powi(-50), 0.0], 0.0, BF16, hopper).to_bits(), 0);
        let large = 2f32.powi(127);
        assert_eq!(dot([large, large], [1.0, 1.0], 0.0, BF16, hopper), f32::INFINITY);
        assert_eq!(dot([large, -large], [2.0, 2.0], 1.0, BF16, hopper), 0.0, "the one is cut");
        assert_eq!(dot([f32::MAX, 0.0], [1.0, 0.0], 1.0, BF16, hopper), f32::MAX);
        for sum in [Sum::Wide, Sum::FmaChain, hopper] {
            let infinite = f32::INFINITY;
            assert_eq!(dot([infinite, 1.0], [1.0, 1.0], 1.0, F16, sum), infinite);
            assert_eq!(dot([1.0, 1.0], [1.0, 1.0], -infinite, F16, sum), -infinite);
            assert_eq!(dot([infinite, 1.0], [0.0, 1.0], 1.0, F16, sum).to_bits(), NAN);
            assert_eq!(dot([1.0, 1.0], [1.0, 1.0], f32::NAN, F16, sum).to_bits(), NAN);
            assert_eq!(dot([infinite, -infinite], [1.0, 1.0], 1.0, F16, sum).to_bits(), NAN);
        }
    }

    #[test]
    fn exact_sums_are_exact_everywhere() {
        let a: [f32; 32] = std::array::from_fn(|k| (k as f32 * 7.0) % 13.0 - 6.0);
        let b: [f32; 32] = std::array::from_fn(|k| (k as f32 * 5.0) % 11.0 - 5.0);
        let exact = a.iter().zip(b).fold(3.0, |sum, (a, b)| sum + a * b);
        let mut sums = vec![Sum::Wide, Sum::FmaChain];
        for variant in Variant::ALL {
            let precision = Precision::of(variant);
            sums.extend([precision.quad_pair, precision.half, precision.fp8]);
        }
        for sum in sums {
            assert_eq!(dot(a, b, 3.0, F16, sum), exact, "{sum:?}");
        }
    }
}

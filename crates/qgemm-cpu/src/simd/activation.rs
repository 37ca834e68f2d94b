//! Activation functions on sixteen f32 lanes. All but identity, ReLU and
//! exact GELU are `v · sigmoid(…)`. GELU-tanh contains 1 + tanh(u),
//! which is 2 · sigmoid(2u) without cancellation for negative u. The
//! formulas match the other backends.

use std::f32::consts::{FRAC_2_SQRT_PI, LOG2_E, SQRT_2};

use qgemm_hal::ClampedSwiglu;

use super::vector::Vector;

/// An activation.
pub trait Function: Copy {
    /// Value of the function; in a gated pair, of the gate.
    ///
    /// # Safety
    /// As for [`Vector`]'s functions.
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats;

    /// Factor of the gate's value, from the up.
    ///
    /// # Safety
    /// As for [`Vector`]'s functions.
    #[inline(always)]
    unsafe fn of_up<V: Vector>(self, up: V::Floats) -> V::Floats {
        up
    }
}

/// Identity.
#[derive(Clone, Copy)]
pub struct Identity;
impl Function for Identity {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        v
    }
}

/// `max(v, 0)`; keeps NaN.
#[derive(Clone, Copy)]
pub struct Relu;
impl Function for Relu {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { V::where_less(v, V::splat(0.0), V::splat(0.0), v) }
    }
}

/// `max(v, 0)²`; keeps NaN.
#[derive(Clone, Copy)]
pub struct ReluSquared;
impl Function for ReluSquared {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { V::where_less(v, V::splat(0.0), V::splat(0.0), V::multiply(v, v)) }
    }
}

/// Clamps keep NaN, since comparisons with it are false.
impl Function for ClampedSwiglu {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let limit = V::splat(self.limit);
            let gate = V::where_less(limit, v, limit, v);
            V::multiply(gate, sigmoid::<V>(V::multiply(V::splat(self.alpha), gate)))
        }
    }

    #[inline(always)]
    unsafe fn of_up<V: Vector>(self, up: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (least, most) = (V::splat(-self.limit), V::splat(self.limit));
            let up = V::where_less(most, up, most, V::where_less(up, least, least, up));
            V::multiply_add(up, V::splat(1.0), V::splat(self.beta))
        }
    }
}

/// `v · sigmoid(v)`.
#[derive(Clone, Copy)]
pub struct Silu;
impl Function for Silu {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { V::multiply(v, sigmoid::<V>(v)) }
    }
}

/// GELU, tanh approximation.
#[derive(Clone, Copy)]
pub struct GeluTanh;
impl Function for GeluTanh {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // 2 · √(2/π), since √(2/π) is 2/√π · 1/√2.
        const FACTOR: f32 = SQRT_2 * FRAC_2_SQRT_PI;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let square = V::multiply(v, v);
            let factor = V::multiply_add(square, V::splat(FACTOR * 0.044_715), V::splat(FACTOR));
            V::multiply(v, sigmoid::<V>(V::multiply(v, factor)))
        }
    }
}

/// Exact GELU.
#[derive(Clone, Copy)]
pub struct GeluErf;
impl Function for GeluErf {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, v: V::Floats) -> V::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { V::multiply(v, normal_cdf::<V>(v)) }
    }
}

/// `exp(x)` for x ≤ 0, within 1e-7. It is 0 below
/// −87, where results would be subnormal. The polynomial is the
/// minimax one for |r| up to ln(2) / 2.
#[inline(always)]
pub(super) unsafe fn exp_nonpositive<V: Vector>(x: V::Floats) -> V::Floats {
    // Adding a small number rounds it to an
    // integer, in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let shifted = V::multiply_add(x, V::splat(LOG2_E), V::splat(ROUND));
        let n = V::multiply_add(shifted, V::splat(1.0), V::splat(-ROUND));
        // x − n · ln(2) in two parts; the
        // first is exact.
        let r = V::multiply_add(n, V::splat(-0.693_359_4), x);
        let r = V::multiply_add(n, V::splat(2.121_944_4e-4), r);
        let q =
            polynomial::<V, _>(r, [0.001_381_446_7, 0.008_368_781, 0.041_668_393, 0.166_665_2, 0.499_999_94, 1.0, 1.0]);
        let exponent = V::add(V::float_bits(shifted), V::splat_word(127u32.wrapping_sub(ROUND.to_bits())));
        let power = V::bits_to_floats(V::shift_left(exponent, 23));
        V::where_less(x, V::splat(-87.0), V::splat(0.0), V::multiply(q, power))
    }
}

/// Polynomial with these coefficients, highest first.
#[inline(always)]
unsafe fn polynomial<V: Vector, const N: usize>(x: V::Floats, coefficients: [f32; N]) -> V::Floats {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sum = V::splat(coefficients[0]);
        for &coefficient in &coefficients[1..] {
            sum = V::multiply_add(sum, x, V::splat(coefficient));
        }
        sum
    }
}

/// `1 / (1 + exp(−x))`.
#[inline(always)]
pub(super) unsafe fn sigmoid<V: Vector>(x: V::Floats) -> V::Floats {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let one = V::splat(1.0);
        let negative = V::bits_to_floats(V::or(V::float_bits(x), V::splat_word(1 << 31)));
        let e = exp_nonpositive::<V>(negative);
        V::divide(V::where_less(x, V::splat(0.0), e, one), V::multiply_add(e, one, one))
    }
}

/// `(1 + erf(x / √2)) / 2`, the normal distribution function.
/// Its tail at z = |x| / √2 is
/// `exp(−z²) / 2` times a function of t = 1 /
/// (1 + 0.4 z). The polynomial approximates that function within 1e-7
/// for z up to 9.4; beyond, `exp(−z²)` is 0.
#[inline(always)]
unsafe fn normal_cdf<V: Vector>(x: V::Floats) -> V::Floats {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let one = V::splat(1.0);
        let e = exp_nonpositive::<V>(V::multiply(V::multiply(x, V::splat(-0.5)), x));
        let magnitude = V::bits_to_floats(V::and(V::float_bits(x), 0x7fff_ffff));
        let t = V::divide(one, V::multiply_add(magnitude, V::splat(0.282_842_7), one));
        let q = polynomial::<V, _>(
            t,
            [
                0.072_639_68,
                -0.390_246_42,
                0.684_632_5,
                -0.386_718_9,
                0.427_957_62,
                0.126_142_56,
                0.241_572_8,
                0.223_938_85,
                8.121_467e-5,
            ],
        );
        let twice = V::multiply(e, q);
        let tail = V::multiply(twice, V::splat(0.5));
        V::where_less(x, V::splat(0.0), tail, V::multiply_add(twice, V::splat(-0.5), one))
    }
}

//! Arithmetic of `sampling`: order of logits, weights, random words.
//!
//! Every device computes the same bits: f32 sums and products
//! are rounded one by one, and weights are summed as integers.

/// Order of a token that is excluded: its logit is −∞.
pub const EXCLUDED: u32 = 0;
/// Order of a logit that is NaN or +∞.
pub const NON_FINITE: u32 = u32::MAX;
/// Weight of the best token. Other weights are smaller.
pub const BEST_WEIGHT: u32 = 1 << 31;

/// Logarithm of less than half of the smallest weight.
const LEAST_EXPONENT: f32 = -23.0;
/// ln 2 in two parts; small multiples of the first are exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Taylor coefficients of the exponential, highest first.
const EXP: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
/// Coefficients of `artanh(s) / s` in s², highest first.
const ARTANH: [f32; 5] = [1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0, 1.0];

/// Order-preserving bits of a logit. Both zeros are equal.
#[inline]
pub fn order(logit: f32) -> u32 {
    // Adding 0 makes −0 equal to 0.
    let bits = (logit + 0.0).to_bits();
    let ordered = bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | 1 << 31);
    let special = if logit == f32::NEG_INFINITY { EXCLUDED } else { NON_FINITE };
    if logit.is_finite() { ordered } else { special }
}

/// The finite logit of an order.
#[inline]
pub fn logit_of(order: u32) -> f32 {
    f32::from_bits(if order >> 31 == 1 { order & !(1 << 31) } else { !order })
}

/// Repetition penalty: divides a positive logit, multiplies
/// another one.
#[inline]
pub fn penalized(logit: f32, penalty: f32) -> f32 {
    if logit.is_nan() || logit == f32::INFINITY {
        return logit;
    }
    let penalized = if logit > 0.0 { logit / penalty } else { logit * penalty };
    penalized.min(f32::MAX)
}

/// Weight of a token whose logit is `below` the best (at most 0):
/// `exp(below · inverse_temperature)` in units of 2⁻³¹.
#[inline]
pub fn weight(below: f32, inverse_temperature: f32) -> u32 {
    let exponent = below * inverse_temperature;
    if exponent.is_nan() || exponent < LEAST_EXPONENT {
        return 0;
    }
    let halvings = (exponent * std::f32::consts::LOG2_E - 0.5) as i32;
    let halved = halvings as f32;
    let rest = exponent - halved * LN_2[0] - halved * LN_2[1];
    let power = polynomial(&EXP, rest);
    let scale = f32::from_bits(((127 + 31 + halvings) as u32) << 23);
    (power * scale + 0.5) as u32
}

/// Natural logarithm of a sum of weights, in units of the best one.
/// The sum is at least [`BEST_WEIGHT`].
#[inline]
pub fn log_sum(sum: u64) -> f32 {
    let top = 63 - sum.max(1).leading_zeros();
    let fraction = ((sum << (63 - top)) >> 40) as u32 & 0x7f_ffff;
    let (mut exponent, mut mantissa) = (top as i32 - 31, f32::from_bits(127 << 23 | fraction));
    if mantissa > std::f32::consts::SQRT_2 {
        (exponent, mantissa) = (exponent + 1, mantissa * 0.5);
    }
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let of_mantissa = 2.0 * ratio * polynomial(&ARTANH, ratio * ratio);
    exponent as f32 * LN_2[0] + (exponent as f32 * LN_2[1] + of_mantissa)
}

#[inline]
fn polynomial(coefficients: &[f32], x: f32) -> f32 {
    coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

/// Least weight of a token with probability `min_p` relative to the
/// best token; at least 1.
#[inline]
pub fn least_weight(min_p: f32) -> u32 {
    ((min_p * BEST_WEIGHT as f32 + 0.5) as u32).max(1)
}

/// Part of the total weight that top-p keeps at least; at least 1.
#[inline]
pub fn kept_weight(top_p: f32, total: u64) -> u64 {
    const RANGE: f32 = 4_294_967_296.0;
    if top_p >= 1.0 { total } else { fraction_of(total, (top_p * RANGE) as u32).max(1) }
}

/// Whole part of `total · fraction / 2³²`.
#[inline]
pub fn fraction_of(total: u64, fraction: u32) -> u64 {
    let (high, low) = (total >> 32, total & u64::from(u32::MAX));
    high * u64::from(fraction) + ((low * u64::from(fraction)) >> 32)
}

/// Random word of the token at `position`: Philox4x32-10
/// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
/// It depends on seed and position alone.
#[inline]
pub fn random_word(seed: u64, position: u64) -> u32 {
    philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32])[0]
}

/// Four random words of a counter and a key.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const ROUNDS: u32 = 10;
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    /// The golden ratio and √3 − 1.
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let halves = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        [product as u32, (product >> 32) as u32]
    };
    (0..ROUNDS).fold(counter, |counter, round| {
        let key = [0, 1].map(|i| key[i].wrapping_add(WEYL[i].wrapping_mul(round)));
        let [low0, high0] = halves(MULTIPLIERS[0], counter[0]);
        let [low1, high1] = halves(MULTIPLIERS[1], counter[2]);
        [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        let ones = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected, "{counter:x?}");
        }
    }

    #[test]
    fn random_words_are_uniform_and_depend_on_seed_and_position_alone() {
        const COUNT: u64 = 20_000;
        let mean = (0..COUNT).map(|position| f64::from(random_word(7, position))).sum::<f64>() / COUNT as f64;
        // Five standard deviations.
        assert!((mean / 2f64.powi(32) - 0.5).abs() < 5.0 / (12.0 * COUNT as f64).sqrt(), "{mean}");
        assert_ne!(random_word(7, 3), random_word(8, 3));
        assert_ne!(random_word(7, 3), random_word(7, 3 + (1 << 32)));
        assert_ne!(random_word(7, 3), random_word(7 + (1 << 32), 3));
    }

    #[test]
    fn orders_are_those_of_logits() {
        let logits = [f32::NEG_INFINITY, f32::MIN, -1.5, -1e-45, 0.0, 1e-45, 2.5, f32::MAX, f32::INFINITY];
        let orders = logits.map(order);
        assert!(orders.is_sorted_by(|a, b| a < b), "{orders:x?}");
        assert_eq!(
            (orders[0], orders[8], order(f32::NAN), order(-f32::NAN)),
            (EXCLUDED, NON_FINITE, NON_FINITE, NON_FINITE)
        );
        assert_eq!(order(-0.0), order(0.0));
        for logit in &logits[1..8] {
            assert_eq!(logit_of(order(*logit)), *logit);
        }
    }

    #[test]
    fn weights_are_the_exponentials() {
        assert_eq!((weight(0.0, 1.0), weight(-1e30, 1.0), weight(f32::NEG_INFINITY, 0.5)), (BEST_WEIGHT, 0, 0));
        let mut last = BEST_WEIGHT;
        for i in 0..46_000 {
            let below = i as f32 * -0.0005;
            let (got, expected) = (f64::from(weight(below, 1.0)), f64::from(below).exp() * f64::from(BEST_WEIGHT));
            assert!((got - expected).abs() <= expected * 2.5e-7 + 0.51, "{below}: {got}, expected {expected}");
            assert!(weight(below, 1.0) <= last);
            last = weight(below, 1.0);
        }
        assert_eq!(weight(-2.0, 0.5), weight(-1.0, 1.0));
    }

    #[test]
    fn logarithms_of_sums_are_near_the_exact_ones() {
        let mut sum = u64::from(BEST_WEIGHT);
        while sum < 1 << 52 {
            let expected = (sum as f64 / f64::from(BEST_WEIGHT)).ln();
            let got = f64::from(log_sum(sum));
            assert!((got - expected).abs() <= 2e-7 + 1e-7 * expected, "{sum}: {got}, expected {expected}");
            sum += sum / 37;
        }
        assert_eq!(log_sum(u64::from(BEST_WEIGHT)), 0.0);
    }

    #[test]
    fn parts_of_a_total_are_rounded_down() {
        let total = (1 << 51) + 12_345;
        assert_eq!((fraction_of(total, 0), fraction_of(total, 1 << 31)), (0, total / 2));
        assert_eq!(u128::from(fraction_of(total, 0xdead_beef)), (u128::from(total) * 0xdead_beef) >> 32);
        assert!(fraction_of(total, u32::MAX) < total);
        assert_eq!((kept_weight(0.0, total), kept_weight(1.0, total), kept_weight(0.5, total)), (1, total, total / 2));
        assert_eq!((least_weight(0.0), least_weight(1.0), least_weight(0.5)), (1, BEST_WEIGHT, BEST_WEIGHT / 2));
    }

    #[test]
    fn penalties_lower_a_logit_and_stay_finite() {
        assert_eq!((penalized(3.0, 2.0), penalized(-3.0, 2.0), penalized(0.0, 2.0)), (1.5, -6.0, 0.0));
        assert_eq!((penalized(3e38, 1e-38), penalized(f32::NEG_INFINITY, 0.5)), (f32::MAX, f32::NEG_INFINITY));
        assert!(penalized(f32::NAN, 2.0).is_nan() && penalized(f32::INFINITY, 2.0) == f32::INFINITY);
    }
}

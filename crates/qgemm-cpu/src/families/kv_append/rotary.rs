//! Rotary embedding: cosines and sines of angles, and rotation of a head.

use std::f32::consts::TAU;

use qgemm_hal::{CheckedRotary, RotaryPairs};

/// Cosine and sine of a fraction of a
/// turn, in units of 2⁻⁶⁴.
pub(super) fn cos_sin(turns: u64) -> (f32, f32) {
    // Signed, in units of 2^-32: at most half a turn. f32
    // keeps 24 bits where sine and cosine are steep.
    let nearest = (turns.wrapping_add(1 << 31) >> 32) as u32;
    let quarter = nearest.wrapping_add(1 << 29) >> 30;
    let rest = nearest.wrapping_sub(quarter << 30) as i32;
    let angle = rest as f32 * (TAU / 4_294_967_296.0);
    // Taylor series to the last bit of f32: an angle is at most an eighth
    // of a turn.
    let square = angle * angle;
    let series = |terms: [f32; 5]| terms.iter().fold(0.0, |sum, term| (sum + term) * square);
    let sin = angle + angle * series([0.0, 1.0 / 362_880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0]);
    let cos = 1.0 + series([-1.0 / 3_628_800.0, 1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5]);
    let (cos, sin) = if quarter & 1 == 0 { (cos, sin) } else { (-sin, cos) };
    if quarter & 2 == 0 { (cos, sin) } else { (-cos, -sin) }
}

/// Rotates the pairs of a head.
pub(super) fn turn(rotary: &CheckedRotary, cos: &[f32], sin: &[f32], values: &mut [f32]) {
    let pairs = rotary.dim / 2;
    let angles = cos[..pairs].iter().zip(sin);
    let turned = |a: f32, b: f32, (cos, sin): (&f32, &f32)| (a * cos - b * sin, b * cos + a * sin);
    match rotary.pairs {
        RotaryPairs::Neox => {
            let (first, second) = values[..rotary.dim].split_at_mut(pairs);
            let both = first.iter_mut().zip(second).zip(angles);
            both.for_each(|((a, b), angle)| (*a, *b) = turned(*a, *b, angle));
        }
        RotaryPairs::Interleaved => {
            let both = values[..rotary.dim].as_chunks_mut().0.iter_mut().zip(angles);
            both.for_each(|([a, b], angle)| (*a, *b) = turned(*a, *b, angle));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_turns_have_their_cosines_and_sines() {
        for i in 0..1000u64 {
            let turns = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (sin, cos) = (turns as f64 / 2f64.powi(64) * std::f64::consts::TAU).sin_cos();
            let (got_cos, got_sin) = cos_sin(turns);
            assert!((f64::from(got_cos) - cos).abs() < 2e-7 && (f64::from(got_sin) - sin).abs() < 2e-7, "{i}");
        }
        assert_eq!(cos_sin(1 << 62), (0.0, 1.0));
    }
}

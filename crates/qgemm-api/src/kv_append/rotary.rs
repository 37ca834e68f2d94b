//! Rotary embedding ([`Rotary`]): pairs, frequencies and angles.

use std::f64::consts::TAU;

use qgemm_hal::op::attention::MOST_HEAD_DIM;
use qgemm_hal::{CheckedRotary, RotaryAngles, RotaryPairs};

use crate::error::Error;

/// Frequency scaling for long contexts, relative to `base^(−2i / dim)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// No scaling.
    #[default]
    None,
    /// Position interpolation: all frequencies divided by the factor.
    Linear {
        /// Scaling factor.
        factor: f64,
    },
    /// Llama 3.1: wavelengths above `original / low` are divided by the factor, those below
    /// `original / high` are kept, with a ramp in between.
    Llama3 {
        /// Scaling factor.
        factor: f64,
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
        /// Original context length.
        original: usize,
    },
    /// YaRN: pairs with fewer than `slow` rotations in `original` positions are divided by
    /// the factor, those with more than `fast` are kept, with a ramp in between.
    /// Rotated features are multiplied with `0.1 ln(factor) + 1`.
    Yarn {
        /// Scaling factor.
        factor: f64,
        /// `beta_fast`.
        fast: f64,
        /// `beta_slow`.
        slow: f64,
        /// Original context length.
        original: usize,
        /// Whether the ramp begins and ends at whole pairs, as in most models. gpt-oss states
        /// `truncate: false`.
        truncate: bool,
    },
}

/// Rotary embedding: pairs of rotated features, and their angles.
///
/// An angle is the position times the pair's frequency. Both are exact 64-bit fractions
/// of a full rotation, so that late positions are as exact as early ones.
///
/// ```
/// use qgemm_api::{Rotary, RotaryScaling};
///
/// let llama = Rotary::neox(128).base(500_000.0);
/// let longer = llama.scaling(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 });
/// assert_ne!(llama, longer);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    dim: usize,
    pairs: RotaryPairs,
    angles: Angles,
    amplitude: Option<f32>,
    inverse: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Angles {
    Of { base: f64, scaling: RotaryScaling },
    Tables { positions: usize, row_stride: Option<u64> },
}

impl Rotary {
    /// GPT-NeoX pairing: rotates the first `dim` features of a head in pairs
    /// `(i, i + dim / 2)`. Base 10000.
    pub fn neox(dim: usize) -> Self {
        let angles = Angles::Of { base: 10_000.0, scaling: RotaryScaling::None };
        Self { dim, pairs: RotaryPairs::Neox, angles, amplitude: None, inverse: false }
    }

    /// Interleaved pairing (GPT-J): rotates the first `dim` features of a head in pairs
    /// `(2i, 2i + 1)`. Base 10000.
    pub fn interleaved(dim: usize) -> Self {
        Self { pairs: RotaryPairs::Interleaved, ..Self::neox(dim) }
    }

    /// Frequency base (theta): pair `i` has frequency `base^(−2i / dim)`,
    /// in radians per position.
    pub fn base(mut self, base: f64) -> Self {
        let scaling = if let Angles::Of { scaling, .. } = self.angles { scaling } else { RotaryScaling::None };
        self.angles = Angles::Of { base, scaling };
        self
    }

    /// Frequency scaling.
    pub fn scaling(mut self, scaling: RotaryScaling) -> Self {
        let base = self.stated_base();
        self.angles = Angles::Of { base, scaling };
        self
    }

    /// Angles from tables instead of frequencies
    /// ([`KvAppendArgs::cos`](crate::KvAppendArgs::cos) and `sin`).
    ///
    /// A table is f32 with `positions` rows of `dim / 2`. Tokens of later
    /// positions are not rotated.
    pub fn tables(mut self, positions: usize) -> Self {
        self.angles = Angles::Tables { positions, row_stride: None };
        self
    }

    /// Tables of cosines and sines of the first `positions` positions, each `positions` rows of
    /// `dim / 2`, for [`Rotary::tables`].
    ///
    /// The frequency of each pair, before any scaling, is divided by its factor: `rope_freqs`
    /// of GGUF files.
    ///
    /// # Errors
    /// [`Error::RotaryFactors`] when there is not one factor a pair;
    /// [`Error::ExtentOverflow`].
    pub fn cos_and_sin(&self, factors: &[f32], positions: usize) -> Result<[Vec<f32>; 2], Error> {
        let (pairs, base) = (self.dim / 2, self.stated_base());
        if factors.len() != pairs {
            return Err(Error::RotaryFactors { expected: pairs, got: factors.len() });
        }
        if positions.checked_mul(pairs).and_then(|values| values.checked_mul(8)).is_none() {
            let (rows, row_stride) = (positions as u64, pairs as u64);
            return Err(Error::ExtentOverflow { operand: "cos and sin", rows, row_stride });
        }
        let frequency =
            |(pair, factor): (usize, &f32)| base.powf(-2.0 * pair as f64 / self.dim as f64) / f64::from(*factor);
        let frequencies: Vec<f64> = factors.iter().enumerate().map(frequency).collect();
        let table = |of: fn(f64) -> f64| {
            let row = |position: usize| frequencies.iter().map(move |f| of(position as f64 * f) as f32);
            (0..positions).flat_map(row).collect()
        };
        Ok([table(f64::cos), table(f64::sin)])
    }

    fn stated_base(&self) -> f64 {
        if let Angles::Of { base, .. } = self.angles { base } else { 10_000.0 }
    }

    /// Row stride of the tables in elements. Call after [`Rotary::tables`].
    pub fn table_row_stride(mut self, elements: u64) -> Self {
        if let Angles::Tables { row_stride, .. } = &mut self.angles {
            *row_stride = Some(elements);
        }
        self
    }

    /// Factor of rotated features (YaRN's `attention_factor`),
    /// instead of that of the scaling.
    pub fn amplitude(mut self, factor: f32) -> Self {
        self.amplitude = Some(factor);
        self
    }

    /// Inverse rotation: by −φ, divided by the amplitude, and after a Hadamard rotation instead
    /// of before. It undoes the rotary embedding of the same numbers.
    pub fn inverse(mut self) -> Self {
        self.inverse = true;
        self
    }

    /// Validates it for heads of `head_dim` features.
    pub(super) fn check(&self, head_dim: usize) -> Result<CheckedRotary, Error> {
        let &Self { dim, pairs, angles, amplitude, inverse } = self;
        if dim == 0 || dim > head_dim.min(MOST_HEAD_DIM) || !dim.is_multiple_of(2) {
            return Err(Error::RotaryDim { head_dim, got: dim });
        }
        let amplitude = amplitude.unwrap_or_else(|| self.own_amplitude() as f32);
        let amplitude = if inverse { amplitude.recip() } else { amplitude };
        if !amplitude.is_finite() {
            return Err(Error::NonFiniteScalar { name: "amplitude", got: amplitude });
        }
        let angles = match angles {
            Angles::Of { .. } => {
                let wrong = self.wrong_number();
                wrong.map_or(Ok(()), |(name, got)| Err(Error::RotaryNumber { name, got }))?;
                RotaryAngles::Frequencies
            }
            Angles::Tables { positions, row_stride } => {
                let pairs = (dim / 2) as u64;
                let row_stride = row_stride.unwrap_or(pairs);
                if row_stride < pairs {
                    return Err(Error::StrideTooSmall { operand: "cos and sin", expected: pairs, got: row_stride });
                }
                let last = (positions as u64).saturating_sub(1).checked_mul(row_stride);
                let bytes = last.and_then(|last| last.checked_add(pairs)?.checked_mul(4));
                if u32::try_from(positions).is_err() || bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
                    return Err(Error::ExtentOverflow { operand: "cos and sin", rows: positions as u64, row_stride });
                }
                RotaryAngles::Tables { positions, row_stride }
            }
        };
        Ok(CheckedRotary { dim, pairs, angles, amplitude, inverse })
    }

    /// First parameter of base and scaling that is out of range.
    fn wrong_number(&self) -> Option<(&'static str, f64)> {
        let Angles::Of { base, scaling } = self.angles else { return None };
        let positive = |number: f64| number.is_finite() && number > 0.0;
        let of_scaling = match scaling {
            RotaryScaling::None => [("factor", 1.0), ("low", 1.0), ("high", 2.0)],
            RotaryScaling::Linear { factor } => [("factor", factor), ("low", 1.0), ("high", 2.0)],
            RotaryScaling::Llama3 { factor, low, high, .. } => [("factor", factor), ("low", low), ("high", high)],
            RotaryScaling::Yarn { factor, slow, fast, .. } => [("factor", factor), ("slow", slow), ("fast", fast)],
        };
        if !positive(base) || base < 1.0 {
            return Some(("base", base));
        }
        let wrong = of_scaling.into_iter().find(|(_, number)| !positive(*number));
        // A factor close to 0 makes frequencies overflow.
        let is_beyond = |pair| !scaled(scaling, base, self.dim, pair).is_finite();
        wrong
            .or_else(|| (of_scaling[1].1 >= of_scaling[2].1).then_some(of_scaling[2]))
            .or_else(|| (0..self.dim / 2).any(is_beyond).then_some(of_scaling[0]))
    }

    fn own_amplitude(&self) -> f64 {
        match self.angles {
            Angles::Of { scaling: RotaryScaling::Yarn { factor, .. }, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// Frequencies of all pairs, in units of 2⁻⁶⁴ rotations per position. None with tables.
    pub(super) fn frequencies(&self) -> Option<Vec<u64>> {
        let Angles::Of { base, scaling } = self.angles else { return None };
        let pairs = self.dim / 2;
        let turns = (0..pairs).map(|pair| {
            let radians = scaled(scaling, base, self.dim, pair);
            (radians / TAU).fract()
        });
        // Below 1, so the product fits.
        Some(turns.map(|turns| (turns * 2f64.powi(64)) as u64).collect())
    }
}

/// Frequency of a pair, in radians per position.
fn scaled(scaling: RotaryScaling, base: f64, dim: usize, pair: usize) -> f64 {
    let plain = base.powf(-2.0 * pair as f64 / dim as f64);
    match scaling {
        RotaryScaling::None => plain,
        RotaryScaling::Linear { factor } => plain / factor,
        RotaryScaling::Llama3 { factor, low, high, original } => {
            // Rotations within the original context length.
            let waves = original as f64 * plain / TAU;
            let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            plain * (kept + (1.0 - kept) / factor)
        }
        RotaryScaling::Yarn { factor, fast, slow, original, truncate } => {
            // Pair with so many rotations in the original context.
            let pair_of =
                |turns: f64| dim as f64 * (original as f64 / (turns * TAU)).ln() / (2.0 * base.max(1.0 + 1e-9).ln());
            let whole = |pair: f64, round: fn(f64) -> f64| if truncate { round(pair) } else { pair };
            let first = whole(pair_of(fast), f64::floor).max(0.0);
            let last = whole(pair_of(slow), f64::ceil).min(dim as f64 - 1.0);
            let divided = ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0);
            plain * (1.0 - divided + divided / factor)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_parts_of_turns() {
        let all = Rotary::neox(4).base(100.0).frequencies().expect("no tables");
        let radians = |frequency: u64| frequency as f64 / 2f64.powi(64) * TAU;
        assert!((radians(all[0]) - 1.0).abs() < 1e-12 && (radians(all[1]) - 0.1).abs() < 1e-12, "{all:?}");
        assert!(Rotary::neox(4).tables(7).frequencies().is_none());
    }

    #[test]
    fn factors_divide_the_angles_of_tables() {
        let [cos, sin] = Rotary::neox(4).base(100.0).cos_and_sin(&[1.0, 8.0], 3).expect("a factor a pair");
        let angles = [0.0f32, 0.0, 1.0, 0.1 / 8.0, 2.0, 0.2 / 8.0];
        for ((cos, sin), angle) in cos.into_iter().zip(sin).zip(angles) {
            assert!((cos - angle.cos()).abs() < 1e-6 && (sin - angle.sin()).abs() < 1e-6, "{cos} {sin} {angle}");
        }
        let refused = Rotary::neox(4).cos_and_sin(&[1.0], 3);
        assert!(matches!(refused, Err(Error::RotaryFactors { expected: 2, got: 1 })));
        assert!(Rotary::neox(4).cos_and_sin(&[1.0, 1.0], usize::MAX).is_err());
    }

    #[test]
    fn scalings_keep_fast_pairs_and_divide_slow_ones() {
        for scaling in [
            RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 },
            RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: 1.0, original: 8192, truncate: true },
            RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: 1.0, original: 8192, truncate: false },
        ] {
            let ratio =
                |pair| scaled(scaling, 500_000.0, 128, pair) / scaled(RotaryScaling::None, 500_000.0, 128, pair);
            assert!((ratio(0) - 1.0).abs() < 1e-12 && (ratio(63) - 0.125).abs() < 1e-12, "{scaling:?}");
            assert!((1..64).all(|pair| ratio(pair) <= ratio(pair - 1) + 1e-12), "{scaling:?}");
        }
    }

    #[test]
    fn what_is_no_number_to_compute_with_is_named() {
        let name = |rotary: Rotary| match rotary.check(64) {
            Err(Error::RotaryNumber { name, .. } | Error::NonFiniteScalar { name, .. }) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(name(Rotary::neox(64).base(0.0)), "base");
        assert_eq!(name(Rotary::neox(64).scaling(RotaryScaling::Linear { factor: f64::NAN })), "factor");
        let upside_down = RotaryScaling::Llama3 { factor: 8.0, low: 4.0, high: 1.0, original: 8192 };
        assert_eq!(name(Rotary::neox(64).scaling(upside_down)), "high");
        assert_eq!(name(Rotary::neox(64).amplitude(f32::INFINITY)), "amplitude");
        assert_eq!(name(Rotary::neox(64).amplitude(0.0).inverse()), "amplitude");
        assert!(matches!(Rotary::neox(66).check(64), Err(Error::RotaryDim { got: 66, .. })));
    }
}

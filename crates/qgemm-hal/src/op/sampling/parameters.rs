//! [`SamplingParameters`] of a row, as kernels read them.

/// Sampling parameters of a row. The default is argmax.
///
/// They apply in this order: repetition penalty, temperature,
/// top-k, top-p, min-p. What remains is normalized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParameters {
    /// Divisor of logits; finite. Below `f32::MIN_POSITIVE` it is
    /// argmax: the lowest id wins a tie.
    pub temperature: f32,
    /// Number of most likely tokens that remain; the lower id wins
    /// a tie. 0 keeps all.
    pub top_k: u32,
    /// Least probability that the most likely tokens have together,
    /// from 0 (the best token alone) to 1 (all).
    pub top_p: f32,
    /// Least probability of a token, relative to the best token,
    /// from 0 (all) to 1.
    pub min_p: f32,
    /// Divisor of positive logits of earlier tokens, and factor of
    /// negative ones; finite and positive. 1 changes nothing.
    pub repetition_penalty: f32,
    /// Seed of the random word.
    pub seed: u64,
    /// Position of the sampled token. Each has its random word.
    pub position: u64,
}

impl Default for SamplingParameters {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0, position: 0 }
    }
}

/// A parameter that kernels refuse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RefusedParameter {
    /// Index in [`SamplingParameters::NAMES`].
    pub index: usize,
    /// The value.
    pub got: f32,
}

impl SamplingParameters {
    /// Words of a row of parameters in memory.
    pub const WORDS: usize = 10;

    /// Names and valid values of the parameters that can be
    /// invalid, in the order in which they are checked.
    pub const NAMES: [(&'static str, &'static str); 4] = [
        ("temperature", "a finite number of at least 0"),
        ("top-p", "0 to 1"),
        ("min-p", "0 to 1"),
        ("repetition penalty", "a finite number above 0"),
    ];

    /// The first invalid parameter.
    pub fn refused(&self) -> Option<RefusedParameter> {
        let share = |value: f32| (0.0..=1.0).contains(&value);
        let (temperature, penalty) = (self.temperature, self.repetition_penalty);
        let checks = [
            (temperature, temperature.is_finite() && temperature >= 0.0),
            (self.top_p, share(self.top_p)),
            (self.min_p, share(self.min_p)),
            (penalty, penalty.is_finite() && penalty > 0.0),
        ];
        let refused = checks.into_iter().enumerate().find(|(_, (_, is_valid))| !is_valid);
        refused.map(|(index, (got, _))| RefusedParameter { index, got })
    }

    /// The words that kernels read: temperature, top-k, top-p, min-p,
    /// repetition penalty, 0, then seed and position, low words first.
    pub fn words(&self) -> [u32; Self::WORDS] {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, seed, position } = *self;
        let low_and_high = |value: u64| [value as u32, (value >> 32) as u32];
        let ([seed_low, seed_high], [position_low, position_high]) = (low_and_high(seed), low_and_high(position));
        let [temperature, top_p, min_p, penalty] = [temperature, top_p, min_p, repetition_penalty].map(f32::to_bits);
        [temperature, top_k, top_p, min_p, penalty, 0, seed_low, seed_high, position_low, position_high]
    }

    /// The parameters of these [words](Self::words).
    pub fn of_words(words: &[u32; Self::WORDS]) -> Self {
        let &[temperature, top_k, top_p, min_p, penalty, _, seed_low, seed_high, position_low, position_high] = words;
        let joined = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Self {
            temperature: f32::from_bits(temperature),
            top_k,
            top_p: f32::from_bits(top_p),
            min_p: f32::from_bits(min_p),
            repetition_penalty: f32::from_bits(penalty),
            seed: joined(seed_low, seed_high),
            position: joined(position_low, position_high),
        }
    }

    /// Whether the best token is chosen without a draw.
    pub fn is_argmax(&self) -> bool {
        self.temperature < f32::MIN_POSITIVE || self.top_k == 1 || self.top_p == 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_every_parameter() {
        let parameters = SamplingParameters {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.1,
            seed: 0x0123_4567_89ab_cdef,
            position: 1 << 40 | 5,
        };
        assert_eq!(SamplingParameters::of_words(&parameters.words()), parameters);
    }

    #[test]
    fn parameters_out_of_range_are_found() {
        let fine = SamplingParameters::default();
        assert_eq!(fine.refused(), None);
        let bad = [
            SamplingParameters { temperature: f32::INFINITY, ..fine },
            SamplingParameters { top_p: 1.5, ..fine },
            SamplingParameters { min_p: f32::NAN, ..fine },
            SamplingParameters { repetition_penalty: 0.0, ..fine },
        ];
        for (index, parameters) in bad.into_iter().enumerate() {
            assert_eq!(parameters.refused().map(|refused| refused.index), Some(index), "{parameters:?}");
        }
    }
}

//! A case of `sampling`, as data.

use std::fmt;

use qgemm_api::SamplingParameters;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Kind of a case's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingLogits {
    /// As a model's: a sum of uniform numbers, many of each size.
    Bell,
    /// Few different values, so that many tokens tie.
    Ties,
    /// All equal.
    Equal,
    /// Large and small magnitudes of both signs, zeros, subnormals.
    Extremes,
    /// Half of the tokens are excluded.
    Masked,
    /// Some rows have a NaN, an infinity, or no candidate.
    Faulty,
}

impl SamplingLogits {
    /// All kinds.
    pub const ALL: [Self; 6] = [Self::Bell, Self::Ties, Self::Equal, Self::Extremes, Self::Masked, Self::Faulty];
}

/// Parameters of a case's rows; values differ between rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingRules {
    /// Temperature 0.
    Argmax,
    /// Temperature alone.
    Temperature,
    /// Temperature and top-k, of more than the vocabulary as well.
    TopK,
    /// Temperature and top-p.
    TopP,
    /// Temperature and min-p.
    MinP,
    /// All parameters.
    All,
    /// Some rows have an invalid parameter.
    Invalid,
}

impl SamplingRules {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Argmax, Self::Temperature, Self::TopK, Self::TopP, Self::MinP, Self::All, Self::Invalid];
}

/// A sampling to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingCase {
    /// Rows of logits.
    pub rows: usize,
    /// Logits of a row.
    pub vocabulary: usize,
    /// Kind of the logits.
    pub logits: SamplingLogits,
    /// Kind of the parameters.
    pub rules: SamplingRules,
    /// Maximum earlier tokens of a row, for the repetition penalty.
    pub earlier: Option<usize>,
    /// Alternatives, if log-probabilities are written.
    pub log_probabilities: Option<usize>,
    /// Elements between the rows of logits and of earlier tokens.
    pub gap: usize,
    /// Offset of all operands from an aligned address, in words.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl SamplingCase {
    /// Logits of a model, contiguous rows, no penalty and no
    /// log-probabilities.
    pub fn new(rows: usize, vocabulary: usize, rules: SamplingRules) -> Self {
        let logits = SamplingLogits::Bell;
        Self { rows, vocabulary, logits, rules, earlier: None, log_probabilities: None, gap: 0, offset: 0, seed: 1 }
    }

    fn rng(&self, of: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ of << 32 ^ 0x5a3b_0000_0000_0000)
    }

    /// The logits, row by row without gaps.
    pub(super) fn logits(&self) -> Vec<f32> {
        let mut rng = self.rng(1);
        let mut logits: Vec<f32> = (0..self.rows * self.vocabulary).map(|_| self.logit(&mut rng)).collect();
        if self.logits == SamplingLogits::Faulty {
            for (row, logits) in logits.chunks_exact_mut(self.vocabulary).enumerate() {
                let at = rng.random_range(0..self.vocabulary);
                match row % 5 {
                    0 => logits[at] = f32::NAN,
                    1 => logits[at..].fill(f32::INFINITY),
                    2 => logits.fill(f32::NEG_INFINITY),
                    3 => (logits[at], logits[self.vocabulary - 1]) = (f32::INFINITY, f32::NAN),
                    _ => {}
                }
            }
        }
        logits
    }

    fn logit(&self, rng: &mut StdRng) -> f32 {
        let bell = |rng: &mut StdRng| (0..8).map(|_| rng.random_range(-2.5f32..2.5)).sum::<f32>();
        match self.logits {
            SamplingLogits::Bell | SamplingLogits::Faulty => bell(rng),
            SamplingLogits::Ties => rng.random_range(-2i32..3) as f32,
            SamplingLogits::Equal => -3.25,
            SamplingLogits::Extremes => match rng.random_range(0..8) {
                0 => rng.random_range(-1.0f32..1.0) * 3e38,
                1 => rng.random_range(-1.0f32..1.0) * 1e-38,
                2 => -0.0,
                3 => 0.0,
                _ => rng.random_range(-9.0..9.0),
            },
            SamplingLogits::Masked if rng.random_bool(0.5) => f32::NEG_INFINITY,
            SamplingLogits::Masked => bell(rng),
        }
    }

    /// The parameters of the rows.
    pub(super) fn parameters(&self) -> Vec<SamplingParameters> {
        let mut rng = self.rng(2);
        (0..self.rows).map(|row| self.parameters_of(row, &mut rng)).collect()
    }

    fn parameters_of(&self, row: usize, rng: &mut StdRng) -> SamplingParameters {
        use SamplingRules as R;
        let temperature = [1.0, 0.7, 1.5, 4.0, 0.05][rng.random_range(0..5)];
        let vocabulary = self.vocabulary as u32;
        let top_k = [1, 2, 3, 40, vocabulary / 2 + 1, vocabulary, vocabulary + 7, u32::MAX][rng.random_range(0..8)];
        let top_p = [0.0, 0.1, 0.5, 0.9, 0.999, 1e-9][rng.random_range(0..6)];
        let min_p = [1.0, 0.5, 0.05, 1e-6][rng.random_range(0..4)];
        let rules = self.rules;
        let of = |rule: R| rules == rule || rules == R::All;
        let repetition_penalty = match self.earlier {
            Some(_) => [1.0, 1.3, 2.0, 0.5, 1e-38][rng.random_range(0..5)],
            None => 1.0,
        };
        let valid = SamplingParameters {
            temperature: if rules == R::Argmax { 0.0 } else { temperature },
            top_k: if of(R::TopK) { top_k } else { 0 },
            top_p: if of(R::TopP) { top_p } else { 1.0 },
            min_p: if of(R::MinP) { min_p } else { 0.0 },
            repetition_penalty,
            seed: rng.random(),
            position: rng.random(),
        };
        match rules {
            R::Invalid if row % 3 < 2 => match rng.random_range(0..6) {
                0 => SamplingParameters { temperature: -0.5, ..valid },
                1 => SamplingParameters { temperature: f32::NAN, min_p: 7.0, ..valid },
                2 => SamplingParameters { top_p: 1.5, ..valid },
                3 => SamplingParameters { min_p: -0.1, repetition_penalty: f32::INFINITY, ..valid },
                4 => SamplingParameters { repetition_penalty: 0.0, ..valid },
                _ => SamplingParameters { temperature: f32::INFINITY, ..valid },
            },
            _ => valid,
        }
    }

    /// Earlier tokens of each row: some repeated, some outside of the
    /// vocabulary. A length above the capacity is clamped.
    pub(super) fn earlier(&self) -> (Vec<u32>, Vec<u32>) {
        let mut rng = self.rng(3);
        let capacity = self.earlier.unwrap_or(0);
        let mut id = || match rng.random_range(0..10) {
            0 => u32::MAX,
            1 => self.vocabulary as u32,
            2 => 0,
            _ => rng.random_range(0..self.vocabulary as u32),
        };
        let ids = (0..self.rows * capacity).map(|_| id()).collect();
        let length = |row: usize| [capacity as u32, 0, capacity as u32 / 2, u32::MAX][row % 4];
        (ids, (0..self.rows).map(length).collect())
    }
}

/// A line for tables: `3x1000 Bell TopK`, then non-default fields.
impl fmt::Display for SamplingCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, vocabulary, logits, rules, earlier, log_probabilities, gap, offset, seed } = self;
        write!(f, "{rows}x{vocabulary} {logits:?} {rules:?}")?;
        if let Some(capacity) = earlier {
            write!(f, " earlier={capacity}")?;
        }
        if let Some(alternatives) = log_probabilities {
            write!(f, " alternatives={alternatives}")?;
        }
        for (name, value) in [("gap", gap), ("offset", offset)] {
            if *value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}

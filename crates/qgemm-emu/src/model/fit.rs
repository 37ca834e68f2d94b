//! Comparison of models with recordings of a chip, and
//! search for the best parameters.

use super::{Accumulator, Aligned, Class, Collective, NO_WORDS, Order, Precision, Rounding, Sum, WarpWords};

/// One execution of an operation by one warp of a chip.
#[derive(Clone)]
pub struct Recording {
    /// Inputs of the lanes, words as in [`Collective::inputs`].
    pub inputs: WarpWords,
    /// Outputs of the lanes.
    pub outputs: WarpWords,
}

/// A word that model and chip compute differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Index of the recording.
    pub recording: usize,
    /// Lane of the word.
    pub lane: usize,
    /// Index of the lane's output word.
    pub word: usize,
    /// The model's bits.
    pub model: u32,
    /// The chip's bits.
    pub recorded: u32,
}

/// Agreement of a model with recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Output words compared.
    pub words: usize,
    /// Words that are equal in all bits, or NaN
    /// in both for floats.
    pub equal: usize,
    /// The first different word.
    pub first_difference: Option<Difference>,
}

impl Agreement {
    /// Whether every word is equal.
    pub fn is_full(&self) -> bool {
        self.equal == self.words
    }
}

/// Runs the model of `op` on the recorded inputs and compares.
pub fn agreement(op: &Collective, recordings: &[Recording], precision: &Precision) -> Agreement {
    let mut agreement = Agreement { words: 0, equal: 0, first_difference: None };
    for (recording, Recording { inputs, outputs }) in recordings.iter().enumerate() {
        let mut computed = NO_WORDS;
        (op.run)(inputs, &mut computed, precision);
        for (lane, (computed, recorded)) in computed.iter().zip(outputs).enumerate() {
            for (word, (&model, &recorded)) in computed.iter().zip(recorded).take(op.outputs).enumerate() {
                let both_nan = [model, recorded].into_iter().all(|bits| f32::from_bits(bits).is_nan());
                agreement.words += 1;
                if model == recorded || op.class == Class::FloatMma && both_nan {
                    agreement.equal += 1;
                } else {
                    let difference = Difference { recording, lane, word, model, recorded };
                    agreement.first_difference.get_or_insert(difference);
                }
            }
        }
    }
    agreement
}

/// All sums that chips are known or likely to use, for
/// instructions without block scales.
pub fn candidates() -> Vec<Sum> {
    let mut sums = vec![Sum::Wide, Sum::FmaChain];
    for group_k in [4, 8, 16, 32] {
        for fraction_bits in [13, 22, 23, 24, 25, 26] {
            for rounding in [
                Rounding::TowardZero { fraction_bits: 23 },
                Rounding::TowardZero { fraction_bits: 13 },
                Rounding::NearestEven,
            ] {
                for order in [Order::Natural, Order::PairsOfFour] {
                    for accumulator in [Accumulator::WithProducts, Accumulator::After] {
                        for least_exponent in [-133, -132, -126] {
                            let how = Aligned { group_k, fraction_bits, least_exponent, rounding, order, accumulator };
                            sums.push(Sum::Aligned(how));
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Agreement of every candidate with the recordings, best first.
pub fn fit(op: &Collective, recordings: &[Recording]) -> Vec<(Sum, Agreement)> {
    let mut fits: Vec<(Sum, Agreement)> =
        candidates().into_iter().map(|sum| (sum, agreement(op, recordings, &Precision::uniform(sum)))).collect();
    fits.sort_by_key(|(_, agreement)| std::cmp::Reverse(agreement.equal));
    fits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::COLLECTIVES;
    use qgemm_hal::Variant;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    fn recorded(op: &Collective, precision: &Precision) -> Vec<Recording> {
        let mut rng = StdRng::seed_from_u64(7);
        std::iter::repeat_with(|| {
            // f16 halves of magnitude 2^-8 to 2^7, and f32 accumulators likewise.
            let mut half = || rng.random_range(0x1c00..0x5800u32) | rng.random_range(0..2) << 15;
            let mut inputs = NO_WORDS;
            for words in &mut inputs {
                for word in &mut words[..op.inputs - op.outputs] {
                    *word = half() << 16 | half();
                }
                for word in &mut words[op.inputs - op.outputs..op.inputs] {
                    *word = half::f16::from_bits(half() as u16).to_f32().to_bits();
                }
            }
            let mut outputs = NO_WORDS;
            (op.run)(&inputs, &mut outputs, precision);
            Recording { inputs, outputs }
        })
        .take(4)
        .collect()
    }

    #[test]
    fn a_fit_finds_the_parameters_that_made_the_recordings() {
        let op = COLLECTIVES.iter().find(|op| op.name == "mma_m16n8k16_f16").expect("in the table");
        for variant in [Variant::Sm80, Variant::Sm90] {
            let recordings = recorded(op, &Precision::of(variant));
            let fits = fit(op, &recordings);
            assert!(fits[0].1.is_full());
            let full: Vec<Sum> =
                fits.iter().filter(|(_, agreement)| agreement.is_full()).map(|(sum, _)| *sum).collect();
            assert!(full.contains(&Precision::of(variant).half), "{variant}: {full:?}");
            // These numbers cannot distinguish an exponent that nothing
            // reaches, and groups beyond K.
            let Sum::Aligned(right) = Precision::of(variant).half else { panic!("chips align") };
            for sum in full {
                let Sum::Aligned(how) = sum else { panic!("{sum:?} agrees") };
                let same_groups = how.group_k.min(16) == right.group_k.min(16);
                assert!(
                    same_groups && how.fraction_bits == right.fraction_bits && how.rounding == right.rounding,
                    "{sum:?}"
                );
            }
        }
    }

    #[test]
    fn a_difference_is_found_and_named() {
        let op = COLLECTIVES.iter().find(|op| op.name == "mma_m16n8k8_f16").expect("in the table");
        let mut recordings = recorded(op, &Precision::WIDE);
        assert!(agreement(op, &recordings, &Precision::WIDE).is_full());
        recordings[2].outputs[9][1] ^= 1;
        let found = agreement(op, &recordings, &Precision::WIDE);
        assert_eq!((found.words, found.equal), (4 * 32 * 4, 4 * 32 * 4 - 1));
        let difference = found.first_difference.expect("one");
        assert_eq!((difference.recording, difference.lane, difference.word), (2, 9, 1));
        assert_eq!(difference.model, difference.recorded ^ 1);
        // NaNs are equal whatever their payload.
        recordings[2].outputs[9][1] ^= 1;
        recordings[0].inputs[0][3] = 0x7f80_0001;
        recordings[0].outputs[0][0] = 0xffc1_2345;
        assert!(agreement(op, &recordings, &Precision::WIDE).is_full());
    }
}

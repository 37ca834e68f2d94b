//! Random cases of `gemm`: any shape, format, layout and epilogue
//! from one seed.

use qgemm_formats::{DType, Encoding, Format, XFormat};
use qgemm_hal::{Activation, NormKind};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::activation::OF_PAIRS;
use super::case::{ActOrder, Case, Epilogue, Layout};
use crate::activations::ActivationKind;
use crate::random::{gap, pick, skewed};
use crate::weights::WeightKind;

/// Largest output and depth of a random case, limited by the
/// oracle's speed.
const MAX_TOKENS: usize = 300;
const MAX_FEATURES: usize = 700;
const MAX_DEPTH: usize = 3000;
/// Largest depth of exact cases, a multiple of every block.
/// The widest codes (Q6_K's, 2^12 with sub-scales) times integers
/// up to 2 then fit the 24 bits of f32.
const MAX_EXACT_DEPTH: usize = 1024;

/// The random case of `seed`, in one of `formats`. The same
/// arguments give the same case.
///
/// # Panics
/// When `formats` is empty.
pub fn random_case(formats: &[Format], seed: u64) -> Case {
    let rng = &mut StdRng::seed_from_u64(seed);
    let format = pick(rng, formats);
    let depth = skewed(rng, MAX_DEPTH);
    let k = if format.ragged_k { depth } else { depth.next_multiple_of(format.block_len) };
    let (m, n) = (skewed(rng, MAX_TOKENS), skewed(rng, MAX_FEATURES));
    let x_dtype = pick(rng, &DType::ALL);
    let weights = pick(rng, &WeightKind::ALL);
    let activations = pick(rng, &ActivationKind::ALL);
    let k = if weights == WeightKind::Exact { k.min(MAX_EXACT_DEPTH) } else { k };
    // Extreme values with narrow outputs are drawn below.
    let tame = matches!(weights, WeightKind::Quantized | WeightKind::Raw) && activations != ActivationKind::Denormals;
    let d_dtype = if tame { pick(rng, &DType::ALL) } else { DType::F32 };
    let grouped = format.encoding == Encoding::IntZero;
    let gated = rng.random_ratio(1, 5);
    let case = Case {
        x_dtype,
        d_dtype,
        weights,
        activations,
        act_order: match grouped && rng.random_ratio(1, 4) {
            true => Some(pick(rng, &[ActOrder::Full, ActOrder::Padded])),
            false => None,
        },
        epilogue: Epilogue {
            alpha: match gated {
                // Products of two sums would overflow f16.
                true => 0.0625,
                false if rng.random_ratio(1, 3) => pick(rng, &[-1.0, 0.5, 3.0, 0.0625]),
                false => 1.0,
            },
            c: (!gated && rng.random_ratio(1, 4)).then(|| (pick(rng, &[0.0, 1.0, -0.5]), pick(rng, &DType::ALL))),
            bias: rng.random_ratio(1, 3).then(|| pick(rng, &DType::ALL)),
            token_scale: rng.random_ratio(1, 4),
            channel_scale: rng.random_ratio(1, 4),
            activation: match rng.random() {
                true if gated && rng.random_ratio(1, 3) => pick(rng, &OF_PAIRS),
                true => pick(rng, &Activation::ALL),
                false => Activation::Identity,
            },
            residual: rng.random_ratio(1, 4).then(|| pick(rng, &DType::ALL)),
        },
        gated,
        layout: Layout {
            x_transposed: rng.random_ratio(1, 6),
            w_transposed: !gated && matches!(format.encoding, Encoding::Plain(_)) && rng.random(),
            x_gap: gap(rng, 40),
            d_gap: gap(rng, 40),
            c_gap: gap(rng, 40),
            residual_gap: gap(rng, 40),
            offset: if rng.random_ratio(1, 4) { rng.random_range(1..8) } else { 0 },
        },
        batch_invariant: rng.random_ratio(1, 8),
        seed,
        ..Case::new(format, m, n, k)
    };
    // Norms of ordinary rows only: extreme weights or activations
    // would overflow.
    let case = match tame && !case.layout.x_transposed && rng.random_ratio(1, 6) {
        true => Case {
            norm: Some(pick(rng, &NormKind::ALL)),
            normed_dtype: rng.random_ratio(1, 3).then(|| pick(rng, &DType::ALL)),
            activations: ActivationKind::Normal,
            ..case
        },
        false => case,
    };
    // Transposed weights are loaded from plain values.
    let w_transposed = case.layout.w_transposed && !case.epilogue.channel_scale;
    let case = Case { layout: Layout { w_transposed, ..case.layout }, ..case };
    // Quantized formats follow the plain ones. Norms never read
    // them, and some write them.
    let codes = &XFormat::ALL[DType::ALL.len()..];
    let case = match case.norm.is_none() && rng.random_ratio(1, 5) {
        true => case.with_x_format(pick(rng, codes)),
        false => case,
    };
    let case = match case.norm.is_some() && rng.random_ratio(1, 3) {
        true => Case { normed_dtype: None, normed_format: Some(pick(rng, codes)), ..case },
        false => case,
    };
    // Overflow of a narrow output is an infinity; near the end of
    // its range either that or a number.
    match !tame && rng.random_ratio(1, 3) {
        true => Case { d_dtype: pick(rng, &[DType::F16, DType::BF16]), ..case },
        false => case,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Main loops have stages of up to 128 columns. If K is shorter,
    /// the rest of a stage was never written.
    #[test]
    fn a_tenth_of_the_cases_have_less_k_than_a_stage() {
        let formats: Vec<Format> = Format::all().collect();
        let short = (0..1000).filter(|&seed| random_case(&formats, seed).k < 128).count();
        assert!(short >= 100, "{short} of 1000");
    }

    #[test]
    fn a_seed_is_a_case_that_suits_its_format() {
        let formats: Vec<Format> = Format::all().collect();
        for seed in 0..2000 {
            let case = random_case(&formats, seed);
            assert_eq!(case, random_case(&formats, seed));
            case.format.check_k(case.k).unwrap_or_else(|e| panic!("{case}: {e}"));
        }
        assert_ne!(random_case(&formats, 1), random_case(&formats, 2));
    }

    #[test]
    fn norms_that_write_codes_and_narrow_outputs_of_extreme_weights_are_drawn() {
        let formats: Vec<Format> = Format::all().collect();
        let cases: Vec<Case> = (0..4000).map(|seed| random_case(&formats, seed)).collect();
        assert!(cases.iter().filter(|case| case.normed_format.is_some()).count() > 20);
        for kind in [WeightKind::Exact, WeightKind::TinyScales, WeightKind::HugeScales] {
            assert!(cases.iter().any(|case| case.weights == kind && case.d_dtype == DType::F16), "{}", kind.name());
        }
    }

    /// A given X format replaces a norm and everything that the norm
    /// would write, such as a given factor.
    #[test]
    fn what_has_x_in_codes_has_no_norm_that_writes_some() {
        let formats: Vec<Format> = Format::all().collect();
        let drawn: Vec<Case> = (0..4000).map(|seed| random_case(&formats, seed)).collect();
        assert!(drawn.iter().any(|case| case.normed_format == Some(XFormat::E4M3Tensor)));
        for case in drawn {
            let given = case.with_x_format(XFormat::Q8_1);
            for case in [case, given] {
                let is_normed = case.normed_dtype.is_some() || case.normed_format.is_some();
                assert!(case.norm.is_some() || !is_normed, "{case}");
                assert!(case.norm.is_none() || case.x_format.is_none(), "{case}");
            }
        }
    }

    #[test]
    fn exact_weights_of_the_deepest_case_can_be_made() {
        for format in Format::all() {
            for seed in 0..20 {
                let made = crate::weights::weight(WeightKind::Exact, format, 8, MAX_EXACT_DEPTH, None, seed);
                made.unwrap_or_else(|e| panic!("{format}, seed {seed}: {e}"));
            }
        }
    }
}

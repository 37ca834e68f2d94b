//! Random cases of `experts`: any form, index, number of experts,
//! format and epilogue from one seed.

use qgemm_formats::Format;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{ExpertCase, FormCase, IndexKind};
use crate::gemm::{Case, Epilogue, Layout};
use crate::random::{pick, skewed};

const MAX_EXPERTS: usize = 24;
const MAX_ROWS: usize = 120;
const MAX_FEATURES: usize = 200;
const MAX_DEPTH: usize = 700;
const MAX_SLOTS: usize = 6;

/// The random case of `seed`, in one of `formats`.
pub(super) fn random_case(formats: &[Format], seed: u64) -> ExpertCase {
    let rng = &mut StdRng::seed_from_u64(seed ^ 0xe9e7);
    // A product like those of `gemm`, small enough for many experts.
    let drawn = crate::gemm::random_case(formats, seed);
    let depth = skewed(rng, MAX_DEPTH);
    let k = if drawn.format.ragged_k { depth } else { depth.next_multiple_of(drawn.format.block_len) };
    let form = match rng.random_range(0..4) {
        0 => FormCase::Contiguous,
        1 => FormCase::Masked { capacity: skewed(rng, 40) },
        _ => FormCase::Indexed {
            top_k: rng.random_range(1..=MAX_SLOTS),
            x_per_slot: rng.random(),
            combined: rng.random(),
        },
    };
    let combined = matches!(form, FormCase::Indexed { combined: true, .. });
    let each = Case {
        n: skewed(rng, MAX_FEATURES),
        k,
        layout: Layout { x_transposed: false, w_transposed: false, ..drawn.layout },
        epilogue: Epilogue { c: drawn.epilogue.c.filter(|_| !combined), ..drawn.epilogue },
        every_configuration: false,
        // Expert products take no quantizing norm.
        normed_format: None,
        ..drawn
    };
    let (experts, rows) = (skewed(rng, MAX_EXPERTS), skewed(rng, MAX_ROWS));
    let listed = matches!(form, FormCase::Indexed { .. }) && rng.random();
    let (index, ready) = (pick(rng, &IndexKind::ALL), rng.random());
    ExpertCase { index, listed, ready, ..ExpertCase::new(each, experts, rows, form) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Main loops have stages of up to 128 columns. If K is shorter,
    /// the rest of a stage was never written.
    #[test]
    fn a_tenth_of_the_cases_have_less_k_than_a_stage() {
        let formats: Vec<Format> = Format::all().collect();
        let short = (0..1000).filter(|&seed| random_case(&formats, seed).each.k < 128).count();
        assert!(short >= 100, "{short} of 1000");
    }

    #[test]
    fn a_seed_is_a_case_that_suits_its_format() {
        let formats: Vec<Format> = Format::all().collect();
        for seed in 0..500 {
            let case = random_case(&formats, seed);
            assert_eq!(case, random_case(&formats, seed));
            case.each.format.check_k(case.each.k).unwrap_or_else(|e| panic!("{case}: {e}"));
            assert!(case.each.m > 0 && case.experts > 0, "{case}");
        }
    }
}

//! Frequencies of sampled tokens, and plans without rows.

use qgemm_api::{Context, Error, Sampling, SamplingArgs, SamplingParameters};

/// Samples the logits at positions 0 to `rows`.
fn sampled(logits: &[f32], rows: usize, parameters: SamplingParameters) -> Result<Vec<u32>, Error> {
    let ctx = Context::open("cpu")?;
    let plan = ctx.plan_sampling(&Sampling::new(rows, logits.len()))?;
    let words = |position| SamplingParameters { position, ..parameters }.words();
    let parameters = ctx.upload(&(0..rows as u64).flat_map(words).collect::<Vec<u32>>())?;
    let logits = ctx.upload(&logits.repeat(rows))?;
    let (mut ids, mut status) = (ctx.allocate(rows * 4)?, ctx.allocate(rows * 16)?);
    plan.run(&ctx.default_stream(), SamplingArgs::new(&logits, &parameters, &mut ids, &mut status))?;
    plan.check_status(&ctx, &status)?;
    ctx.download(&ids)
}

#[track_caller]
fn check_frequencies(probabilities: &[f64], parameters: SamplingParameters, expected: &[f64], limit: f64) {
    const DRAWS: usize = 20_000;
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
    let mut counts = vec![0usize; logits.len()];
    for id in sampled(&logits, DRAWS, parameters).expect("tokens") {
        counts[id as usize] += 1;
    }
    let total: f64 = expected.iter().sum();
    let chi_square: f64 = counts
        .iter()
        .zip(expected)
        .map(|(&count, &expected)| {
            let expected = expected / total * DRAWS as f64;
            if expected == 0.0 {
                if count == 0 { 0.0 } else { f64::INFINITY }
            } else {
                (count as f64 - expected).powi(2) / expected
            }
        })
        .sum();
    assert!(chi_square < limit, "{parameters:?}: {counts:?}, chi-square {chi_square}");
}

#[test]
fn frequencies_are_the_probabilities() {
    let warm = SamplingParameters { temperature: 1.0, seed: 1, ..SamplingParameters::default() };
    let of = [0.05, 0.4, 0.15, 0.3, 0.1];
    // Exceeded once in 100 000 seeds: four, two, one and two degrees of freedom.
    check_frequencies(&of, warm, &of, 28.5);
    check_frequencies(&of, SamplingParameters { top_k: 3, seed: 2, ..warm }, &[0.0, 0.4, 0.15, 0.3, 0.0], 23.1);
    check_frequencies(&of, SamplingParameters { top_p: 0.69, seed: 3, ..warm }, &[0.0, 0.4, 0.0, 0.3, 0.0], 19.6);
    check_frequencies(&of, SamplingParameters { min_p: 0.3, seed: 4, ..warm }, &[0.0, 0.4, 0.15, 0.3, 0.0], 23.1);
    // Squares of the probabilities.
    let squares = of.map(|p| p * p);
    check_frequencies(&of, SamplingParameters { temperature: 0.5, seed: 5, ..warm }, &squares, 28.5);
}

#[test]
fn draws_depend_on_seed_and_position_alone() {
    let warm = |seed| SamplingParameters { temperature: 1.0, seed, ..SamplingParameters::default() };
    let sequence = |rows, seed| sampled(&[0.0; 16], rows, warm(seed)).expect("tokens");
    let all = sequence(64, 5);
    assert_eq!(sequence(9, 5), all[..9]);
    assert_ne!(sequence(64, 6), all);
}

#[test]
fn no_rows_are_no_work() {
    assert_eq!(sampled(&[1.0, 2.0], 0, SamplingParameters::default()).expect("nothing to do"), []);
}

#[test]
fn sizes_out_of_range_are_refused() {
    let ctx = Context::open("cpu").expect("the CPU");
    let refused = |sampling: Sampling| ctx.plan_sampling(&sampling).map(|_| ()).expect_err("out of range");
    for sampling in [
        Sampling::new(1, 0),
        Sampling::new(1, (1 << 20) + 1),
        Sampling::new((1 << 16) + 1, 4),
        Sampling::new(1, 4).log_probabilities(33),
        Sampling::new(1, 4).penalized(0),
        Sampling::new(2, 4).row_stride(3),
    ] {
        let error = refused(sampling.clone()).to_string();
        assert!(error.contains("expected"), "{sampling:?}: {error}");
    }
}

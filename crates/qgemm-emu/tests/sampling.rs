//! Samples of emulated GPUs and of the CPU are equal bit by bit.

use qgemm_api::{Context, Error, Sampling, SamplingArgs, SamplingParameters};

const ROWS: usize = 12;
const VOCABULARY: usize = 1500;
const CAPACITY: usize = 8;
const ALTERNATIVES: usize = 4;

/// Ids, statuses and log-probabilities of a device.
fn sampled(device: &str) -> Result<Vec<Vec<u32>>, Error> {
    let ctx = Context::open(device)?;
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let logits: Vec<f32> = (0..ROWS * VOCABULARY).map(|_| (uniform() + uniform() + uniform()) * 8.0).collect();
    let row = |row: usize| SamplingParameters {
        temperature: [0.3, 1.0, 2.5][row % 3],
        top_k: [0, 50][row % 2],
        top_p: [1.0, 0.9, 0.5, 0.999][row % 4],
        min_p: [0.0, 0.02][row / 6],
        repetition_penalty: 1.2,
        seed: 99,
        position: row as u64,
    };
    let parameters = ctx.upload(&(0..ROWS).flat_map(|i| row(i).words()).collect::<Vec<u32>>())?;
    let earlier: Vec<u32> = (0..ROWS * CAPACITY).map(|_| (uniform() * VOCABULARY as f32) as u32).collect();
    let (logits, earlier) = (ctx.upload(&logits)?, ctx.upload(&earlier)?);
    let lengths = ctx.upload(&[CAPACITY as u32; ROWS])?;
    let plan =
        ctx.plan_sampling(&Sampling::new(ROWS, VOCABULARY).penalized(CAPACITY).log_probabilities(ALTERNATIVES))?;
    let words = |count: usize| ctx.allocate(ROWS * count * 4);
    let (mut ids, mut status, mut own) = (words(1)?, words(4)?, words(1)?);
    let (mut alternative_ids, mut alternatives) = (words(ALTERNATIVES)?, words(ALTERNATIVES)?);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let args = SamplingArgs::new(&logits, &parameters, &mut ids, &mut status)
        .earlier(&earlier, &lengths)
        .log_probabilities(&mut own)
        .alternatives(&mut alternative_ids, &mut alternatives)
        .workspace(&mut workspace);
    plan.run(&ctx.default_stream(), args)?;
    plan.check_status(&ctx, &status)?;
    [&ids, &status, &own, &alternative_ids, &alternatives].into_iter().map(|buffer| ctx.download(buffer)).collect()
}

#[test]
fn emulated_gpus_sample_as_the_cpu() {
    let expected = sampled("cpu").expect("the CPU samples");
    assert!(expected[0].iter().all(|&id| (id as usize) < VOCABULARY));
    for device in ["emu:sm70", "emu:sm80", "emu:sm90"] {
        assert_eq!(sampled(device).expect("an emulated device samples"), expected, "{device}");
    }
}

//! Execution plans as programs: steps against a plain
//! forward pass.

mod common;

use std::path::Path;

use common::checkpoint::{CONTEXT, LLAMA, Recipe, VOCABULARY, write_gguf};
use common::reference::Reference;
use qgemm_api::{Context, DType, KvFormat, LoadedPlan, PlanOptions, XPrecision, open_model};
use qgemm_model::{LanguageModel, Precision};

const QWEN2: Recipe = Recipe { architecture: "qwen2", formats: ["q4_0", "q5_1"], qkv_bias: true, ..LLAMA };
const QWEN3: Recipe = Recipe { architecture: "qwen3", formats: ["f16", "f16"], head_norms: true, ..LLAMA };

/// Options of one sequence, whose activations are
/// not rounded.
fn exact() -> PlanOptions {
    let mut options = PlanOptions::new(1);
    (options.x_dtype, options.x_precision) = (DType::F32, XPrecision::Exact);
    options
}

/// Logits behind each of `tokens`, step by step.
fn steps(ctx: &Context, path: &Path, options: &PlanOptions, tokens: &[u32]) -> Vec<Vec<f32>> {
    let model = open_model(path).expect("a model");
    let plan = ctx.plan_model(path, options).expect("it is served");
    let loaded = ctx.load_plan(&serde_json::to_string(&plan).expect("JSON"), &model).expect("it fits");
    let (weights, mut arena) = (loaded.load_weights(&model).expect("memory"), loaded.arena().expect("memory"));
    let mut put = |name: &str, words: &[u32]| {
        ctx.upload_into(words, arena.region_mut(name).expect("planned")).expect("it has room");
    };
    if let Some(size) = options.page_size {
        put("block_table", &(0..CONTEXT.div_ceil(size) as u32).rev().collect::<Vec<_>>());
    }
    let mut logits = Vec::new();
    for (length, &token) in (1u32..).zip(tokens) {
        let mut put = |name: &str, word: u32| {
            ctx.upload_into(&[word], arena.region_mut(name).expect("planned")).expect("it has room");
        };
        put("tokens", token);
        put("kv_lengths", length);
        loaded.step(&ctx.default_stream(), &mut arena, &weights).expect("it runs");
        logits.push(ctx.download(arena.region("logits").expect("planned")).expect("readable"));
    }
    logits
}

/// Largest loss of a row of logits, relative to its energy.
fn worst(got: &[Vec<f32>], wanted: &[Vec<f32>]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    let loss = |(got, wanted): (&Vec<f32>, &Vec<f32>)| {
        let energy: f32 = wanted.iter().map(|y| y * y).sum();
        got.iter().zip(wanted).map(|(got, y)| (got - y).powi(2)).sum::<f32>() / energy
    };
    got.iter().zip(wanted).map(loss).fold(0.0, f32::max)
}

#[test]
fn steps_compute_what_a_plain_forward_pass_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let ctx = Context::open("cpu").expect("always there");
    let tokens: Vec<u32> = (0..20).map(|i| i * 41 % VOCABULARY as u32).collect();
    for (recipe, interleaved) in
        [(LLAMA, true), (Recipe { rotary_factors: true, ..LLAMA }, true), (QWEN2, false), (QWEN3, false)]
    {
        let path = write_gguf(folder.path(), &recipe);
        let loaded = LanguageModel::open(&ctx, &path, Precision::default()).expect("a model");
        let numbers = loaded.hyperparameters().clone();
        let opened = open_model(&path).expect("a model");
        let reference = Reference { interleaved, ..Reference::new(&opened, numbers) };
        let wanted = reference.logits(&[(&tokens, 0)]).remove(0);
        let loss = worst(&steps(&ctx, &path, &exact(), &tokens), &wanted);
        assert!(loss < 1e-8, "{}: {loss}", recipe.architecture);
    }
}

#[test]
fn caches_of_every_format_and_pages_cost_what_they_round() {
    let folder = tempfile::tempdir().expect("a folder");
    let ctx = Context::open("cpu").expect("always there");
    let path = write_gguf(folder.path(), &LLAMA);
    let tokens: Vec<u32> = (0..20).map(|i| i * 41 % VOCABULARY as u32).collect();
    let wanted = steps(&ctx, &path, &exact(), &tokens);
    for (format, page_size, limit) in [
        (KvFormat::Plain(DType::F32), Some(7), 1e-9),
        (KvFormat::Plain(DType::F16), None, 1e-5),
        (KvFormat::Q8_0, Some(16), 1e-3),
        (KvFormat::Q4_0, None, 0.2),
        (KvFormat::E4M3, Some(5), 0.05),
    ] {
        for rotate_cache in [false, true] {
            let mut options = exact();
            (options.kv_format, options.page_size, options.rotate_cache) = (Some(format), page_size, rotate_cache);
            let loss = worst(&steps(&ctx, &path, &options, &tokens), &wanted);
            assert!(loss < limit, "{format}, {page_size:?}, rotated {rotate_cache}: {loss}");
            assert!(loss > 0.0 || format == KvFormat::Plain(DType::F32), "{format} rounds");
        }
    }
}

/// A token's logits have the same bits, whether its step has it alone or verifies
/// it as one of eight guesses.
#[test]
fn a_guess_has_the_logits_of_a_token_alone() {
    const GUESSES: usize = 8;
    let test = "a_guess_has_the_logits_of_a_token_alone";
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), &LLAMA);
    let model = open_model(&path).expect("a model");
    let tokens: Vec<u32> = (0..3 + GUESSES as u32).map(|i| i * 41 % VOCABULARY as u32).collect();
    for device in ["cpu", "cuda:0", "emu:sm80"] {
        let Some(ctx) = qgemm_testkit::open_or_skip(test, device) else { continue };
        let plan = |batch: usize| {
            let mut options = PlanOptions::new(batch);
            (options.sequences, options.context) = (Some(1), Some(32));
            (options.batch_invariant, options.all_logits) = (true, true);
            ctx.load_exec_plan(ctx.plan_model(&path, &options).expect("it is served"), &model).expect("it fits")
        };
        let (alone, guesses) = (plan(1), plan(GUESSES));
        let weights = guesses.load_weights(&model).expect("memory");
        let weights = alone.load_more_weights(&model, &weights).expect("memory");
        let stream = ctx.default_stream();
        let mut arena = alone.arena_beside(&[&guesses]).expect("memory");
        let mut step = |plan: &LoadedPlan, tokens: &[u32], length: usize| -> Vec<u32> {
            plan.enter(&stream, &mut arena).expect("the same caches");
            ctx.upload_into(tokens, arena.region_mut("tokens").expect("planned")).expect("it has room");
            ctx.upload_into(&[length as u32], arena.region_mut("kv_lengths").expect("planned")).expect("it has room");
            plan.step(&stream, &mut arena, &weights).expect("it runs");
            let logits: Vec<f32> = ctx.download(arena.region("logits").expect("planned")).expect("readable");
            logits.into_iter().map(f32::to_bits).collect()
        };
        let one_by_one: Vec<u32> = (0..tokens.len()).flat_map(|at| step(&alone, &tokens[at..=at], at + 1)).collect();
        let (before, guessed) = tokens.split_at(tokens.len() - GUESSES);
        for (at, token) in before.iter().enumerate() {
            step(&alone, &[*token], at + 1);
        }
        let together = step(&guesses, guessed, tokens.len());
        assert!(one_by_one[before.len() * VOCABULARY..] == together, "{device}");
    }
}

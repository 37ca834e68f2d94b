//! Models with recurrent layers: against a forward pass
//! in f64, as files of both kinds, in sessions, and on
//! every device.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::checkpoint::VOCABULARY;
use common::hybrid::{Hybrid, write_gguf, write_safetensors};
use common::hybrid_reference::logits;
use common::{greedy, run_one};
use qgemm_api::{Context, DType, Error, KvFormat, PlanOptions, XPrecision, open_model};
use qgemm_model::{Engine, EngineOptions, Generation, LanguageModel, Precision, Sampled, Sampling};

/// Nothing is rounded but to f32.
const EXACT: Precision = Precision { activations: DType::F32, x_precision: XPrecision::Exact, batch_invariant: true };
const DEVICES: [&str; 4] = ["wgpu:0", "cuda:0", "emu:sm80", "emu:sm75"];

fn open(path: &Path) -> LanguageModel {
    LanguageModel::open(&Context::open("cpu").expect("always there"), path, EXACT).expect("a model")
}

/// A cache without rounding, and small pages.
fn options() -> EngineOptions {
    EngineOptions {
        cache_tokens: 256,
        page_size: 8,
        kv_format: KvFormat::Plain(DType::F32),
        ..EngineOptions::default()
    }
}

fn engine(model: &LanguageModel, options: EngineOptions) -> Engine {
    Engine::new(model, options).expect("memory")
}

fn ids(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| (from + i * 41) % VOCABULARY as u32).collect()
}

/// Sampled tokens of each prompt with their
/// log-probabilities, all in one engine.
fn sampled(engine: &mut Engine, prompts: &[Vec<u32>], tokens: usize) -> Vec<Vec<Sampled>> {
    let sampling = Sampling { log_probabilities: Some(8), ..Sampling::default() };
    let generation = Generation { sampling, ..greedy(tokens) };
    let ids: Vec<_> = prompts.iter().map(|prompt| engine.start(prompt, generation.clone()).expect("valid")).collect();
    let mut all = BTreeMap::<_, Vec<Sampled>>::new();
    while !engine.is_idle() {
        for output in engine.step().expect("a step") {
            all.entry(output.session).or_default().extend(output.token);
        }
    }
    ids.iter().map(|id| all.remove(id).expect("tokens")).collect()
}

/// Logits of each token, decoded one by one.
fn decoded(ctx: &Context, path: &Path, tokens: &[u32]) -> Vec<Vec<f32>> {
    let model = open_model(path).expect("a model");
    let mut options = PlanOptions::new(1);
    (options.x_dtype, options.x_precision) = (DType::F32, XPrecision::Exact);
    let plan = ctx.plan_model(path, &options).expect("it is served");
    let loaded = ctx.load_plan(&serde_json::to_string(&plan).expect("JSON"), &model).expect("it fits");
    let (weights, mut arena) = (loaded.load_weights(&model).expect("memory"), loaded.arena().expect("memory"));
    let stream = ctx.default_stream();
    loaded.clear_slot(&stream, &mut arena, 0).expect("it has the slot");
    let refused = loaded.clear_slot(&stream, &mut arena, 1);
    assert!(matches!(refused, Err(Error::OutOfRange { name: "slot", most: 0, got: 1, .. })), "{refused:?}");
    let step = |(length, token): (u32, &u32)| {
        for (region, word) in [("tokens", *token), ("kv_lengths", length), ("state_slots", 0)] {
            ctx.upload_into(&[word], arena.region_mut(region).expect("planned")).expect("it has room");
        }
        loaded.step(&stream, &mut arena, &weights).expect("it runs");
        ctx.download(arena.region("logits").expect("planned")).expect("readable")
    };
    (1..).zip(tokens).map(step).collect()
}

#[test]
fn steps_have_the_logits_of_a_forward_pass_in_f64() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = ids(7, 20);
    for kind in Hybrid::ALL {
        let path = write_gguf(folder.path(), kind, "q8_0");
        let wanted = logits(&open_model(&path).expect("a model"), kind, &tokens);
        let one = decoded(&Context::open("cpu").expect("always there"), &path, &tokens);
        let ranks = Context::open_ranks("cpu", 2, Duration::from_secs(20)).expect("two ranks");
        let of_ranks: Vec<_> = thread::scope(|scope| {
            let (path, tokens) = (&path, &tokens);
            let threads: Vec<_> = ranks.iter().map(|ctx| scope.spawn(move || decoded(ctx, path, tokens))).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        assert_eq!(of_ranks[0], of_ranks[1], "{kind:?}: ranks have the same bits");
        for (ranks, all) in [(1, &one), (2, &of_ranks[0])] {
            for (i, (got, wanted)) in all.iter().zip(&wanted).enumerate() {
                let energy: f64 = wanted.iter().map(|y| y * y).sum();
                let loss = got.iter().zip(wanted).map(|(got, y)| (f64::from(*got) - y).powi(2)).sum::<f64>() / energy;
                assert!(loss < 1e-9, "{kind:?} token {i} of {ranks} ranks: {loss}");
            }
        }
    }
}

#[test]
fn sessions_generate_the_tokens_of_a_forward_pass_in_f64() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in Hybrid::ALL {
        let path = write_gguf(folder.path(), kind, "q8_0");
        let model = open(&path);
        assert_eq!(model.architecture(), kind.name());
        let prompt = model.tokenizer().encode("What is the answer?").expect("encoded");
        let ids = run_one(&mut engine(&model, options()), &prompt, greedy(24)).ids;
        let all = [&prompt[..], &ids].concat();
        let wanted = logits(&open_model(&path).expect("a model"), kind, &all[..all.len() - 1]);
        for (i, (wanted, &id)) in wanted[prompt.len() - 1..].iter().zip(&ids).enumerate() {
            let best = (0..).zip(wanted).max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(id, _): (u32, _)| id);
            assert_eq!(best, Some(id), "{kind:?} token {i}");
        }
    }
}

#[test]
fn a_checkpoint_in_safetensors_is_the_model_of_its_gguf_file() {
    for kind in Hybrid::ALL {
        let [folder, checkpoint] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
        let gguf = open(&write_gguf(folder.path(), kind, "f32"));
        write_safetensors(checkpoint.path(), kind);
        let safetensors = open(checkpoint.path());
        assert_eq!(gguf.hyperparameters(), safetensors.hyperparameters());
        let [a, b] =
            [&gguf, &safetensors].map(|model| sampled(&mut engine(model, options()), &[ids(65, 9)], 16).remove(0));
        for (a, b) in a.iter().zip(&b) {
            assert_eq!(a.id, b.id, "{kind:?}");
            assert!(
                (a.log_probability.expect("asked for") - b.log_probability.expect("asked for")).abs() < 1e-4,
                "{kind:?}"
            );
        }
    }
}

/// A prompt in parts goes on with the state of the part
/// before.
#[test]
fn a_prompt_in_parts_gives_the_tokens_of_the_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in Hybrid::ALL {
        let model = open(&write_gguf(folder.path(), kind, "q8_0"));
        let run = |step_tokens| {
            let mut engine = engine(&model, EngineOptions { sessions: 1, step_tokens, ..options() });
            sampled(&mut engine, &[ids(3, 37)], 8).remove(0)
        };
        let whole = run(64);
        for step_tokens in [1, 5, 36] {
            for (whole, part) in whole.iter().zip(&run(step_tokens)) {
                let [a, b] = [whole, part].map(|sampled| sampled.log_probability.expect("asked for"));
                assert!(whole.id == part.id && (a - b).abs() < 1e-4, "{kind:?} by {step_tokens}: {a} and {b}");
            }
        }
    }
}

#[test]
fn sessions_in_one_batch_are_those_of_each_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in Hybrid::ALL {
        let model = open(&write_gguf(folder.path(), kind, "q8_0"));
        let prompts: Vec<Vec<u32>> = (0..5).map(|i| ids(i * 17, 1 + 7 * i)).collect();
        let batch = sampled(&mut engine(&model, EngineOptions { sessions: 4, ..options() }), &prompts, 12);
        for (prompt, batch) in prompts.iter().zip(&batch) {
            let alone = sampled(&mut engine(&model, options()), std::slice::from_ref(prompt), 12).remove(0);
            assert!(alone == *batch, "{kind:?}: {} tokens", prompt.len());
        }
    }
}

/// A slot that is free again has the state of the
/// session before, which ended or was cancelled.
#[test]
fn sessions_begin_with_zeros_in_slots_that_others_left() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in Hybrid::ALL {
        let model = open(&write_gguf(folder.path(), kind, "q8_0"));
        let prompt = ids(90, 6);
        let fresh = sampled(&mut engine(&model, options()), std::slice::from_ref(&prompt), 8);
        let mut used = engine(&model, EngineOptions { sessions: 1, ..options() });
        run_one(&mut used, &ids(11, 30), greedy(9));
        assert!(sampled(&mut used, std::slice::from_ref(&prompt), 8) == fresh, "{kind:?} after an end");
        let cancelled = used.start(&ids(200, 20), greedy(50)).expect("valid");
        for _ in 0..5 {
            used.step().expect("a step");
        }
        used.cancel(cancelled).expect("it runs");
        used.step().expect("a step");
        assert!(sampled(&mut used, std::slice::from_ref(&prompt), 8) == fresh, "{kind:?} after a cancellation");
    }
}

/// Greedy tokens of a short prompt. Two tokens are what
/// the emulator has time for.
fn tokens(ctx: &Context, path: &Path) -> Vec<u32> {
    let precision = Precision { activations: DType::F16, x_precision: XPrecision::F16, batch_invariant: false };
    let model = LanguageModel::open(ctx, path, precision).expect("a model");
    let options = EngineOptions {
        sessions: 1,
        cache_tokens: 16,
        page_size: 16,
        step_tokens: 2,
        kv_format: KvFormat::Plain(DType::F16),
        rotate_cache: None,
    };
    run_one(&mut engine(&model, options), &[72, 105, 33], greedy(2)).ids
}

#[test]
fn models_with_recurrent_layers_generate_the_same_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in Hybrid::ALL {
        let path = write_gguf(folder.path(), kind, "q8_0");
        let expected = tokens(&Context::open("cpu").expect("always there"), &path);
        assert_eq!(expected.len(), 2);
        for device in DEVICES {
            let test = "models_with_recurrent_layers_generate_the_same_tokens";
            if let Some(ctx) = qgemm_testkit::open_or_skip(test, device) {
                assert_eq!(tokens(&ctx, &path), expected, "{kind:?} on {device}");
            }
        }
    }
}

#[test]
fn training_of_recurrent_layers_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), Hybrid::Lfm2, "q8_0");
    let mut options = PlanOptions::new(4);
    options.train = true;
    let refused = Context::open("cpu").expect("always there").plan_model(&path, &options).expect_err("refused");
    assert!(refused.to_string().contains("no training of recurrent layers"), "{refused}");
}

//! Small random models: architectures against a plain forward pass, sessions, refusals.

mod common;

use std::path::Path;

use common::checkpoint::{CONTEXT, LLAMA, Recipe, VOCABULARY, write_gguf, write_safetensors};
use common::reference::{Reference, argmax};
use common::{greedy, run_all, run_one};
use qgemm_api::{Context, DType, KvFormat, XPrecision, open_model};
use qgemm_model::{Engine, EngineOptions, Error, Finish, Generation, LanguageModel, Message, Precision, Sampling};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const QWEN2: Recipe = Recipe { architecture: "qwen2", formats: ["q4_0", "q5_1"], qkv_bias: true, ..LLAMA };
const QWEN3: Recipe = Recipe { architecture: "qwen3", formats: ["f16", "f16"], head_norms: true, ..LLAMA };

/// Nothing is rounded but to f32.
const EXACT: Precision = Precision { activations: DType::F32, x_precision: XPrecision::Exact, batch_invariant: true };

fn load(path: &Path) -> LanguageModel {
    LanguageModel::open(&Context::open("cpu").expect("always there"), path, EXACT).expect("a model")
}

fn engine(model: &LanguageModel, options: EngineOptions) -> Engine {
    Engine::new(model, options).expect("memory")
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

#[test]
fn architectures_compute_what_a_plain_forward_pass_does() {
    let folder = tempfile::tempdir().expect("a folder");
    for (recipe, interleaved) in
        [(LLAMA, true), (Recipe { rotary_factors: true, ..LLAMA }, true), (QWEN2, false), (QWEN3, false)]
    {
        let path = write_gguf(folder.path(), &recipe);
        let model = load(&path);
        assert_eq!((model.architecture(), model.vocabulary()), (recipe.architecture, VOCABULARY));
        let prompt = model.tokenizer().encode("What is the answer?").expect("encoded");
        let outcome = run_one(&mut engine(&model, options()), &prompt, greedy(24));
        assert!(matches!(outcome.finish, Some(Finish::MaxTokens)) && outcome.ids.len() == 24, "{outcome:?}");

        let opened = open_model(&path).expect("a model");
        let numbers = *model.hyperparameters();
        let reference = Reference { model: &opened, numbers, rotary_base: 10_000.0, interleaved, rounds: false };
        let all = [&prompt[..], &outcome.ids].concat();
        let logits = reference.logits(&[(&all[..all.len() - 1], prompt.len() - 1)]).remove(0);
        for (i, (logits, &id)) in logits.iter().zip(&outcome.ids).enumerate() {
            let (best, by) = argmax(logits, id);
            assert_eq!(best, id, "{} token {i}: {by} below the best", recipe.architecture);
        }
    }
}

#[test]
fn a_checkpoint_in_safetensors_is_the_model_of_its_gguf_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = Recipe { formats: ["f32", "f32"], ..QWEN3 };
    let gguf = load(&write_gguf(folder.path(), &recipe));
    let checkpoint = tempfile::tempdir().expect("a folder");
    write_safetensors(checkpoint.path(), &recipe);
    let safetensors = load(checkpoint.path());
    assert_eq!(gguf.hyperparameters(), safetensors.hyperparameters());
    let messages = [Message::user("1 + 1 = ünf")];
    let prompt = gguf.encode_chat(&messages).expect("a prompt");
    assert_eq!(prompt, safetensors.encode_chat(&messages).expect("a prompt"));
    let [a, b] = [&gguf, &safetensors].map(|model| run_one(&mut engine(model, options()), &prompt, greedy(16)));
    assert_eq!((a.ids, a.text), (b.ids, b.text));
}

#[test]
fn sessions_join_leave_and_are_cancelled_without_disturbing_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    let options = EngineOptions { sessions: 3, cache_tokens: 160, step_tokens: 16, ..options() };
    let mut shared = engine(&model, options);
    let pages = shared.free_pages();
    let mut rng = StdRng::seed_from_u64(3);
    let prompts: Vec<Vec<u32>> =
        (0..10).map(|_| (0..rng.random_range(1..40)).map(|_| rng.random_range(0..256)).collect()).collect();
    let generation = |i: usize| {
        let sampling = Sampling { temperature: 0.8, seed: i as u64, ..Sampling::default() };
        Generation { sampling, ..greedy(5 + 3 * i) }
    };
    let (mut ids, mut outcomes) = (Vec::new(), Vec::new());
    let mut cancelled = Vec::new();
    while ids.len() < prompts.len() || !shared.is_idle() {
        if ids.len() < prompts.len() {
            ids.push(shared.start(&prompts[ids.len()], generation(ids.len())).expect("valid"));
            outcomes.push(common::Outcome::default());
        }
        if rng.random_bool(0.1) {
            let at = rng.random_range(0..ids.len());
            if outcomes[at].finish.is_none() && shared.cancel(ids[at]).is_ok() {
                cancelled.push(at);
            }
        }
        for output in shared.step().expect("a step") {
            let at = ids.iter().position(|id| *id == output.session).expect("known");
            outcomes[at].add(output);
        }
    }
    assert_eq!(shared.free_pages(), pages);
    assert!(!cancelled.is_empty());
    for (i, outcome) in outcomes.iter().enumerate() {
        let alone = run_one(&mut engine(&model, options), &prompts[i], generation(i));
        if cancelled.contains(&i) {
            assert!(matches!(outcome.finish, Some(Finish::Cancelled)) && alone.ids.starts_with(&outcome.ids), "{i}");
        } else {
            assert_eq!((&outcome.ids, &outcome.text), (&alone.ids, &alone.text), "{i}");
        }
    }
    assert!(matches!(shared.cancel(ids[0]), Err(Error::NoSuchSession)));
}

#[test]
fn prompts_are_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    let mut engine = engine(&model, options());
    assert!(matches!(engine.start(&[], greedy(1)), Err(Error::EmptyPrompt)));
    let long = vec![0; CONTEXT + 1];
    let refused = engine.start(&long, greedy(1));
    assert!(matches!(refused, Err(Error::PromptTooLong { limit: CONTEXT, .. })), "{refused:?}");
    let refused = engine.start(&[1, VOCABULARY as u32], greedy(1));
    assert!(matches!(refused, Err(Error::UnknownToken { vocabulary: VOCABULARY, .. })), "{refused:?}");
    let sampling = Sampling { top_p: 2.0, ..Sampling::default() };
    let refused = engine.start(&[1], Generation { sampling, ..greedy(1) });
    assert!(matches!(refused, Err(Error::SamplingParameter { name: "top-p", .. })), "{refused:?}");
    assert!(engine.is_idle() && engine.step().expect("nothing to do").is_empty());
}

#[test]
fn sessions_end_for_reasons_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    let mut whole = engine(&model, options());
    let full = run_one(&mut whole, &[5; 100], greedy(1000));
    assert!(matches!(full.finish, Some(Finish::ContextFull)), "{full:?}");
    assert_eq!(100 + full.ids.len(), CONTEXT + 1);
    assert!(matches!(run_one(&mut whole, &[5], greedy(0)).finish, Some(Finish::MaxTokens)));

    let free = run_one(&mut whole, &[5; 7], greedy(20));
    let stop: String = free.text.chars().skip(4).take(2).collect();
    let expected = free.text.find(&stop).expect("it is there");
    let stopped = run_one(&mut whole, &[5; 7], Generation { stop: vec![stop.clone()], ..greedy(20) });
    assert!(matches!(&stopped.finish, Some(Finish::StopString(found)) if *found == stop), "{stopped:?}");
    assert_eq!(stopped.text, free.text[..expected]);

    // Two sessions of up to 9 pages share 12.
    let mut small = engine(&model, EngineOptions { cache_tokens: 96, ..options() });
    let long = [small.start(&[1; 30], greedy(40)).expect("valid"), small.start(&[2; 30], greedy(40)).expect("valid")];
    let outcomes = run_all(&mut small);
    let full = long.iter().filter(|id| matches!(outcomes[*id].finish, Some(Finish::CacheFull))).count();
    let done = long.iter().filter(|id| matches!(outcomes[*id].finish, Some(Finish::MaxTokens))).count();
    assert_eq!((full, done, small.free_pages()), (1, 1, 12));
}

#[test]
fn every_cache_format_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    let run =
        |kv_format| run_one(&mut engine(&model, EngineOptions { kv_format, ..options() }), &[7; 20], greedy(8)).ids;
    let exact = run(KvFormat::Plain(DType::F32));
    assert_eq!(run(KvFormat::Plain(DType::F16))[..2], exact[..2]);
    for format in KvFormat::ALL {
        assert_eq!(run(format).len(), 8, "{format}");
    }
}

#[test]
fn seeds_decide_samples() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    let mut engine = engine(&model, options());
    let mut run = |seed| {
        let sampling = Sampling { temperature: 2.0, seed, log_probabilities: Some(1), ..Sampling::default() };
        run_one(&mut engine, &[7; 3], Generation { sampling, ..greedy(16) }).ids
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn models_that_are_not_understood_whole_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let ctx = Context::open("cpu").expect("always there");
    let refused = |recipe: &Recipe| {
        LanguageModel::open(&ctx, write_gguf(folder.path(), recipe), EXACT).expect_err("refused").to_string()
    };
    let extra = refused(&Recipe { extra: Some("blk.0.attn_sinks.weight"), ..LLAMA });
    assert_eq!(extra, "tensor `blk.0.attn_sinks.weight`: architecture `llama` has no such tensor");
    let experts = refused(&Recipe { architecture: "qwen3moe", ..LLAMA });
    assert!(experts.contains("`qwen3moe`: needs layers of experts"), "{experts}");
    let no_bias = refused(&Recipe { qkv_bias: false, ..QWEN2 });
    assert!(no_bias.contains("blk.0.attn_q.bias"), "{no_bias}");
    let head_norms = refused(&Recipe { head_norms: false, ..QWEN3 });
    assert!(head_norms.contains("attn_q_norm"), "{head_norms}");
}

#[test]
fn engine_options_are_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&write_gguf(folder.path(), &LLAMA));
    for (name, bad) in [
        ("sessions", EngineOptions { sessions: 0, ..options() }),
        ("page size", EngineOptions { page_size: 0, ..options() }),
        ("cache tokens", EngineOptions { cache_tokens: 0, ..options() }),
        ("step tokens", EngineOptions { step_tokens: 2, ..options() }),
    ] {
        let refused = Engine::new(&model, bad).expect_err("refused");
        assert!(matches!(refused, Error::EngineOption { name: got, .. } if got == name), "{refused:?}");
    }
}

//! Small random models: architectures against a plain
//! forward pass, sessions, refusals.

mod common;

use std::path::Path;

use common::checkpoint::{CONTEXT, HIDDEN, LLAMA, Recipe, VOCABULARY, WINDOW, write_gguf, write_safetensors};
use common::reference::{Gate, Reference, argmax};
use common::{greedy, run_one};
use qgemm_api::{Context, DType, KvFormat, Model, XPrecision, open_model};
use qgemm_model::{
    Engine, EngineOptions, Error, Finish, Generation, Hyperparameters, LanguageModel, Message, Precision, Sampling,
};

const QWEN2: Recipe = Recipe { architecture: "qwen2", formats: ["q4_0", "q5_1"], qkv_bias: true, ..LLAMA };
const QWEN3: Recipe = Recipe { architecture: "qwen3", formats: ["f16", "f16"], head_norms: true, ..LLAMA };
const GEMMA: Recipe = Recipe { architecture: "gemma", formats: ["q8_0", "f16"], gamma_offset: true, ..LLAMA };
const GEMMA3: Recipe = Recipe {
    architecture: "gemma3",
    head_norms: true,
    post_norms: true,
    gamma_offset: true,
    window_pattern: Some(2),
    rotary_base: 100.0,
    ..LLAMA
};
const GPT_OSS: Recipe = Recipe {
    architecture: "gpt-oss",
    formats: ["mxfp4", "q8_0"],
    qkv_bias: true,
    window_pattern: Some(2),
    sinks: true,
    biases: true,
    experts: true,
    ..LLAMA
};
const QWEN3_MOE: Recipe = Recipe { architecture: "qwen3moe", formats: ["q4_0", "q8_0"], experts: true, ..QWEN3 };

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
    for (recipe, interleaved) in [
        (LLAMA, true),
        (Recipe { rotary_factors: true, ..LLAMA }, true),
        // Mixtral.
        (Recipe { experts: true, ..LLAMA }, true),
        (QWEN2, false),
        (QWEN3, false),
        (QWEN3_MOE, false),
        (GEMMA, false),
        (GEMMA3, false),
        (GPT_OSS, false),
    ] {
        let path = write_gguf(folder.path(), &recipe);
        let model = load(&path);
        assert_eq!((model.architecture(), model.vocabulary()), (recipe.architecture, VOCABULARY));
        let prompt = model.tokenizer().encode("What is the answer?").expect("encoded");
        let outcome = run_one(&mut engine(&model, options()), &prompt, greedy(24));
        assert!(matches!(outcome.finish, Some(Finish::MaxTokens)) && outcome.ids.len() == 24, "{outcome:?}");

        let opened = open_model(&path).expect("a model");
        let reference = Reference { interleaved, ..reference(&opened, model.hyperparameters().clone(), &recipe) };
        assert_best(&reference, &prompt, &outcome.ids, recipe.architecture);
    }
}

fn reference<'a>(model: &'a Model, numbers: Hyperparameters, recipe: &Recipe) -> Reference<'a> {
    let plain = Reference::new(model, numbers);
    match recipe.architecture {
        "gemma" | "gemma3" => Reference {
            rotary_base: recipe.rotary_base,
            window_rotary_base: (recipe.architecture == "gemma3").then_some(10_000.0),
            embedding_scale: (HIDDEN as f32).sqrt(),
            gate: Gate::GeluTanh,
            interleaved: false,
            ..plain
        },
        "gpt-oss" => Reference { gate: Gate::Clamped, interleaved: false, ..plain },
        _ => plain,
    }
}

/// Checks that each token behind the prompt has the reference's best logit.
fn assert_best(reference: &Reference<'_>, prompt: &[u32], ids: &[u32], what: &str) {
    let all = [prompt, ids].concat();
    let logits = reference.logits(&[(&all[..all.len() - 1], prompt.len() - 1)]).remove(0);
    for (i, (logits, &id)) in logits.iter().zip(ids).enumerate() {
        let (best, by) = argmax(logits, id);
        assert_eq!(best, id, "{what} token {i}: {by} below the best");
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
fn experts_in_safetensors_are_those_of_the_gguf_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = Recipe { formats: ["f32", "f32"], ..QWEN3_MOE };
    let gguf = load(&write_gguf(folder.path(), &recipe));
    let checkpoint = tempfile::tempdir().expect("a folder");
    write_safetensors(checkpoint.path(), &recipe);
    let safetensors = load(checkpoint.path());
    assert_eq!(gguf.hyperparameters(), safetensors.hyperparameters());
    let [a, b] = [&gguf, &safetensors].map(|model| run_one(&mut engine(model, options()), &[65, 66, 67], greedy(16)));
    assert_eq!(a.ids, b.ids);
}

/// Checkpoints store gamma less 1.
/// Layers have four norms.
#[test]
fn gemma_in_safetensors_is_that_of_the_gguf_file() {
    for recipe in [GEMMA, GEMMA3] {
        let recipe = Recipe { formats: ["f32", "f32"], ..recipe };
        let [folder, checkpoint] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
        let gguf = load(&write_gguf(folder.path(), &recipe));
        write_safetensors(checkpoint.path(), &recipe);
        let safetensors = load(checkpoint.path());
        assert_eq!(gguf.hyperparameters(), safetensors.hyperparameters());
        let [a, b] =
            [&gguf, &safetensors].map(|model| run_one(&mut engine(model, options()), &[65, 66, 67], greedy(16)));
        assert_eq!(a.ids, b.ids, "{}", recipe.architecture);
    }
}

/// Checkpoints have MXFP4 in interleaved rows of
/// gate and up.
#[test]
fn gpt_oss_in_safetensors_is_that_of_the_gguf_file() {
    let recipe = Recipe { formats: ["f32", "f32"], fp4_experts: true, ..GPT_OSS };
    let [folder, checkpoint] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
    let gguf = load(&write_gguf(folder.path(), &recipe));
    write_safetensors(checkpoint.path(), &recipe);
    let safetensors = load(checkpoint.path());
    assert_eq!(gguf.hyperparameters(), safetensors.hyperparameters());
    let [a, b] = [&gguf, &safetensors].map(|model| run_one(&mut engine(model, options()), &[65, 66, 67], greedy(16)));
    assert_eq!(a.ids, b.ids);
}

#[test]
fn some_layers_have_a_window() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = Recipe { formats: ["f32", "f32"], ..QWEN3 };
    // GGUF files of this architecture state no window:
    // the reference takes the weights alone from it.
    let opened = open_model(write_gguf(folder.path(), &recipe)).expect("a model");
    let checkpoint = tempfile::tempdir().expect("a folder");
    let prompt: Vec<u32> = (40..70).collect();
    let mut all = Vec::new();
    for window_from in [0, 1, 2] {
        write_safetensors(checkpoint.path(), &Recipe { window_from: Some(window_from), ..recipe });
        let model = load(checkpoint.path());
        let numbers = model.hyperparameters().clone();
        let windows = [0, 1].map(|layer| (layer >= window_from).then_some(WINDOW));
        assert_eq!([0, 1].map(|layer| numbers.window_of(layer)), windows);
        let ids = run_one(&mut engine(&model, options()), &prompt, greedy(16)).ids;
        let reference = Reference { interleaved: false, ..reference(&opened, numbers, &recipe) };
        assert_best(&reference, &prompt, &ids, &format!("window from layer {window_from}"));
        all.push(ids);
    }
    assert!(all[0] != all[1] && all[1] != all[2], "windows change nothing: {all:?}");
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
fn rotated_caches_give_the_same_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    for recipe in [LLAMA, QWEN3, GEMMA3, GPT_OSS] {
        let model = load(&write_gguf(folder.path(), &recipe));
        let run = |kv_format, rotate_cache| {
            let options = EngineOptions { kv_format, rotate_cache, ..options() };
            run_one(&mut engine(&model, options), &[7; 20], greedy(8)).ids
        };
        let (exact, half) = (KvFormat::Plain(DType::F32), KvFormat::Plain(DType::F16));
        let plain = run(exact, None);
        assert_eq!(run(exact, Some(true)), plain, "{}", recipe.architecture);
        assert_eq!(run(half, Some(true))[..2], plain[..2], "{}", recipe.architecture);
        // Q4_0 is rotated by default.
        assert_eq!(run(KvFormat::Q4_0, None), run(KvFormat::Q4_0, Some(true)));
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
    let shared = refused(&Recipe { architecture: "qwen2moe", ..LLAMA });
    assert!(shared.contains("`qwen2moe`: needs a shared expert"), "{shared}");
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

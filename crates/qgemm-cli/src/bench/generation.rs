//! Timed steps of a language model: a prompt behind tokens in the
//! cache, and tokens that several sessions generate.

use std::time::Instant;

use anyhow::ensure;
use qgemm_api::cuda::{TimelineEntry, record_timeline};
use qgemm_api::{DType, KvFormat, Network};
use qgemm_model::{Engine, EngineOptions, Finish, Generation, LanguageModel, Output, SessionId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::timing::median_and_noise;

/// Most tokens of a prefill step, as in `llama-bench`.
const STEP_TOKENS: usize = 512;
/// Seed of the prompts.
const SEED: u64 = 1;
/// Steps before a timeline: a step's graph is captured when it comes again.
const WARM_UP: usize = 4;

/// Tokens of a step while a prompt of `tokens` tokens is read.
pub fn step_tokens(tokens: usize) -> usize {
    tokens.clamp(1, STEP_TOKENS)
}

/// Times of all repetitions.
pub struct Steps {
    /// Seconds of each repetition.
    seconds: Vec<f64>,
    /// Keys that an average decode step attends to, by session; none
    /// for prefill.
    keys: Vec<f64>,
}

impl Steps {
    /// Median of the seconds, and half their interquartile range
    /// relative to it.
    pub fn median_and_noise(&self) -> (f64, f64) {
        median_and_noise(self.seconds.clone())
    }

    /// Bytes that an average decode step reads at least: weights
    /// once, each session's keys and values, and its recurrent states.
    pub fn step_bytes(&self, model: &Network, kv_format: KvFormat) -> Option<f64> {
        let numbers = model.hyperparameters()?;
        let visible = |layer: usize| {
            let window = numbers.window_of(layer).map_or(f64::INFINITY, |keys| keys as f64);
            self.keys.iter().map(|keys| keys.min(window)).sum::<f64>()
        };
        let keys: f64 = (0..numbers.layers).filter(|&layer| numbers.attends(layer)).map(visible).sum();
        let features = 2 * numbers.kv_heads * numbers.head_dim;
        let cache = keys * features as f64 * kv_format.mean_bytes();
        // Read and written, in f16 but for those of linear attention.
        let states = (2 * self.keys.len() * numbers.state_bytes(DType::F16)) as f64;
        (!self.keys.is_empty()).then_some(model.weight_bytes(self.keys.len()) + cache + states)
    }
}

/// Times a prompt of `tokens` tokens behind `depth` others, a
/// multiple of [`step_tokens`].
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn prefill(
    model: &LanguageModel,
    options: EngineOptions,
    depth: usize,
    tokens: usize,
    repetitions: usize,
) -> anyhow::Result<Steps> {
    let step = step_tokens(tokens);
    let mut engine = engine(model, options, (1, depth + tokens), step)?;
    let mut once = |seed: u64| {
        engine.start(&prompt(model, depth + tokens, seed), greedy(1))?;
        for _ in 0..depth / step {
            checked(engine.step()?, 0)?;
        }
        let start = Instant::now();
        for _ in 1..tokens.div_ceil(step) {
            checked(engine.step()?, 0)?;
        }
        checked(engine.step()?, 1)?;
        Ok(start.elapsed().as_secs_f64())
    };
    Ok(Steps { seconds: repeated(repetitions, &mut once)?, keys: Vec::new() })
}

/// Times `tokens` steps of sessions, each with a token of every
/// session.
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn decode(
    model: &LanguageModel,
    options: EngineOptions,
    (depth, sessions): (usize, usize),
    tokens: usize,
    repetitions: usize,
) -> anyhow::Result<Steps> {
    let capacity = depth + tokens + 1;
    let mut engine = engine(model, options, (sessions, capacity), STEP_TOKENS + sessions)?;
    let mut keys = Vec::new();
    let mut once = |seed: u64| {
        let (ids, lengths) = started(model, &mut engine, (depth, sessions), seed)?;
        let start = Instant::now();
        for _ in 0..tokens {
            checked(engine.step()?, sessions)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        ids.iter().try_for_each(|id| engine.cancel(*id))?;
        engine.step()?;
        // The first step sees its new token and those before.
        let first = usize::from(depth > 0);
        keys = lengths.iter().map(|length| (length + first) as f64 + (tokens - 1) as f64 / 2.0).collect();
        Ok(seconds)
    };
    let seconds = repeated(repetitions, &mut once)?;
    Ok(Steps { seconds, keys })
}

/// Work of the device in `steps` decode steps of sessions, in the order of
/// its starts, behind steps that warm up. Only CUDA devices record it.
///
/// # Errors
/// When memory runs out, the device fails or records no timeline.
pub fn timeline(
    model: &LanguageModel,
    options: EngineOptions,
    (depth, sessions): (usize, usize),
    steps: usize,
) -> anyhow::Result<Vec<TimelineEntry>> {
    let capacity = depth + WARM_UP + steps + 2;
    let mut engine = engine(model, options, (sessions, capacity), STEP_TOKENS + sessions)?;
    started(model, &mut engine, (depth, sessions), SEED)?;
    // Graphs are recorded only if recording has begun before their capture.
    let (ran, entries) = record_timeline(&**model.context().device(), || {
        (0..WARM_UP + steps).try_for_each(|_| checked(engine.step()?, sessions))
    })?;
    ran?;
    let ends: Vec<usize> =
        (0..entries.len()).filter(|&place| entries[place].name == TimelineEntry::COPY_TO_HOST).collect();
    let Some(before) = ends.len().checked_sub(steps + 1) else {
        anyhow::bail!("expected a copy to the host in each of {} steps, got {}", WARM_UP + steps, ends.len());
    };
    Ok(entries[ends[before]..=ends[ends.len() - 1]].to_vec())
}

/// Starts sessions and runs them until all generate. Returns them and the
/// lengths of their prompts, with tokens generated meanwhile.
fn started(
    model: &LanguageModel,
    engine: &mut Engine,
    (depth, sessions): (usize, usize),
    seed: u64,
) -> anyhow::Result<(Vec<SessionId>, Vec<usize>)> {
    // Earlier sessions generate while the prompts of others are
    // read: shorter prompts let all arrive at the depth together.
    let waited = |session: usize| (sessions - 1 - session) * depth.div_ceil(STEP_TOKENS);
    let lengths = (0..sessions).map(|session| depth.saturating_sub(waited(session)).max(1));
    let mut lengths: Vec<usize> = lengths.collect();
    let ids = lengths
        .iter()
        .enumerate()
        .map(|(session, &length)| engine.start(&prompt(model, length, seed + session as u64), greedy(usize::MAX)));
    let ids: Vec<SessionId> = ids.collect::<Result<_, _>>()?;
    // Without depth, the first tokens are timed, too.
    let mut is_ready = vec![depth == 0; sessions];
    while !is_ready.iter().all(|ready| *ready) {
        for output in unended(engine.step()?)? {
            let Some(at) = ids.iter().position(|id| *id == output.session) else { continue };
            lengths[at] += usize::from(std::mem::replace(&mut is_ready[at], true));
        }
    }
    Ok((ids, lengths))
}

/// Times of all repetitions, after one to warm up.
fn repeated(repetitions: usize, once: &mut impl FnMut(u64) -> anyhow::Result<f64>) -> anyhow::Result<Vec<f64>> {
    once(SEED)?;
    (0..repetitions).map(|_| once(SEED)).collect()
}

/// An engine for sessions of up to `capacity` tokens each.
fn engine(
    model: &LanguageModel,
    options: EngineOptions,
    (sessions, capacity): (usize, usize),
    step_tokens: usize,
) -> anyhow::Result<Engine> {
    let cache_tokens = capacity.next_multiple_of(options.page_size).saturating_mul(sessions);
    Ok(Engine::new(model, EngineOptions { sessions, cache_tokens, step_tokens, ..options })?)
}

/// Tokens drawn at random.
fn prompt(model: &LanguageModel, tokens: usize, seed: u64) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..tokens).map(|_| rng.random_range(0..model.vocabulary() as u32)).collect()
}

/// Generation of `max_tokens` tokens, whatever the tokens are.
fn greedy(max_tokens: usize) -> Generation {
    Generation { max_tokens, ignore_end: true, ..Generation::default() }
}

/// Checks that a step had a token of `expected` sessions.
fn checked(outputs: Vec<Output>, expected: usize) -> anyhow::Result<()> {
    let tokens = unended(outputs)?.iter().filter(|output| output.token.is_some()).count();
    ensure!(tokens == expected, "expected tokens of {expected} sessions in a step, got {tokens}");
    Ok(())
}

/// Outputs of sessions that go on, or have all tokens.
fn unended(outputs: Vec<Output>) -> anyhow::Result<Vec<Output>> {
    let going_on = |output: Output| match output.finish {
        None | Some(Finish::MaxTokens) => Ok(output),
        Some(Finish::Failed(error)) => Err(error.into()),
        Some(other) => anyhow::bail!("a session ended: {other:?}"),
    };
    outputs.into_iter().map(going_on).collect()
}

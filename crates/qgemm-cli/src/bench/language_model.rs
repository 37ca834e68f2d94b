//! `qgemm bench MODEL`: tokens per second of a language model,
//! prefill (`pp`) and decode (`tg`), as `llama-bench` names them.

use std::path::Path;

use anyhow::ensure;
use qgemm_api::Context;
use qgemm_model::{EngineOptions, LanguageModel, Precision};
use serde::Serialize;

use super::Args;
use super::generation::{self, Steps};
use super::roof::{AboveRoof, read_bandwidth, share_text};
use super::timeline::{self, Timeline};
use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::provenance::Provenance;
use crate::table::{Column, Row, Table, bytes, numbers, words};

/// Most sessions of a test.
const MOST_SESSIONS: usize = 4096;

/// Options of a whole model.
#[derive(clap::Args)]
#[command(next_help_heading = "Language model")]
pub struct ModelArgs {
    /// Prompt tokens to time (default: 512); 0 for none.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pp: Vec<usize>,
    /// Tokens to generate one by one (default: 128); 0 for
    /// none.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    tg: Vec<usize>,
    /// Tokens in the cache before (default: 0). For --pp, a
    /// multiple of the tokens of a prefill step: 512, or all of the
    /// prompt if fewer.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    depth: Vec<usize>,
    /// Sessions that generate at once (default: 1); tokens
    /// of all count.
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    sessions: Vec<usize>,
    /// Repetitions of each test, after one to warm up
    /// (default: 5).
    #[arg(long, value_name = "COUNT")]
    repetitions: Option<usize>,
}

impl ModelArgs {
    /// Options by name, and whether they are given.
    pub fn given(&self) -> [(&'static str, bool); 5] {
        [
            ("--pp", !self.pp.is_empty()),
            ("--tg", !self.tg.is_empty()),
            ("--depth", !self.depth.is_empty()),
            ("--sessions", !self.sessions.is_empty()),
            ("--repetitions", self.repetitions.is_some()),
        ]
    }

    /// The tests, prefill first.
    fn tests(&self) -> Vec<Test> {
        let or = |given: &[usize], default: usize| if given.is_empty() { vec![default] } else { given.to_vec() };
        let (pp, tg) = (or(&self.pp, 512), or(&self.tg, 128));
        let (depths, sessions) = (or(&self.depth, 0), or(&self.sessions, 1));
        let mut tests = Vec::new();
        for &depth in &depths {
            let prefill = |&tokens: &usize| Test { phase: Phase::Prefill, tokens, depth, sessions: 1 };
            tests.extend(pp.iter().filter(|&&tokens| tokens > 0).map(prefill));
        }
        for &depth in &depths {
            for &sessions in &sessions {
                let decode = |&tokens: &usize| Test { phase: Phase::Decode, tokens, depth, sessions };
                tests.extend(tg.iter().filter(|&&tokens| tokens > 0).map(decode));
            }
        }
        tests
    }
}

/// Prompt or generated tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prefill,
    Decode,
}

/// A measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    phase: Phase,
    /// Prompt tokens, or tokens of each session.
    tokens: usize,
    /// Tokens in the cache before.
    depth: usize,
    sessions: usize,
}

impl Test {
    /// Its name in `llama-bench`.
    fn name(self) -> String {
        let Self { phase, tokens, depth, .. } = self;
        let phase = match phase {
            Phase::Prefill => "pp",
            Phase::Decode => "tg",
        };
        if depth == 0 { format!("{phase}{tokens}") } else { format!("{phase}{tokens} @ d{depth}") }
    }

    /// Checks the sizes.
    fn check(self, context: usize) -> anyhow::Result<()> {
        let Self { phase, tokens, depth, sessions } = self;
        let name = self.name();
        // The last token of a session is sampled, but not read.
        let most = context.saturating_sub(usize::from(phase == Phase::Decode));
        let fits = depth.checked_add(tokens).is_some_and(|all| all <= most);
        ensure!(fits, "{name}: expected at most {most} tokens in the context of the model");
        ensure!((1..=MOST_SESSIONS).contains(&sessions), "{name}: expected 1 to {MOST_SESSIONS} sessions");
        let step = generation::step_tokens(tokens);
        let is_whole = phase == Phase::Decode || depth.is_multiple_of(step);
        ensure!(is_whole, "{name}: expected a depth that is a multiple of {step}, the tokens of a prefill step");
        Ok(())
    }

    /// Measures it `repetitions` times, after one to warm up.
    fn run(self, model: &LanguageModel, options: EngineOptions, repetitions: usize) -> anyhow::Result<Steps> {
        let Self { phase, tokens, depth, sessions } = self;
        match phase {
            Phase::Prefill => generation::prefill(model, options, depth, tokens, repetitions),
            Phase::Decode => generation::decode(model, options, (depth, sessions), tokens, repetitions),
        }
    }

    /// Where the time of its decode steps goes.
    fn timeline(self, model: &LanguageModel, options: EngineOptions) -> anyhow::Result<Timeline> {
        let steps = timeline::STEPS;
        let entries = generation::timeline(model, options, (self.depth, self.sessions), steps)?;
        Ok(Timeline::of_steps(self.name(), &entries, steps))
    }
}

/// One measurement.
#[derive(Serialize)]
struct ModelRow {
    device: String,
    architecture: &'static str,
    /// Such as `pp512` or `tg128 @ d2048`.
    test: String,
    /// Timed tokens of a session.
    tokens: usize,
    /// Tokens in the cache of a session before.
    depth: usize,
    sessions: usize,
    /// Ranks among which the model is divided.
    ranks: u32,
    /// Whether the ranks have whole experts.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    expert_parallel: bool,
    kv_format: String,
    /// Whether cached keys and values have a Hadamard rotation.
    rotate_cache: bool,
    x_dtype: String,
    x_precision: String,
    repetitions: usize,
    /// Median, over all sessions.
    tokens_per_second: f64,
    /// Half the interquartile range, relative to the median.
    noise: f64,
    /// Median time of all timed tokens.
    milliseconds: f64,
    /// Bytes that a decode step reads at least on the first rank of
    /// this process: weights, keys and values. Absent for prefill.
    step_bytes: Option<f64>,
    /// Bytes of a step over its time.
    bytes_per_second: Option<f64>,
    /// Share of the read bandwidth of that rank's device.
    bandwidth_share: Option<f64>,
    /// Why the share exceeds 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    above_roof: Option<AboveRoof>,
    #[serde(flatten)]
    provenance: Provenance,
    /// Where the time of a decode step goes; only with `--profile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeline: Option<Timeline>,
}

impl Row for ModelRow {
    const COLUMNS: &'static [Column] = &[
        words("test", 18),
        numbers("sessions", 8),
        words("kv", 5),
        numbers("tokens/s", 10),
        numbers("noise", 6),
        numbers("time ms", 10),
        numbers("MB a step", 9),
        numbers("GB/s", 7),
        numbers("of read", 8),
    ];

    fn cells(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        vec![
            self.test.clone(),
            self.sessions.to_string(),
            self.kv_format.clone(),
            format!("{:.1}", self.tokens_per_second),
            percent(self.noise),
            format!("{:.2}", self.milliseconds),
            self.step_bytes.map(|bytes| format!("{:.1}", bytes / 1e6)).unwrap_or_default(),
            self.bytes_per_second.map(|rate| format!("{:.1}", rate / 1e9)).unwrap_or_default(),
            self.bandwidth_share.map(|share| share_text(share, self.above_roof)).unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the model cannot be opened or run, a test does not fit it,
/// or an option of products is given.
pub fn run(ranks: &[Context], args: &Args, path: &Path, printing: Printing) -> anyhow::Result<Holds> {
    let precision = Precision { activations: args.x_dtype, x_precision: args.x_precision, ..Precision::default() };
    let defaults = EngineOptions::default();
    let kv_format = args.kv_format.unwrap_or(defaults.kv_format);
    let options = EngineOptions { kv_format, rotate_cache: args.rotate_cache, ..defaults };
    let repetitions = args.language_model.repetitions.unwrap_or(5);
    ensure!(repetitions > 0, "expected at least one repetition");
    let model = LanguageModel::open_ranks(ranks, path, args.ranks.model_options(precision))?;
    let part = model.part()?;
    let ctx = model.context();
    let tests = args.language_model.tests();
    tests.iter().try_for_each(|test| test.check(model.hyperparameters().context))?;
    let bandwidth = read_bandwidth(ctx)?;
    if printing.is_text() {
        let (info, architecture) = (ctx.info(), model.architecture());
        let weights = bytes(model.weight_bytes(1) as u64);
        out::line(&format!("{} ({}), reads {:.1} GB/s", info.name, info.id, bandwidth / 1e9))?;
        out::line(&format!("{architecture}, {weights} of weights a token, {} in X", args.x_dtype))?;
    }
    let trace = args.trace()?;
    let progress = Progress::new(tests.len() as u64, "measuring");
    let mut table = Table::new(printing);
    for test in tests {
        progress.say(test.name());
        let steps = test.run(&model, options, repetitions)?;
        let (seconds, noise) = steps.median_and_noise();
        let step_bytes = steps.step_bytes(&part, kv_format);
        let bytes_per_second = step_bytes.map(|bytes| bytes * test.tokens as f64 / seconds);
        let has_timeline = args.profile.is_some() && test.phase == Phase::Decode;
        let timeline = has_timeline.then(|| test.timeline(&model, options)).transpose()?;
        let bandwidth_share = bytes_per_second.filter(|_| bandwidth > 0.0).map(|rate| rate / bandwidth);
        let row = ModelRow {
            device: ctx.info().name.clone(),
            architecture: model.architecture(),
            test: test.name(),
            tokens: test.tokens,
            depth: test.depth,
            sessions: test.sessions,
            ranks: args.ranks.tp,
            expert_parallel: args.ranks.expert_parallel,
            kv_format: kv_format.to_string(),
            rotate_cache: options.rotates_cache(),
            x_dtype: args.x_dtype.to_string(),
            x_precision: args.x_precision.to_string(),
            repetitions,
            tokens_per_second: (test.tokens * test.sessions) as f64 / seconds,
            noise,
            milliseconds: seconds * 1e3,
            step_bytes,
            bytes_per_second,
            bandwidth_share,
            above_roof: bandwidth_share.zip(step_bytes).and_then(|(share, bytes)| AboveRoof::of(ctx, share, bytes)),
            provenance: Provenance::now(ctx.info()),
            timeline,
        };
        table.push(row, &progress)?;
        progress.step(1);
    }
    drop(progress);
    let rows = table.finish()?;
    let timelines: Vec<&Timeline> = rows.iter().filter_map(|row| row.timeline.as_ref()).collect();
    if printing.is_text() {
        timelines.iter().try_for_each(|timeline| out::line(&format!("\n{timeline}")))?;
    }
    if let Some(file) = trace {
        file.finish_with(timeline::chrome_trace(&timelines).as_bytes())?;
    }
    Ok(Holds::Yes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(pp: &[usize], tg: &[usize], depth: &[usize], sessions: &[usize]) -> ModelArgs {
        let [pp, tg, depth, sessions] = [pp, tg, depth, sessions].map(<[usize]>::to_vec);
        ModelArgs { pp, tg, depth, sessions, repetitions: None }
    }

    #[test]
    fn tests_have_the_names_of_llama_bench() {
        let names = |args: ModelArgs| args.tests().iter().map(|test| (test.name(), test.sessions)).collect::<Vec<_>>();
        assert_eq!(names(args(&[], &[], &[], &[])), [("pp512".into(), 1), ("tg128".into(), 1)]);
        assert_eq!(
            names(args(&[0], &[16], &[0, 2048], &[1, 8])),
            [("tg16".into(), 1), ("tg16".into(), 8), ("tg16 @ d2048".into(), 1), ("tg16 @ d2048".into(), 8)]
        );
    }

    #[test]
    fn tests_that_do_not_fit_are_refused() {
        let test = |phase, tokens, depth, sessions| Test { phase, tokens, depth, sessions };
        assert!(test(Phase::Prefill, 512, 1536, 1).check(2048).is_ok());
        assert!(test(Phase::Decode, 47, 2000, 1).check(2048).is_ok());
        for (refused, part) in [
            (test(Phase::Prefill, 512, 2048, 1), "at most 2048 tokens"),
            (test(Phase::Decode, 48, 2000, 1), "at most 2047 tokens"),
            (test(Phase::Decode, usize::MAX, 2, 1), "at most 2047 tokens"),
            (test(Phase::Prefill, 512, 1000, 1), "a multiple of 512"),
            (test(Phase::Prefill, 64, 100, 1), "a multiple of 64"),
            (test(Phase::Decode, 1, 0, 0), "1 to 4096 sessions"),
            (test(Phase::Decode, 1, 0, usize::MAX), "1 to 4096 sessions"),
        ] {
            let error = refused.check(2048).expect_err("it does not fit").to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

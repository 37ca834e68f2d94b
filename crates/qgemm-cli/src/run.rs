//! `qgemm run`: text of a language model.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use qgemm_api::{DType, KvFormat, Tuned, XPrecision, printable};
use qgemm_model::{Engine, EngineOptions, Finish, Generation, LanguageModel, Message, Precision, Sampling};
use serde::Serialize;

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::ranks::RankArgs;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file, or a checkpoint folder with safetensors and
    /// `tokenizer.json`, of llama, mistral, qwen2 or qwen3.
    model: PathBuf,
    /// The text to continue; with --chat, the user's message.
    prompt: String,
    /// Put the prompt into the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Message that sets the assistant's task; needs --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    device: String,
    #[command(flatten)]
    ranks: RankArgs,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Divisor of logits; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample among this many tokens; 0 permits all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Sample among the most likely tokens of this probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Sample tokens of this probability, relative to the best one.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Divisor of the logits of earlier tokens.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End the text before this string; may be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Format of the KV cache: f16, bf16, f32, e4m3, q8_0 or q4_0.
    #[arg(long, default_value_t = KvFormat::Plain(DType::F16))]
    kv_format: KvFormat,
    /// Hadamard rotation of cached keys and values: true or false
    /// (default: true for q4_0).
    #[arg(long, value_name = "BOOL")]
    rotate_cache: Option<bool>,
    /// Type of the activations; logits are f32.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// Permitted rounding of activations, as of `qgemm plan`.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
}

/// The result as JSON.
#[derive(Default, Serialize)]
struct Report {
    architecture: String,
    device: String,
    ranks: u32,
    text: String,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    /// Natural logarithms, of the model's own logits.
    log_probabilities: Vec<f32>,
    /// `end`, `stop`, `tokens` or `context`.
    finish: &'static str,
    load_seconds: f64,
    prompt_seconds: f64,
    /// Tokens per second after the first.
    tokens_per_second: f64,
}

/// Runs the command.
///
/// # Errors
/// When the model cannot be opened or run, or the prompt does not fit.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let json = printing.json("run")?;
    let start = Instant::now();
    let ranks = args.ranks.open(&args.device, &Tuned::Auto)?;
    let precision = Precision { activations: args.x_dtype, x_precision: args.x_precision, ..Precision::default() };
    let model = LanguageModel::open_ranks(&ranks, &args.model, args.ranks.model_options(precision))?;
    let load_seconds = start.elapsed().as_secs_f64();
    let prompt = match args.chat {
        false => model.tokenizer().encode(&args.prompt)?,
        true => {
            let system = args.system.as_ref().map(Message::system);
            model.encode_chat(&system.into_iter().chain([Message::user(&args.prompt)]).collect::<Vec<_>>())?
        }
    };
    let report = Report {
        architecture: model.architecture().to_owned(),
        device: model.context().info().id.to_string(),
        ranks: args.ranks.tp,
        prompt_tokens: prompt.len(),
        load_seconds,
        ..Report::default()
    };
    let report = generate(args, &model, &prompt, report, json)?;
    if !args.ranks.is_first() {
        return Ok(Holds::Yes);
    }
    if json {
        out::json(&report)?;
    } else {
        let text = if report.text.ends_with('\n') { "" } else { "\n" };
        out::text(text)?;
        let Report { tokens, prompt_tokens, prompt_seconds, tokens_per_second, .. } = &report;
        let tokens = tokens.len();
        eprintln!(
            "{prompt_tokens} tokens read in {prompt_seconds:.2} s, {tokens} written, {tokens_per_second:.1} a second"
        );
    }
    Ok(Holds::Yes)
}

/// Generates text, and streams it unless `json`.
fn generate(
    args: &Args,
    model: &LanguageModel,
    prompt: &[u32],
    mut report: Report,
    json: bool,
) -> anyhow::Result<Report> {
    let context = model.hyperparameters().context;
    let options = EngineOptions {
        sessions: 1,
        cache_tokens: prompt.len().saturating_add(args.tokens).clamp(1, context),
        kv_format: args.kv_format,
        rotate_cache: args.rotate_cache,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(model, options)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        log_probabilities: json.then_some(0),
    };
    let generation = Generation { sampling, max_tokens: args.tokens, stop: args.stop.clone(), ..Generation::default() };
    let start = Instant::now();
    engine.start(prompt, generation)?;
    let mut first = None;
    while !engine.is_idle() {
        for output in engine.step()? {
            first.get_or_insert_with(|| start.elapsed().as_secs_f64());
            if let Some(token) = output.token {
                report.tokens.push(token.id);
                report.log_probabilities.extend(token.log_probability);
            }
            report.text += &output.text;
            if !json && args.ranks.is_first() {
                out::text(&shown(&output.text))?;
            }
            if let Some(finish) = output.finish {
                report.finish = name(finish)?;
            }
        }
    }
    report.prompt_seconds = first.unwrap_or_default();
    let seconds = start.elapsed().as_secs_f64() - report.prompt_seconds;
    let after_first = report.tokens.len().saturating_sub(1) as f64;
    report.tokens_per_second = if seconds > 0.0 { after_first / seconds } else { 0.0 };
    Ok(report)
}

/// The name of a regular end.
fn name(finish: Finish) -> anyhow::Result<&'static str> {
    match finish {
        Finish::EndOfText => Ok("end"),
        Finish::StopString(_) => Ok("stop"),
        Finish::MaxTokens => Ok("tokens"),
        Finish::ContextFull | Finish::CacheFull => Ok("context"),
        Finish::Failed(error) => Err(error).context("sampling a token"),
        other => anyhow::bail!("the session ended: {other:?}"),
    }
}

/// The text without characters that act on a terminal, but for line breaks and tabs.
fn shown(text: &str) -> String {
    let piece = |piece: &str| match piece {
        "\n" | "\t" => piece.to_owned(),
        other => printable(other),
    };
    let mut buffer = [0; 4];
    text.chars().map(|c| piece(c.encode_utf8(&mut buffer))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_cannot_act_on_the_terminal() {
        assert_eq!(shown("a\n\tb\u{1b}[2Jé"), "a\n\tb\\u{1b}[2Jé");
    }
}

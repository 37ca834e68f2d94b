//! candle's quantized Llama and the same model on qgemm's layers: tokens, logits and times.
//!
//! ```sh
//! cargo run --release --example llama -- model.gguf --device cpu
//! cargo run --release --example llama --features cuda -- --random 4 --device cuda
//! ```

mod random;

use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_core::quantized::gguf_file::Content;
use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_transformers::models::quantized_llama::ModelWeights;
use clap::Parser;
use qgemm_candle::{Context, Llama, LlamaOptions};

/// Runs a model with candle's own layers and with qgemm's.
#[derive(Parser)]
struct Args {
    /// GGUF file of the architecture llama.
    model: Option<PathBuf>,
    /// Instead of a file: a model of so many layers of Llama 3 8B with random weights in Q4_K.
    #[arg(long, conflicts_with = "model", required_unless_present = "model")]
    random: Option<usize>,
    /// Device: cpu or cuda.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Generated tokens.
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Type of activations with qgemm: f32, f16 or bf16. By default f16 on CUDA, f32 on the CPU.
    #[arg(long)]
    dtype: Option<String>,
    /// Timed repetitions. The median is printed.
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// Largest normalized mean squared error of the logits.
    #[arg(long, default_value_t = 1e-2)]
    nmse: f64,
}

/// Decoder of one sequence.
trait Model {
    /// Logits `[1, vocabulary]` of the last token.
    fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor>;
}

impl Model for ModelWeights {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        self.forward(tokens, position)
    }
}

impl Model for Llama {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        self.forward(tokens, position)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    match (&args.model, args.random) {
        (Some(path), _) => compare(&args, BufReader::new(File::open(path)?)),
        (None, Some(layers)) => compare(&args, Cursor::new(random::model(layers)?)),
        (None, None) => bail!("expected a model"),
    }
}

fn compare(args: &Args, mut file: impl Read + Seek) -> Result<()> {
    let device = match &*args.device {
        "cpu" => Device::Cpu,
        "cuda" => Device::new_cuda(0)?,
        other => bail!("--device: expected cpu or cuda, got {other}"),
    };
    let mut options = LlamaOptions::new(&device, args.prompt + args.tokens);
    if let Some(dtype) = &args.dtype {
        options.dtype = dtype.parse().map_err(candle_core::Error::wrap)?;
    }
    let (content, start) = (Content::read(&mut file)?, Instant::now());
    let ctx = Context::new(&device)?;
    let mut ours = Llama::from_gguf(&ctx, &content, &mut file, options)?;
    println!("qgemm: loaded in {:.2?} on {}", start.elapsed(), ctx.qgemm().info().name);
    let start = Instant::now();
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &device)?;
    println!("candle: loaded in {:.2?}", start.elapsed());

    let prompt: Vec<u32> = (0..args.prompt as u32).map(|i| 13 + i * 7919 % 20_000).collect();
    let expected = generate(&mut theirs, &device, &prompt, args.tokens, None)?;
    let got = generate(&mut ours, &device, &prompt, args.tokens, Some(&expected.tokens))?;
    let equal = expected.tokens.iter().zip(&got.tokens).filter(|(a, b)| a == b).count();
    let (nmse, cosine) = difference(&expected.logits, &got.logits);
    println!("tokens: {equal} of {} equal, each behind candle's tokens", args.tokens);
    println!("logits: NMSE {nmse:.2e} (at most {:.0e}), cosine {cosine:.6}", args.nmse);
    for (name, all) in [("candle", &expected), ("qgemm", &got)] {
        let count = all.logits.iter().filter(|logit| !logit.is_finite()).count();
        if count > 0 {
            println!("{name}: {count} of {} logits are not finite", all.logits.len());
        }
    }

    let (candle, qgemm) = (time(&mut theirs, &device, &prompt, args)?, time(&mut ours, &device, &prompt, args)?);
    println!("{:<22}{:>12}{:>12}{:>8}", "", "candle", "qgemm", "ratio");
    let prefill = format!("prefill, {} tokens", args.prompt);
    for (name, [candle, qgemm]) in [(&*prefill, [candle.0, qgemm.0]), ("decode, a token", [candle.1, qgemm.1])] {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!("{name:<22}{:>9.3} ms{:>9.3} ms{:>8.2}", ms(candle), ms(qgemm), ms(candle) / ms(qgemm));
    }
    // NaN fails, too.
    if nmse <= args.nmse { Ok(()) } else { bail!("the logits differ by an NMSE of {nmse:e}") }
}

/// Greedy tokens, and the logits behind each.
struct Generated {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

/// Generates tokens. Each is the best behind the `given` ones, or else behind the generated.
fn generate(
    model: &mut dyn Model,
    device: &Device,
    prompt: &[u32],
    count: usize,
    given: Option<&[u32]>,
) -> Result<Generated> {
    let mut all = Generated { tokens: Vec::new(), logits: Vec::new() };
    let (mut input, mut position) = (prompt.to_vec(), 0);
    for i in 0..count {
        let logits = model.forward(&Tensor::new(&*input, device)?.unsqueeze(0)?, position)?;
        let logits: Vec<f32> = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32;
        position += input.len();
        input = vec![given.map_or(best, |given| given[i])];
        all.tokens.push(best);
        all.logits.extend(logits);
    }
    Ok(all)
}

/// Normalized mean squared error, and cosine.
fn difference(expected: &[f32], got: &[f32]) -> (f64, f64) {
    let sum = |of: fn(f64, f64) -> f64| expected.iter().zip(got).map(|(&a, &b)| of(a.into(), b.into())).sum::<f64>();
    let (aa, bb, ab) = (sum(|a, _| a * a), sum(|_, b| b * b), sum(|a, b| a * b));
    (sum(|a, b| (a - b) * (a - b)) / aa, ab / (aa * bb).sqrt())
}

/// Median time of the prompt, and of a token behind it. Greedy; a token is read back before
/// the next, as in a chat.
fn time(model: &mut dyn Model, device: &Device, prompt: &[u32], args: &Args) -> Result<(Duration, Duration)> {
    let best = |logits: &Tensor| logits.argmax(D::Minus1)?.flatten_all()?.get(0)?.to_scalar::<u32>();
    let prompt_tokens = Tensor::new(prompt, device)?.unsqueeze(0)?;
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for _ in 0..args.repetitions.max(1) {
        let start = Instant::now();
        let mut token = best(&model.forward(&prompt_tokens, 0)?)?;
        prefills.push(start.elapsed());
        let start = Instant::now();
        let steps = args.tokens.saturating_sub(1);
        for i in 0..steps {
            token = best(&model.forward(&Tensor::new(&[[token]], device)?, prompt.len() + i)?)?;
        }
        decodes.push(start.elapsed() / steps.max(1) as u32);
    }
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    Ok((median(prefills), median(decodes)))
}

//! Sentence encoder (all-MiniLM-L6-v2) on any device, with linear
//! layers in any weight format:
//!
//! ```sh
//! cargo run --release --example embed -- MODEL_FOLDER --format q8_0 --device auto --x-precision auto
//! ```
//!
//! The folder is a checkpoint: `model.safetensors`, `config.json` and
//! `vocab.txt`. It prints sentence similarities and timings. The example uses
//! published crates only; an engine can start from `bert.rs`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

mod bert;
mod wordpiece;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use qgemm_api::{Context, Format, XPrecision};

use bert::{Choice, Encoder};

const SENTENCES: [&str; 6] = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
    "Matrix products decide how fast a language model answers.",
];

/// Repetitions of all embeddings, to measure the time.
const REPEATS: u32 = 20;

struct Arguments {
    folder: PathBuf,
    device: String,
    choice: Choice,
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let (mut folder, mut device) = (None, "auto".to_owned());
    let (mut format, mut x_precision) = ("q8_0".parse::<Format>()?, XPrecision::default());
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        let mut value = || given.next().ok_or_else(|| format!("expected a value after `{argument}`"));
        match argument.as_str() {
            "--device" => device = value()?,
            "--format" => format = value()?.parse()?,
            "--x-precision" => x_precision = value()?.parse()?,
            option if option.starts_with('-') => {
                return Err(format!("expected --device, --format or --x-precision, got `{option}`").into());
            }
            path => folder = Some(PathBuf::from(path)),
        }
    }
    let folder = folder.ok_or("expected the folder of a checkpoint, such as all-MiniLM-L6-v2")?;
    Ok(Arguments { folder, device, choice: Choice { format, x_precision } })
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Arguments { folder, device, choice } = arguments;
    let ctx = Context::open(device)?;
    let start = Instant::now();
    let encoder = Encoder::open(&ctx, folder, *choice)?;
    println!(
        "{} ({}): linear layers in {}, X at the coarsest as `{}` permits; loaded in {:.0} ms\n",
        ctx.info().name,
        ctx.info().id,
        choice.format,
        choice.x_precision,
        start.elapsed().as_secs_f64() * 1e3
    );

    // The first call makes plans and, on CUDA, compiles kernels.
    let embeddings = encoder.embed(&SENTENCES)?;
    for (i, sentence) in SENTENCES.iter().enumerate() {
        let similarities: Vec<String> =
            embeddings[..=i].iter().map(|other| format!("{:6.3}", dot(&embeddings[i], other))).collect();
        println!("{:42} {sentence}", similarities.join(" "));
    }

    let start = Instant::now();
    for _ in 0..REPEATS {
        encoder.embed(&SENTENCES)?;
    }
    let milliseconds = start.elapsed().as_secs_f64() * 1e3 / f64::from(REPEATS);
    let tokens: usize = SENTENCES.iter().map(|sentence| encoder.tokens(sentence).len()).sum();
    println!("\n{} sentences, {tokens} tokens: {milliseconds:.2} ms", SENTENCES.len());
    Ok(())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

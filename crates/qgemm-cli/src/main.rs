//! The `qgemm` command: runs language models, lists devices and
//! models, quantizes, verifies kernels against the oracle, plans,
//! tunes, benchmarks and reports.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "a command says what it leaves out")]

mod bench;
mod choice;
mod completions;
mod counters;
mod devices;
mod explain;
#[cfg(test)]
mod fuzz;
mod holds;
mod inspect;
mod loading;
mod measured;
mod opening;
mod operations;
mod out;
mod plan;
mod prepare;
mod progress;
mod quantize;
mod report;
mod run;
mod stress;
mod support;
mod table;
mod text_file;
mod tune;
mod verify;
mod whole_file;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use qgemm_api::printable;
use tracing_subscriber::EnvFilter;

use holds::Holds;

#[derive(Parser)]
#[command(
    name = "qgemm",
    version,
    about = "Quantized matrix multiplication: language models, devices, model files, checks, benchmarks"
)]
struct Cli {
    /// Print tables as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the devices of this machine and the formats that they multiply.
    Devices,
    /// Continue a text with a language model, or answer a message.
    Run(run::Args),
    /// List the tensors of a model: names, formats, shapes, bytes.
    Inspect(inspect::Args),
    /// Quantize the weights of a model, safetensors or GGUF, into a
    /// GGUF file.
    Quantize(quantize::Args),
    /// Check kernels against the f64 oracle. Fails when a case
    /// exceeds its limit.
    Verify(verify::Args),
    /// Measure kernels, or a language model. With a baseline, fails
    /// on a regression beyond the noise.
    Bench(bench::Args),
    /// Show the chosen kernel of a shape, the other candidates, and
    /// why; also for absent chips.
    Explain(explain::Args),
    /// Write the execution and memory plan of a model, or check one.
    Plan(plan::Args),
    /// Compile and load the kernels of a model's products into the
    /// cache.
    Prepare(prepare::Args),
    /// Measure candidates within a budget, and keep the best in a
    /// table for contexts.
    Tune(tune::Args),
    /// Summarize a device's measurements on one page (HTML).
    Report(report::Args),
    /// List the arithmetic for each format on each kind of device.
    Support(support::Args),
    /// Measure how fast weights are packed and loaded.
    Loading(loading::Args),
    /// Print the completion script of a shell.
    Completions(completions::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Logs go to standard error, to keep tables clean.
    // QGEMM_LOG=qgemm_api=info shows the chosen kernels.
    let filter = EnvFilter::try_from_env("QGEMM_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match &cli.command {
        Command::Devices => devices::run(cli.json),
        Command::Run(args) => run::run(args, cli.json),
        Command::Inspect(args) => inspect::run(args, cli.json),
        Command::Quantize(args) => quantize::run(args, cli.json),
        Command::Verify(args) => verify::run(args, cli.json),
        Command::Bench(args) => bench::run(args, cli.json),
        Command::Explain(args) => explain::run(args, cli.json),
        Command::Plan(args) => plan::run(args, cli.json),
        Command::Prepare(args) => prepare::run(args, cli.json),
        Command::Tune(args) => tune::run(args, cli.json),
        Command::Report(args) => report::run(args, cli.json),
        Command::Support(args) => support::run(args, cli.json),
        Command::Loading(args) => loading::run(args, cli.json),
        Command::Completions(args) => completions::run(args, Cli::command()),
    };
    match result {
        Ok(Holds::Yes) => ExitCode::SUCCESS,
        Ok(Holds::No) => ExitCode::FAILURE,
        Err(error) if error.is::<out::Closed>() => ExitCode::from(OF_A_CLOSED_PIPE),
        Err(error) => {
            // The message may contain names from a file. If standard error
            // is closed, too, nothing can be reported.
            let _ = writeln!(std::io::stderr(), "error: {}", printable(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Exit status like that of a program ended by SIGPIPE.
const OF_A_CLOSED_PIPE: u8 = 128 + 13;

//! The `qgemm` command: runs language models, lists devices and
//! models, quantizes, verifies kernels against the oracle, plans,
//! tunes, benchmarks and reports.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "a command says what it leaves out")]

mod bench;
mod choice;
mod completions;
mod contention;
mod counters;
mod devices;
mod doctor;
mod explain;
#[cfg(test)]
mod fuzz;
mod holds;
mod inspect;
mod kernels;
mod loading;
mod measured;
mod opening;
mod operations;
mod out;
mod plan;
mod prepare;
mod progress;
mod provenance;
mod quantize;
mod ranks;
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
use out::PrintingOptions;

#[derive(Parser)]
#[command(
    name = "qgemm",
    version = provenance::VERSION,
    about = "Quantized matrix multiplication: language models, devices, model files, checks, benchmarks"
)]
struct Cli {
    #[command(flatten)]
    printing: PrintingOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the devices of this machine and the formats that they multiply.
    Devices,
    /// Check this machine: driver, compiler, caches, processor and load.
    /// Fails when something does not work.
    Doctor,
    /// Continue a text with a language model, or answer a message.
    Run(run::Args),
    /// Show what a model is: settings, tensors, totals by format.
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
    /// List CUDA's product kernels by how near each comes to the best of
    /// a grid of problems, by the cost model.
    Kernels(kernels::Args),
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
    match result(&cli) {
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

/// Runs the chosen command.
fn result(cli: &Cli) -> anyhow::Result<Holds> {
    let printing = cli.printing.chosen()?;
    match &cli.command {
        Command::Devices => devices::run(printing),
        Command::Doctor => doctor::run(printing),
        Command::Run(args) => run::run(args, printing),
        Command::Inspect(args) => inspect::run(args, printing),
        Command::Quantize(args) => quantize::run(args, printing),
        Command::Verify(args) => verify::run(args, printing),
        Command::Bench(args) => bench::run(args, printing),
        Command::Explain(args) => explain::run(args, printing),
        Command::Kernels(args) => kernels::run(args, printing),
        Command::Plan(args) => plan::run(args, printing),
        Command::Prepare(args) => prepare::run(args, printing),
        Command::Tune(args) => tune::run(args, printing),
        Command::Report(args) => report::run(args, printing),
        Command::Support(args) => support::run(args, printing),
        Command::Loading(args) => loading::run(args, printing),
        Command::Completions(args) => completions::run(args, Cli::command()),
    }
}

/// Exit status like that of a program ended by SIGPIPE.
const OF_A_CLOSED_PIPE: u8 = 128 + 13;

//! Build and check commands of the workspace:
//! `cargo xtask <command>`, one file for each command.

#![allow(clippy::print_stdout, reason = "commands print their results")]

mod arm;
mod build_kernels;
mod codegen;
mod embed;
mod kernels_lock;
mod model;
mod nvrtc;
mod performance;
mod pip;
mod sass;
mod spills;
mod stress;
mod test;
mod tidy;
mod wgmma;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build and check commands of the qgemm workspace")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile every kernel for the given architectures into bundles.
    BuildKernels(build_kernels::Args),
    /// Generate the parameter ABI and the layouts as CUDA and WGSL,
    /// or check that the generated files are current.
    Codegen(codegen::Args),
    /// Ask the compiler which kernels exceed the registers, so that main
    /// loops choose among the others.
    Spills(spills::Args),
    /// Print the path of a model that examples and tests run, and
    /// install it if necessary.
    Model(model::Args),
    /// Write the tables of docs/results/performance.md from
    /// benches/results/, or check that they are current.
    Performance(performance::Args),
    /// Run every check and test of every layer, and
    /// set up what is missing.
    Test(test::Args),
    /// Check repository rules that the compiler does not: layering,
    /// kernel sources, file sizes.
    Tidy(tidy::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::BuildKernels(args) => build_kernels::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Spills(args) => spills::run(&args),
        Command::Model(args) => model::run(&args),
        Command::Performance(args) => performance::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Tidy(args) => tidy::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

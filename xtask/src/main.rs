//! Build and check commands of the workspace:
//! `cargo xtask <command>`, one file for each command.
//! Commands of [`kernels`] have a package of their own.

#![allow(clippy::print_stdout, reason = "commands print their results")]

mod arm;
mod dist;
mod downstream;
mod kernels;
mod model;
mod regen;
mod target;
mod test;
mod tidy;

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
    BuildKernels(kernels::Args),
    /// Generate the parameter ABI and the layouts as CUDA and WGSL,
    /// or check that the generated files are current.
    Codegen(kernels::Args),
    /// Build release archives of the command `qgemm`, with completions
    /// and SHA-256 sums.
    Dist(dist::Args),
    /// Ask the compiler which kernels exceed the registers, so that main
    /// loops choose among the others.
    Spills(kernels::Args),
    /// Write the numbers of kernels and bundles into the documentation,
    /// or check that they are current.
    Figures(kernels::Args),
    /// Print the path of a model that examples and tests run, and
    /// install it if necessary.
    Model(model::Args),
    /// Write the tables of docs/results/performance.md from
    /// benches/results/, or check that they are current.
    Performance(kernels::Args),
    /// Regenerate every generated file, and say what changed.
    Regen(regen::Args),
    /// Run every check and test of every layer, and
    /// set up what is missing.
    Test(test::Args),
    /// Check repository rules that the compiler does not: layering,
    /// kernel sources, file sizes.
    Tidy(tidy::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::BuildKernels(args) => kernels::run("build-kernels", &args),
        Command::Codegen(args) => kernels::run("codegen", &args),
        Command::Dist(args) => dist::run(&args),
        Command::Spills(args) => kernels::run("spills", &args),
        Command::Figures(args) => kernels::run("figures", &args),
        Command::Model(args) => model::run(&args),
        Command::Performance(args) => kernels::run("performance", &args),
        Command::Regen(args) => regen::run(&args),
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

//! Commands of `cargo xtask` that use crates of the workspace,
//! one file for each.

#![allow(clippy::print_stdout, reason = "commands print their results")]

mod atomic;
mod build_kernels;
mod codegen;
mod embed;
mod figures;
mod kernels_lock;
mod nvrtc;
mod page;
mod performance;
mod sass;
mod spills;
mod stress;
mod wgmma;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Commands that use crates of the workspace")]
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
    /// Write the tables of docs/results/performance.md from
    /// benches/results/, or check that they are current.
    Performance(performance::Args),
    /// Write the numbers of kernels and bundles into the documentation,
    /// or check that they are current.
    Figures(figures::Args),
    /// Find NVRTC, or install it. A step of `test`.
    Nvrtc,
    /// Run the random cases of a day. A step of `test`.
    Stress(stress::Args),
    /// Build kernel bundles into a program. A step of `test`.
    Embed,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::BuildKernels(args) => build_kernels::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Spills(args) => spills::run(&args),
        Command::Performance(args) => performance::run(&args),
        Command::Figures(args) => figures::run(&args),
        Command::Nvrtc => nvrtc::ensure(),
        Command::Stress(args) => stress::run(&args),
        Command::Embed => embed::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

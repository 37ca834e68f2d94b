//! Commands that use crates of the workspace. Their package,
//! `xtask-kernels`, is built when one of them runs.

use std::ffi::OsString;
use std::process::{self, Command};

use anyhow::Context;

/// Cargo arguments that run a command of the package.
pub const RUN: [&str; 5] = ["run", "--quiet", "--package", "xtask-kernels", "--"];

/// Arguments of a command, passed on as they are.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    all: Vec<OsString>,
}

/// Runs `command` in the current folder, to which paths
/// among the arguments are relative. A failed command has
/// printed why, so this process ends with its exit code.
///
/// # Errors
/// When cargo cannot be started.
pub fn run(command: &str, args: &Args) -> anyhow::Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let status = cargo.args(RUN).arg(command).args(&args.all).status().context("starting cargo")?;
    if !status.success() {
        process::exit(status.code().unwrap_or(1));
    }
    Ok(())
}

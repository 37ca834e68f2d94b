//! `qgemm completions`: completion scripts for shells.

use clap_complete::Shell;

use crate::holds::Holds;
use crate::out;

#[derive(clap::Args)]
pub struct Args {
    /// Shell that reads the script.
    shell: Shell,
}

/// Prints the script of `command`.
///
/// # Errors
/// As [`out::text`].
pub fn run(args: &Args, command: clap::Command) -> anyhow::Result<Holds> {
    out::text(&script(args.shell, command))?;
    Ok(Holds::Yes)
}

fn script(shell: Shell, mut command: clap::Command) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "qgemm", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;
    use crate::Cli;

    #[test]
    fn every_shell_completes_every_command() {
        for &shell in Shell::value_variants() {
            let script = script(shell, Cli::command());
            for command in Cli::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }
}

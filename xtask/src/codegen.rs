//! `cargo xtask codegen`.

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail when a printed file is stale.
    #[arg(long)]
    pub check: bool,
}

/// Runs the command.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    anyhow::bail!("no generator yet")
}

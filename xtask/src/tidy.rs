//! `cargo xtask tidy`: repository rules that the compiler does not check.

mod comments;
mod device_sources;
mod finding;
mod format_names;
mod layering;
mod module_order;
mod operation_guide;
mod rust_sources;

use anyhow::bail;

use finding::Source;
use xtask::workspace;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
///
/// # Errors
/// When a rule is broken, or git or cargo fails.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    let mut sources = Vec::new();
    for path in workspace::files()? {
        let bytes = std::fs::read(workspace::root().join(&path))?;
        // Samples and golden files are not sources.
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push(Source { path, text });
        }
    }
    let mut findings = layering::check()?;
    findings.extend(rust_sources::check(&sources));
    findings.extend(device_sources::check(&sources));
    findings.extend(comments::check(&sources));
    findings.extend(module_order::check(&sources));
    findings.extend(operation_guide::check(&sources));
    for finding in &findings {
        eprintln!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files, no rule broken", sources.len());
            Ok(())
        }
        count => bail!("tidy: {count} findings"),
    }
}

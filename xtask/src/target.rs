//! Targets of the compiler: their standard libraries.

use std::path::Path;
use std::process::Command;

use xtask::workspace;

/// Why there is no standard library of `target`, if so. It is
/// installed if necessary.
///
/// # Errors
/// When the compiler cannot be started.
pub fn missing(target: &str) -> anyhow::Result<Option<String>> {
    let libraries = workspace::output(Command::new("rustc").args(["--print", "target-libdir", "--target", target]))?;
    if Path::new(libraries.trim()).exists() {
        return Ok(None);
    }
    println!("Rust's standard library for {target} is not installed: asking rustup for it");
    let installed =
        Command::new("rustup").args(["target", "add", target]).status().is_ok_and(|status| status.success());
    Ok((!installed).then(|| format!("rustup has no standard library for {target}")))
}

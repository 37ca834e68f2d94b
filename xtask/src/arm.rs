//! The CPU backend's tests for 64-bit Arm on other processors: what runs under QEMU, and what it needs.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::workspace;

/// Statically linked by the linker that comes with Rust: neither a C compiler nor libraries of Arm's are needed.
/// `.cargo/config.toml` names that linker, and [`EMULATOR`].
const TARGET: &str = "aarch64-unknown-linux-musl";

/// Runs programs of the target.
const EMULATOR: &str = "qemu-aarch64";

/// A test of how work is shared between threads, which takes two minutes there and tells nothing of Arm.
pub const LEFT_OUT: &str = "bits_are_the_same_along_whichever_axis_threads_share";

/// What cargo is asked for. Of the conformance suite, which takes some 40 minutes there, the groups in which sums are exact and
/// operands lie in every way.
pub const TESTS: [&[&str]; 2] = [
    &["test", "--target", TARGET, "--package", "qgemm-cpu", "--lib", "--test", "families", "--", "--skip", LEFT_OUT],
    &[
        "test",
        "--target",
        TARGET,
        "--package",
        "qgemm-cpu",
        "--test",
        "conformance",
        "--",
        "--exact",
        "exact",
        "layouts",
    ],
];

/// What is missing to run them, if anything. The standard library is installed when it is not there.
///
/// # Errors
/// When a program that is there cannot be started.
pub fn missing() -> anyhow::Result<Option<String>> {
    if cfg!(target_arch = "aarch64") {
        return Ok(Some("on Arm the other tests run them".to_owned()));
    }
    let started = Command::new(EMULATOR).arg("--version").stdout(Stdio::null()).status();
    if started.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(Some(format!("there is no {EMULATOR}")));
    }
    started.with_context(|| format!("starting {EMULATOR}"))?;
    let libraries = workspace::output(Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]))?;
    if std::path::Path::new(libraries.trim()).exists() {
        return Ok(None);
    }
    println!("Rust's standard library for {TARGET} is not installed: asking rustup for it");
    let installed =
        Command::new("rustup").args(["target", "add", TARGET]).status().is_ok_and(|status| status.success());
    Ok((!installed).then(|| format!("rustup has no standard library for {TARGET}")))
}

//! Tests of the CPU backend for 64-bit Arm under QEMU,
//! and their requirements.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::target;

/// Statically linked by the linker that comes with Rust, so that
/// neither a C compiler nor Arm libraries are needed. `.cargo/config.toml`
/// names that linker and [`EMULATOR`].
const TARGET: &str = "aarch64-unknown-linux-musl";

/// Runs programs of the target.
const EMULATOR: &str = "qemu-aarch64";

/// Excluded test: it checks how threads share work, which takes two
/// minutes under QEMU and does not depend on Arm.
pub const LEFT_OUT: &str = "bits_are_the_same_along_whichever_axis_threads_share";

/// Cargo arguments. The whole conformance suite takes some
/// 40 minutes under QEMU, so only the groups with exact sums
/// and all operand layouts run.
pub const TESTS: [&[&str]; 2] = [
    &[
        "test",
        "--target",
        TARGET,
        "--package",
        "qgemm-cpu",
        "--lib",
        "--test",
        "simd",
        "--test",
        "families",
        "--",
        "--skip",
        LEFT_OUT,
    ],
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

/// The missing requirement, if any. Installs the
/// standard library if necessary.
///
/// # Errors
/// When an installed program cannot be started.
pub fn missing() -> anyhow::Result<Option<String>> {
    if cfg!(target_arch = "aarch64") {
        return Ok(Some("on Arm the other tests run them".to_owned()));
    }
    let started = Command::new(EMULATOR).arg("--version").stdout(Stdio::null()).status();
    if started.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(Some(format!("there is no {EMULATOR}")));
    }
    started.with_context(|| format!("starting {EMULATOR}"))?;
    target::missing(TARGET)
}

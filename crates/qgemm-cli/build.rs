//! States the commit of the sources: `QGEMM_COMMIT`, such as `1a2b3c4d`,
//! with `+` if files have changed since. Without Git it is not set.

use std::process::Command;

fn main() {
    // The state of files decides about `+`.
    println!("cargo:rerun-if-changed=..");
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    // A checkout of another project may contain a package of this one.
    let is_ours = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let Some(commit) = git(&["rev-parse", "--short=8", "HEAD"]).filter(|_| is_ours) else { return };
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", ".."]).is_some_and(|files| !files.is_empty());
    println!("cargo:rustc-env=QGEMM_COMMIT={commit}{}", if changed { "+" } else { "" });
}

/// Output of a Git command that succeeds.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

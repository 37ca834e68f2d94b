//! Version and commit of the sources: `QGEMM_VERSION`, such as
//! `0.1.0 (1a2b3c4d)`. `+` marks changed files.

use std::process::Command;

fn main() {
    // The state of files decides about `+`.
    println!("cargo:rerun-if-changed=..");
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let version = env!("CARGO_PKG_VERSION");
    let version = commit().map_or_else(|| version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo:rustc-env=QGEMM_VERSION={version}");
}

/// The commit, if the sources are in a checkout of their own project.
fn commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "--short=8", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", ".."])?;
    Some(if changed.is_empty() { commit } else { commit + "+" })
}

/// Output of a Git command that succeeds.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

//! `cargo xtask dist`: release archives of the command `qgemm`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::target;
use xtask::workspace;

/// Targets of a release.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// Linkers of targets that are not the machine's, as Debian's packages
/// `gcc-x86-64-linux-gnu` and `gcc-aarch64-linux-gnu` name them.
const LINKERS: [(&str, &str); 2] =
    [("x86_64-unknown-linux-gnu", "x86_64-linux-gnu-gcc"), ("aarch64-unknown-linux-gnu", "aarch64-linux-gnu-gcc")];

/// Shells and the usual names of their completion scripts.
const SHELLS: [(&str, &str); 3] = [("bash", "qgemm.bash"), ("zsh", "_qgemm"), ("fish", "qgemm.fish")];

/// Files of the repository in an archive.
const FILES: [&str; 3] = ["LICENSE-MIT", "LICENSE-APACHE", "README.md"];

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Targets to build.
    #[arg(long, num_args = 1.., value_name = "TARGET", default_values = TARGETS)]
    target: Vec<String>,
    /// Profile of the build; `dev` tries the command sooner.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// Builds an archive for each target, and the file of their SHA-256 sums, in
/// `target/dist/`.
///
/// # Errors
/// When a standard library, a linker or `tar` is missing, or a build fails.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let folder = workspace::target_folder()?.join("dist");
    fs::create_dir_all(&folder)?;
    let host = host()?;
    // This machine's command prints the completions of every archive.
    let command = build(&host, &args.profile, &host)?;
    let mut archives = Vec::new();
    for target in &args.target {
        let binary = if *target == host { command.clone() } else { build(target, &args.profile, &host)? };
        archives.push(archive(&folder, target, &binary, &command)?);
    }
    let sums = workspace::output(Command::new("sha256sum").current_dir(&folder).args(&archives))?;
    fs::write(folder.join("SHA256SUMS"), &sums)?;
    print!("{sums}");
    println!("in {}", folder.display());
    Ok(())
}

/// Target of this machine.
fn host() -> anyhow::Result<String> {
    let version = workspace::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// Builds the command, and returns its path.
fn build(target: &str, profile: &str, host: &str) -> anyhow::Result<PathBuf> {
    if let Some(why) = target::missing(target)? {
        anyhow::bail!(why);
    }
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--package", "qgemm-cli", "--locked", "--profile", profile]);
    let mut folder = workspace::target_folder()?;
    // Without a target the machine's build shares what tests have built.
    if target != host {
        cargo.args(["--target", target]);
        folder.push(target);
    }
    if let Some((_, linker)) = LINKERS.iter().find(|(of, _)| *of == target && target != host) {
        let variable = format!("CARGO_TARGET_{}_LINKER", target.to_uppercase().replace('-', "_"));
        cargo.env(variable, linker);
    }
    println!("building qgemm for {target}");
    let status = cargo.status().context("starting cargo")?;
    ensure!(status.success(), "building for {target} ({status})");
    Ok(folder.join(if profile == "dev" { "debug" } else { profile }).join("qgemm"))
}

/// Writes the archive of `binary`, and returns its name. `command` prints the
/// completions.
fn archive(folder: &Path, target: &str, binary: &Path, command: &Path) -> anyhow::Result<String> {
    let name = format!("qgemm-{}-{target}", version()?);
    let contents = folder.join(&name);
    if contents.exists() {
        fs::remove_dir_all(&contents)?;
    }
    let completions = contents.join("completions");
    fs::create_dir_all(&completions)?;
    let copy = |from: &Path, to: PathBuf| fs::copy(from, &to).with_context(|| format!("copying {}", from.display()));
    copy(binary, contents.join("qgemm"))?;
    for file in FILES {
        copy(&workspace::root().join(file), contents.join(file))?;
    }
    for (shell, file) in SHELLS {
        let script = workspace::output(Command::new(command).args(["completions", shell]))?;
        fs::write(completions.join(file), script)?;
    }
    // The same bytes for the same files, whoever builds them.
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--create", "--gzip"]);
    let archive = format!("{name}.tar.gz");
    workspace::output(tar.current_dir(folder).args(["--file", &archive, &name]))?;
    fs::remove_dir_all(contents)?;
    Ok(archive)
}

/// Version of the command.
fn version() -> anyhow::Result<String> {
    let json = workspace::output(workspace::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&json)?;
    let packages = metadata["packages"].as_array().context("`cargo metadata` lists no packages")?;
    let command = packages.iter().find(|package| package["name"] == "qgemm-cli");
    Ok(command.and_then(|package| package["version"].as_str()).context("there is no package qgemm-cli")?.to_owned())
}

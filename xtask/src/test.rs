//! `cargo xtask test`: every check and test of every
//! layer, with setup. CI runs this.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use xtask::workspace;

use crate::{arm, downstream, kernels, model, target, tidy};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// All steps, also those of other days and those on request.
    #[arg(long)]
    all: bool,
    /// Only these steps: `kernels,embed`.
    #[arg(long, value_delimiter = ',', value_name = "STEP,…", value_parser = STEPS.iter().map(|s| s.name).collect::<Vec<_>>())]
    only: Vec<String>,
}

/// Prefix of the line by which a test reports
/// that it was skipped.
const SKIP: &str = "skipped:";

/// Days of a step.
#[derive(Clone, Copy)]
enum Days {
    Every,
    /// Every third day, whose number since 1970 has this remainder.
    Third(u64),
    /// None: with `--all` or `--only`.
    OnRequest,
}

/// A step of the run.
struct Step {
    name: &'static str,
    why: &'static str,
    days: Days,
    run: fn(&mut Vec<String>) -> anyhow::Result<()>,
}

/// Cheap steps first. All of them run, even after a failure.
const STEPS: &[Step] = &[
    Step {
        name: "format",
        why: "sources are formatted by rustfmt",
        days: Days::Every,
        run: |skips| cargo(&["fmt", "--all", "--check"], skips),
    },
    Step {
        name: "tidy",
        why: "layering, kernel sources, file sizes",
        days: Days::Every,
        run: |_| tidy::run(&tidy::Args {}),
    },
    Step { name: "codegen", why: "generated files are current", days: Days::Every, run: generated },
    Step {
        name: "performance",
        why: "the tables of docs/results/performance.md are those of benches/results/",
        days: Days::Every,
        run: |skips| kernels(&["performance", "--check"], skips),
    },
    Step {
        name: "nvrtc",
        why: "the compiler of CUDA kernels is at hand; installed when it is not",
        days: Days::Every,
        run: |skips| kernels(&["nvrtc"], skips),
    },
    Step {
        name: "model",
        why: "the models of tests are at hand; installed when they are not",
        days: Days::Every,
        run: |_| model::ALL.iter().try_for_each(|model| model.ensure().map(drop)),
    },
    Step {
        name: "clippy",
        why: "no lints",
        days: Days::Every,
        run: |skips| cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], skips),
    },
    Step {
        name: "tests",
        why: "unit, conformance and integration tests, examples build, doctests",
        days: Days::Every,
        run: |skips| cargo(&["test", "--workspace", "--no-fail-fast"], skips),
    },
    Step {
        name: "stress",
        why: "two minutes of random cases, of other seeds and operations every day",
        days: Days::Every,
        run: |skips| kernels(&["stress", "--day", &today()], skips),
    },
    Step { name: "arm", why: "the CPU's kernels for Arm compute the same, under QEMU", days: Days::Third(0), run: arm },
    Step {
        name: "kernels",
        why: "CUDA kernels compile as kernels.lock says",
        days: Days::Third(1),
        run: sample_of_kernels,
    },
    Step {
        name: "embed",
        why: "kernel bundles are built into programs",
        days: Days::Third(2),
        run: |skips| kernels(&["embed"], skips),
    },
    Step {
        name: "downstream",
        why: "fewer features, other systems, other bindings of CUDA, and CubeCL beside qgemm compile",
        days: Days::Third(0),
        run: downstream,
    },
    Step {
        name: "engines",
        why: "candle and burn beside qgemm compile",
        days: Days::OnRequest,
        run: |skips| program(downstream::CANDLE_AND_BURN, skips),
    },
    Step {
        name: "publish",
        why: "all crates can be packaged for crates.io",
        days: Days::Every,
        run: |skips| cargo(&["publish", "--workspace", "--dry-run", "--no-verify", "--allow-dirty"], skips),
    },
    Step {
        name: "candle",
        why: "layers for candle compute what candle's do; a workspace of its own",
        days: Days::Third(1),
        run: candle,
    },
    Step {
        name: "docs",
        why: "documentation builds without warnings",
        days: Days::Every,
        run: |skips| cargo(&["doc", "--workspace", "--no-deps"], skips),
    },
    Step { name: "devices", why: "what the tests could use here", days: Days::Every, run: |_| devices() },
];

/// Runs the steps, then prints their results and all skips.
///
/// # Errors
/// When a step failed.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut skips = Vec::new();
    let mut results: Vec<(&Step, anyhow::Result<()>, Duration)> = Vec::new();
    let is_asked_for = args.all || !args.only.is_empty();
    for step in STEPS.iter().filter(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.name)) {
        if !is_asked_for && !step.days.has(days_since_1970()) {
            skips.push(format!("{SKIP} {}: a step {}, or `cargo xtask test --only {0}`", step.name, step.days.name()));
            continue;
        }
        println!("\n== {}: {}", step.name, step.why);
        let start = Instant::now();
        let result = (step.run)(&mut skips);
        if let Err(error) = &result {
            println!("{} failed: {error:#}", step.name);
        }
        results.push((step, result, start.elapsed()));
    }
    println!("\n== summary");
    for (step, result, time) in &results {
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("{:<11} {verdict:<6} {:>6.1} s", step.name, time.as_secs_f64());
    }
    print_skips(&skips);
    let failed: Vec<&str> = results.iter().filter(|(_, r, _)| r.is_err()).map(|(s, ..)| s.name).collect();
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
}

/// Prints the skips by reason. A line is `skipped: what: why`.
fn print_skips(lines: &[String]) {
    let mut by_reason = BTreeMap::<&str, Vec<&str>>::new();
    for line in lines {
        let skip = line.trim_start_matches(SKIP).trim();
        let (what, why) = skip.split_once(": ").unwrap_or((skip, "no reason was given"));
        by_reason.entry(why).or_default().push(what);
    }
    if by_reason.is_empty() {
        println!("nothing was skipped");
    }
    for (why, what) in by_reason {
        println!("{} skipped ({why}):", what.len());
        what.iter().for_each(|what| println!("    {what}"));
    }
}

/// Checks every generated file.
fn generated(skips: &mut Vec<String>) -> anyhow::Result<()> {
    kernels(&["codegen", "--check"], skips)?;
    kernels(&["spills", "--check"], skips)
}

/// Tests the CPU backend for Arm, as far as
/// possible on this machine.
fn arm(skips: &mut Vec<String>) -> anyhow::Result<()> {
    if let Some(why) = arm::missing()? {
        skips.push(format!("{SKIP} kernels for Arm: {why}"));
        return Ok(());
    }
    skips.push(format!("{SKIP} the other groups of conformance on cpu for Arm: they take 40 minutes under QEMU"));
    skips.push(format!("{SKIP} {} for Arm: it takes two minutes under QEMU, and tells of threads", arm::LEFT_OUT));
    arm::TESTS.iter().try_for_each(|tests| cargo(tests, skips))
}

/// Checks what other projects build, as far as possible
/// on this machine.
fn downstream(skips: &mut Vec<String>) -> anyhow::Result<()> {
    downstream::checks().iter().try_for_each(|check| cargo(check, skips))?;
    for (target, features) in downstream::TARGETS {
        match target::missing(target)? {
            None => cargo(&downstream::check_target(target, features), skips)?,
            Some(why) => skips.push(format!("{SKIP} the check for {target}: {why}")),
        }
    }
    program(downstream::CUBECL, skips)
}

fn program(folder: &str, skips: &mut Vec<String>) -> anyhow::Result<()> {
    cargo(&downstream::check_program(folder, &workspace::target_folder()?.to_string_lossy()), skips)
}

/// Compiles a sixth of the kinds of kernels, each for one chip of `kernels.lock`,
/// and compares their resources with it. Three days later comes the next sixth.
/// `cargo xtask build-kernels --check` compiles all kernels for all chips.
fn sample_of_kernels(skips: &mut Vec<String>) -> anyhow::Result<()> {
    skips.push(format!(
        "{SKIP} five sixths of the sample of kernels: those of other days, or `cargo xtask build-kernels --check --sample`"
    ));
    let part = (days_since_1970() / 3).to_string();
    kernels(&["build-kernels", "--check", "--sample", "--of-day", &part], skips)
}

/// Tests the folder for candle, which has a lockfile of its own.
fn candle(skips: &mut Vec<String>) -> anyhow::Result<()> {
    let manifest = ["--manifest-path", "qgemm-candle/Cargo.toml"];
    cargo(&[&["fmt", "--check"], &manifest[..]].concat(), skips)?;
    let target = workspace::target_folder()?;
    let target = ["--target-dir", target.to_str().context("a target folder in UTF-8")?];
    cargo(&[&["test"], &manifest[..], &target].concat(), skips)
}

impl Days {
    fn has(self, day: u64) -> bool {
        match self {
            Days::Every => true,
            Days::Third(rest) => day % 3 == rest,
            Days::OnRequest => false,
        }
    }

    /// As in "a step every day".
    fn name(self) -> &'static str {
        match self {
            Days::Every => "every day",
            Days::Third(_) => "every third day",
            Days::OnRequest => "on request",
        }
    }
}

/// Today as an argument of commands that draw by day.
fn today() -> String {
    days_since_1970().to_string()
}

fn days_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / (24 * 60 * 60))
}

/// Lists devices with the command that the tests built.
fn devices() -> anyhow::Result<()> {
    let name = format!("qgemm{}", std::env::consts::EXE_SUFFIX);
    let mut command = Command::new(workspace::target_folder()?.join("debug").join(name));
    watch(command.arg("devices"), |_| {})
}

/// Runs a command that uses crates of the workspace.
fn kernels(arguments: &[&str], skips: &mut Vec<String>) -> anyhow::Result<()> {
    cargo(&[&kernels::RUN, arguments].concat(), skips)
}

/// Runs cargo in the root, shows its output, and
/// collects the skip lines.
fn cargo<S: AsRef<str>>(arguments: &[S], skips: &mut Vec<String>) -> anyhow::Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    let mut command = workspace::cargo();
    command.args(&arguments).env("RUSTDOCFLAGS", "-D warnings");
    for model in model::ALL {
        command.env(model.variable, model.path()?);
    }
    println!("$ cargo {}", arguments.join(" "));
    watch(&mut command, |line| {
        if line.starts_with(SKIP) && !skips.iter().any(|s| s == line) {
            skips.push(line.to_owned());
        }
    })
}

/// Runs a command that must succeed, and passes on
/// its stderr line by line.
fn watch(command: &mut Command, mut seen: impl FnMut(&str)) -> anyhow::Result<()> {
    let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("starting {command:?}"))?;
    if let Some(errors) = child.stderr.take() {
        for line in BufReader::new(errors).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            eprintln!("{line}");
            seen(&line);
        }
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { bail!("{status}") }
}

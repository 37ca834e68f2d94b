//! `cargo xtask test`: every check and test of every
//! layer, with setup. CI runs this.

mod programs;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
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

/// Days in which every step has its turn.
const TURNS: u64 = 4;

/// Days of a step.
#[derive(Clone, Copy)]
enum Days {
    Every,
    /// One day in [`TURNS`], whose number since 1970 has this remainder.
    Turn(u64),
    /// None: with `--all` or `--only`.
    OnRequest,
}

/// A step of the run.
struct Step {
    name: &'static str,
    why: &'static str,
    days: Days,
    run: fn(&mut Run) -> anyhow::Result<()>,
}

/// A run of steps.
#[derive(Default)]
struct Run {
    /// Lines by which tests and steps say what they left out.
    skips: Vec<String>,
    /// Whether the step `build` has built the workspace, so that steps start its programs
    /// instead of building them once more with other features.
    is_built: bool,
}

/// Cheap steps first. All of them run, even after a failure.
const STEPS: &[Step] = &[
    Step {
        name: "format",
        why: "sources are formatted by rustfmt",
        days: Days::Every,
        run: |run| run.cargo(&["fmt", "--all", "--check"]),
    },
    Step {
        name: "tidy",
        why: "layering, kernel sources, file sizes",
        days: Days::Every,
        run: |_| tidy::run(&tidy::Args {}),
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
        days: Days::Turn(2),
        run: |run| run.cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    },
    Step { name: "build", why: "everything compiles, once for all steps", days: Days::Every, run: Run::build },
    Step {
        name: "nvrtc",
        why: "the compiler of CUDA kernels is at hand; installed when it is not",
        days: Days::Every,
        run: |run| run.kernels(&["nvrtc"]),
    },
    Step {
        name: "tests",
        why: "unit, conformance and integration tests, generated files, doctests",
        days: Days::Every,
        run: tests,
    },
    Step {
        name: "stress",
        why: "a minute of random cases, of other seeds and operations every day",
        days: Days::Every,
        run: stress,
    },
    Step { name: "arm", why: "the CPU's kernels for Arm compute the same, under QEMU", days: Days::Turn(0), run: arm },
    Step {
        name: "kernels",
        why: "CUDA kernels compile as kernels.lock says",
        days: Days::Turn(1),
        run: sample_of_kernels,
    },
    Step {
        name: "embed",
        why: "kernel bundles are built into programs",
        days: Days::Turn(2),
        run: |run| run.kernels(&["embed"]),
    },
    Step {
        name: "downstream",
        why: "fewer features, other systems, other bindings of CUDA, and CubeCL beside qgemm compile",
        days: Days::Turn(3),
        run: downstream,
    },
    Step {
        name: "engines",
        why: "candle and burn beside qgemm compile",
        days: Days::OnRequest,
        run: |run| run.program(downstream::CANDLE_AND_BURN),
    },
    Step {
        name: "publish",
        why: "all crates can be packaged for crates.io",
        days: Days::Every,
        run: |run| run.cargo(&["publish", "--workspace", "--dry-run", "--no-verify", "--allow-dirty"]),
    },
    Step {
        name: "candle",
        why: "layers for candle compute what candle's do; a workspace of its own",
        days: Days::Turn(1),
        run: candle,
    },
    Step {
        name: "docs",
        why: "documentation builds without warnings",
        days: Days::Turn(2),
        run: |run| run.cargo(&["doc", "--workspace", "--no-deps"]),
    },
    Step {
        name: "devices",
        why: "what the tests could use here",
        days: Days::Every,
        run: |run| run.qgemm(&["devices"]),
    },
];

/// Runs the steps, then prints their results and all skips.
///
/// # Errors
/// When a step failed.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut run = Run::default();
    let mut results: Vec<(&Step, anyhow::Result<()>, Duration)> = Vec::new();
    let is_asked_for = args.all || !args.only.is_empty();
    for step in STEPS.iter().filter(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.name)) {
        if !is_asked_for && !step.days.has(days_since_1970()) {
            run.skips.push(format!(
                "{SKIP} {}: a step {}, or `cargo xtask test --only {0}`",
                step.name,
                step.days.name()
            ));
            continue;
        }
        println!("\n== {}: {}", step.name, step.why);
        let start = Instant::now();
        let result = (step.run)(&mut run);
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
    print_skips(&run.skips);
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

/// Runs the test programs, some at a time, then the doctests.
fn tests(run: &mut Run) -> anyhow::Result<()> {
    let programs = programs::build(run.cargo_command(&["test", "--workspace"])?.stderr(Stdio::inherit()))?;
    let mut failed = Vec::new();
    programs::run(programs, &models()?, |finished| {
        let is_ok = finished.output.status.success();
        println!("\n-- {}: {:.1} s, {}", finished.name, finished.time.as_secs_f64(), finished.output.status);
        // A closed standard output is no reason to fail a test.
        let _ = std::io::stdout().write_all(&finished.output.stdout);
        String::from_utf8_lossy(&finished.output.stderr).lines().for_each(|line| run.show(line));
        if !is_ok {
            failed.push(finished.name);
        }
    })?;
    let doctests = run.cargo(&["test", "--workspace", "--doc", "--no-fail-fast"]);
    if failed.is_empty() { doctests } else { bail!("failed: {}", failed.join(", ")) }
}

/// Runs random cases of the day.
fn stress(run: &mut Run) -> anyhow::Result<()> {
    let (day, program) = (days_since_1970().to_string(), built("qgemm")?);
    let program = program.to_string_lossy();
    let mut arguments = vec!["stress", "--day", &day];
    if run.is_built {
        arguments.extend(["--program", &program]);
    }
    run.kernels(&arguments)
}

/// Tests the CPU backend for Arm, as far as
/// possible on this machine.
fn arm(run: &mut Run) -> anyhow::Result<()> {
    if let Some(why) = arm::missing()? {
        run.skip(&format!("kernels for Arm: {why}"));
        return Ok(());
    }
    run.skip("the other groups of conformance on cpu for Arm: they take 40 minutes under QEMU");
    run.skip(&format!("{} for Arm: it takes two minutes under QEMU, and tells of threads", arm::LEFT_OUT));
    arm::TESTS.iter().try_for_each(|tests| run.cargo(tests))
}

/// Checks what other projects build, as far as possible
/// on this machine.
fn downstream(run: &mut Run) -> anyhow::Result<()> {
    downstream::checks().iter().try_for_each(|check| run.cargo(check))?;
    for (target, features) in downstream::TARGETS {
        match target::missing(target)? {
            None => run.cargo(&downstream::check_target(target, features))?,
            Some(why) => run.skip(&format!("the check for {target}: {why}")),
        }
    }
    run.program(downstream::CUBECL)
}

/// Compiles a sixth of the kinds of kernels, each for one chip of `kernels.lock`,
/// and compares their resources with it. Three days later comes the next sixth.
/// `cargo xtask build-kernels --check` compiles all kernels for all chips.
fn sample_of_kernels(run: &mut Run) -> anyhow::Result<()> {
    run.skip(
        "five sixths of the sample of kernels: those of other days, or `cargo xtask build-kernels --check --sample`",
    );
    let part = (days_since_1970() / TURNS).to_string();
    run.kernels(&["build-kernels", "--check", "--sample", "--of-day", &part])
}

/// Tests the folder for candle, which has a lockfile of its own.
fn candle(run: &mut Run) -> anyhow::Result<()> {
    let manifest = ["--manifest-path", "qgemm-candle/Cargo.toml"];
    run.cargo(&[&["fmt", "--check"], &manifest[..]].concat())?;
    let target = workspace::target_folder()?;
    let target = ["--target-dir", target.to_str().context("a target folder in UTF-8")?];
    run.cargo(&[&["test"], &manifest[..], &target].concat())
}

impl Run {
    /// Builds libraries, programs, examples and tests with the features of the tests.
    fn build(&mut self) -> anyhow::Result<()> {
        self.cargo(&["test", "--workspace", "--no-run", "--quiet"])?;
        self.is_built = true;
        Ok(())
    }

    /// Runs the command `qgemm`.
    fn qgemm(&mut self, arguments: &[&str]) -> anyhow::Result<()> {
        self.program_of("qgemm", &["run", "--quiet", "--package", "qgemm-cli", "--"], arguments)
    }

    /// Runs a command that uses crates of the workspace.
    fn kernels(&mut self, arguments: &[&str]) -> anyhow::Result<()> {
        self.program_of("xtask-kernels", &kernels::RUN, arguments)
    }

    /// Runs the built program, or `cargo` with these arguments.
    fn program_of(&mut self, name: &str, cargo: &[&str], arguments: &[&str]) -> anyhow::Result<()> {
        if !self.is_built {
            return self.cargo(&[cargo, arguments].concat());
        }
        let mut command = Command::new(built(name)?);
        println!("$ {name} {}", arguments.join(" "));
        self.watch(command.current_dir(workspace::root()).args(arguments))
    }

    /// Checks a program of `xtask/downstream`.
    fn program(&mut self, folder: &str) -> anyhow::Result<()> {
        self.cargo(&downstream::check_program(folder, &workspace::target_folder()?.to_string_lossy()))
    }

    /// Runs cargo in the root.
    fn cargo<S: AsRef<str>>(&mut self, arguments: &[S]) -> anyhow::Result<()> {
        let mut command = self.cargo_command(arguments)?;
        self.watch(&mut command)
    }

    /// A command of cargo that knows the models, for which it may run tests.
    fn cargo_command<S: AsRef<str>>(&self, arguments: &[S]) -> anyhow::Result<Command> {
        let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
        let mut command = workspace::cargo();
        command.args(&arguments).env("RUSTDOCFLAGS", "-D warnings").envs(models()?);
        println!("$ cargo {}", arguments.join(" "));
        Ok(command)
    }

    fn skip(&mut self, what: &str) {
        self.skips.push(format!("{SKIP} {what}"));
    }

    /// Shows a line of a command's stderr, and keeps skip lines.
    fn show(&mut self, line: &str) {
        eprintln!("{line}");
        if line.starts_with(SKIP) && !self.skips.iter().any(|skip| skip == line) {
            self.skips.push(line.to_owned());
        }
    }

    /// Runs a command that must succeed, shows its stderr,
    /// and collects the skip lines.
    fn watch(&mut self, command: &mut Command) -> anyhow::Result<()> {
        let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("starting {command:?}"))?;
        if let Some(errors) = child.stderr.take() {
            for line in BufReader::new(errors).split(b'\n') {
                self.show(&String::from_utf8_lossy(&line?));
            }
        }
        let status = child.wait()?;
        if status.success() { Ok(()) } else { bail!("{status}") }
    }
}

impl Days {
    fn has(self, day: u64) -> bool {
        match self {
            Days::Every => true,
            Days::Turn(rest) => day % TURNS == rest,
            Days::OnRequest => false,
        }
    }

    /// As in "a step every day".
    fn name(self) -> &'static str {
        match self {
            Days::Every => "every day",
            Days::Turn(_) => "every fourth day",
            Days::OnRequest => "on request",
        }
    }
}

/// Path of a program that the step `build` builds.
fn built(name: &str) -> anyhow::Result<PathBuf> {
    Ok(workspace::target_folder()?.join("debug").join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
}

/// The variables that name the models of tests.
fn models() -> anyhow::Result<Vec<(&'static str, PathBuf)>> {
    model::ALL.iter().map(|model| Ok((model.variable, model.path()?))).collect()
}

fn days_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / (24 * 60 * 60))
}

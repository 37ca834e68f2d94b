//! Test programs of the workspace, run several at a time: one
//! alone leaves cores idle while its last tests finish.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

/// Programs that run at once. Each has as many
/// threads as the machine has cores.
const AT_ONCE: usize = 2;

/// Test targets that take minutes; they begin first.
const LONG: &str = "conformance";

/// A test program.
#[derive(Debug)]
pub struct Program {
    /// Package and target, as in `qgemm-cpu conformance`.
    pub name: String,
    executable: PathBuf,
    /// Folder of its package, in which tests run.
    folder: PathBuf,
}

/// A program that has run.
#[derive(Debug)]
pub struct Finished {
    /// Its name.
    pub name: String,
    /// Its output and exit status.
    pub output: Output,
    /// Its running time.
    pub time: Duration,
}

/// Builds the programs with `cargo`, a `test` command that takes
/// further arguments, and lists them, long ones first.
///
/// # Errors
/// When they do not compile.
pub fn build(cargo: &mut Command) -> anyhow::Result<Vec<Program>> {
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]).stdout(Stdio::piped());
    let mut child = cargo.spawn().with_context(|| format!("starting {cargo:?}"))?;
    let messages = child.stdout.take().context("a pipe from cargo")?;
    let mut programs = Vec::new();
    for line in BufReader::new(messages).lines() {
        programs.extend(serde_json::from_str(&line?).ok().as_ref().and_then(program));
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{status}");
    }
    programs.sort_by_key(|program: &Program| !program.name.ends_with(LONG));
    Ok(programs)
}

/// The test program that a message of cargo announces, if any.
fn program(message: &Value) -> Option<Program> {
    if message["profile"]["test"] != true {
        return None;
    }
    let executable = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = folder.file_name()?.to_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = match kind {
        "test" => format!("{package} {}", message["target"]["name"].as_str()?),
        _ => format!("{package} ({kind})"),
    };
    Some(Program { name, executable, folder })
}

/// A variable of a program's environment.
type Variable = (&'static str, PathBuf);

/// Runs all programs and hands each to `done` as it finishes.
///
/// # Errors
/// When one cannot be started.
pub fn run(programs: Vec<Program>, variables: &[Variable], mut done: impl FnMut(Finished)) -> anyhow::Result<()> {
    let waiting = Mutex::new(VecDeque::from(programs));
    let (finished, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            let (waiting, finished) = (&waiting, finished.clone());
            scope.spawn(move || {
                let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                // Nobody listens after an error.
                while let Some(program) = next()
                    && finished.send(run_one(program, variables)).is_ok()
                {}
            });
        }
        drop(finished);
        for result in results {
            done(result?);
        }
        Ok(())
    })
}

fn run_one(program: Program, variables: &[Variable]) -> anyhow::Result<Finished> {
    let Program { name, executable, folder } = program;
    let start = Instant::now();
    let mut command = Command::new(&executable);
    // Tests may look for their package where cargo says it is.
    command.current_dir(&folder).env("CARGO_MANIFEST_DIR", &folder).envs(variables.iter().cloned());
    let output = command.output().with_context(|| format!("starting {}", executable.display()))?;
    Ok(Finished { name, output, time: start.elapsed() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let mut message = json!({
            "reason": "compiler-artifact",
            "manifest_path": "/w/crates/qgemm-cpu/Cargo.toml",
            "target": { "kind": ["test"], "name": "conformance" },
            "profile": { "test": true },
            "executable": "/w/target/debug/deps/conformance-1",
        });
        let found = program(&message).expect("a test program");
        assert_eq!(
            (found.name.as_str(), found.folder.as_path()),
            ("qgemm-cpu conformance", Path::new("/w/crates/qgemm-cpu"))
        );
        message["target"]["kind"] = json!(["lib"]);
        assert_eq!(program(&message).expect("unit tests").name, "qgemm-cpu (lib)");
        message["profile"]["test"] = json!(false);
        assert!(program(&message).is_none());
    }

    #[test]
    fn every_program_runs_once_in_its_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = |number: usize| Program {
            name: number.to_string(),
            executable: "pwd".into(),
            folder: folder.path().into(),
        };
        let mut names = Vec::new();
        run((0..5).map(program).collect(), &[], |finished| {
            let printed = String::from_utf8_lossy(&finished.output.stdout).trim().to_owned();
            assert_eq!(Path::new(&printed).canonicalize().ok(), folder.path().canonicalize().ok());
            names.push(finished.name);
        })
        .expect("`pwd` starts");
        names.sort();
        assert_eq!(names, ["0", "1", "2", "3", "4"]);
    }
}

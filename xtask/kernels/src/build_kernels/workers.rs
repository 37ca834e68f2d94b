//! Compiler processes. NVRTC does not scale with threads, so
//! this executable starts itself as workers. Each compiles
//! every n-th kernel into the cache.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use qgemm_cuda::build::{self, BuildError};
use serde::{Deserialize, Serialize};

use super::job::Job;

/// Failed kernels whose log is printed. Others are only named.
const MAX_LOGS: usize = 5;

/// A worker's report on a kernel, one line of JSON each.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    job: usize,
    /// Compile time; `None` for a cache hit.
    seconds: Option<f64>,
    error: Option<String>,
    /// The error is the machine's, not the kernel's: no
    /// other kernel will fare better.
    fatal: bool,
}

/// Worker processes, which are killed on drop.
struct Workers(Vec<Child>);

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &mut self.0 {
            // Both fail when it has already exited.
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

/// Compiles the jobs in `processes` worker processes, or one per core.
///
/// # Errors
/// When kernels do not compile or cannot be stored, naming
/// them, or when a worker stops.
pub(super) fn compile_all(jobs: &[Job], processes: Option<usize>) -> anyhow::Result<()> {
    let cores = thread::available_parallelism().map_or(1, |n| n.get());
    let count = processes.unwrap_or(cores).clamp(1, jobs.len());
    let begin = Instant::now();
    println!("compiling {} kernels in {count} processes", jobs.len());
    let progress = ProgressBar::new(jobs.len() as u64);
    progress.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} kernels, {eta} left")?);
    let mut workers = Workers((0..count).map(|i| start(i, count)).collect::<anyhow::Result<_>>()?);
    let (sender, lines) = mpsc::channel();
    for worker in &mut workers.0 {
        let output = BufReader::new(worker.stdout.take().context("a worker without output")?).lines();
        let sender = sender.clone();
        thread::spawn(move || output.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    }
    drop(sender);

    let (mut done, mut failed, mut compiled) = (BTreeSet::new(), Vec::new(), Vec::new());
    for line in lines {
        let report: Report = serde_json::from_str(&line).with_context(|| format!("a worker said `{line}`"))?;
        let job = jobs.get(report.job).with_context(|| format!("a worker said `{line}`"))?;
        done.insert(report.job);
        progress.inc(1);
        compiled.extend(report.seconds.map(|seconds| (seconds, job)));
        match report.error {
            Some(error) if report.fatal => bail!("{error}"),
            Some(error) => failed.push((job, error)),
            None => {}
        }
    }
    progress.finish_and_clear();
    for (index, worker) in workers.0.iter_mut().enumerate() {
        let status = worker.wait()?;
        let at = (index..jobs.len())
            .step_by(count)
            .find(|job| !done.contains(job))
            .map_or("its end", |j| &jobs[j].spec.name);
        ensure!(status.success(), "a worker stopped at {at} ({status})");
    }
    ensure!(failed.is_empty(), "{}", failures(&failed, jobs.len()));
    ensure!(done.len() == jobs.len(), "{} of {} kernels were reported", done.len(), jobs.len());
    let slowest = compiled.iter().max_by(|(a, _), (b, _)| a.total_cmp(b));
    let slowest =
        slowest.map_or(String::new(), |(s, job)| format!("; slowest: {} {}, {s:.2} s", job.target, job.spec.name));
    println!(
        "{} compiled, {} from the cache, in {:.0} s{slowest}",
        compiled.len(),
        jobs.len() - compiled.len(),
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Message for kernels that do not compile.
fn failures(failed: &[(&Job, String)], all: usize) -> String {
    let mut text = format!("{} of {all} kernels failed:", failed.len());
    for (_, error) in failed.iter().take(MAX_LOGS) {
        text += &format!("\n{error}");
    }
    if failed.len() > MAX_LOGS {
        text += "\nand, without their logs:";
        failed[MAX_LOGS..].iter().for_each(|(job, _)| text += &format!("\n{} {}", job.target, job.spec.name));
    }
    text
}

/// Starts worker `index` of `count` with the same command line,
/// so that it finds the same jobs.
fn start(index: usize, count: usize) -> anyhow::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--worker")
        .arg(format!("{index}/{count}"))
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a worker")
}

/// Main function of a worker: compiles its share of `jobs`, given
/// by `worker` (`index/count`).
///
/// # Errors
/// When the reports cannot be written.
pub(super) fn work(jobs: &[Job], cache: &Path, worker: &str) -> anyhow::Result<()> {
    let parsed = worker.split_once('/').and_then(|(i, n)| Some((i.parse::<usize>().ok()?, n.parse::<usize>().ok()?)));
    let (index, count) = parsed.filter(|&(_, n)| n > 0).with_context(|| format!("`--worker {worker}`"))?;
    let mut out = std::io::stdout().lock();
    for (job, Job { spec, target }) in jobs.iter().enumerate().skip(index).step_by(count) {
        let report = match build::compile(cache, spec, *target) {
            Ok(built) => Report { job, seconds: built.compiled_in.map(|t| t.as_secs_f64()), error: None, fatal: false },
            Err(error) => {
                let fatal = matches!(error, BuildError::Cache { .. });
                Report { job, seconds: None, error: Some(error.to_string()), fatal }
            }
        };
        let line = serde_json::to_string(&report)?;
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            // The parent process is gone or has given up.
            return Ok(());
        }
    }
    Ok(())
}

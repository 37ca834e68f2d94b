//! `cargo xtask build-kernels`: compiles every kernel of the manifest for the given chips into bundles.
//!
//! NVRTC does not get faster with threads, so the work is shared between processes: this executable starts itself as
//! workers, each of which compiles every n-th kernel into a cache below the target folder. The bundles are put
//! together from there; kernels that did not change are not compiled again.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use qgemm_cuda::{Artifact, BUNDLE_EXTENSION, Bundle, KernelSpec, Target, build, manifest};
use qgemm_formats::DType;
use serde::{Deserialize, Serialize};

use crate::kernels_lock::Lock;
use crate::nvrtc;

/// Options of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Chips to compile for, by compute capability: `70,86,120`. Kernels that use a chip's own instructions are
    /// compiled for `sm_90a`, `sm_120a` where they need it.
    #[arg(long, value_delimiter = ',', required = true, value_name = "ARCH,…")]
    arch: Vec<String>,
    /// Write portable PTX, which runs on these chips and all newer ones, instead of machine code.
    #[arg(long)]
    ptx: bool,
    /// Only kernels of this family (`gemv`).
    #[arg(long)]
    family: Option<String>,
    /// Only kernels of this weight format (`q4_k`).
    #[arg(long)]
    format: Option<String>,
    /// Write nothing; fail when registers, spills or shared memory differ from `kernels.lock`.
    #[arg(long)]
    check: bool,
    /// Folder for the bundles, instead of `kernels` in the target folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Processes to share the work between, instead of one a core.
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Be worker I of N.
    #[arg(long, hide = true, value_name = "I/N")]
    worker: Option<String>,
}

/// One kernel for one target.
struct Job {
    spec: KernelSpec,
    target: Target,
}

/// What a worker says of a finished kernel, one line of JSON each.
#[derive(Serialize, Deserialize)]
struct Report {
    job: usize,
    error: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(worker) = &args.worker {
        return work(args, worker);
    }
    nvrtc::ensure()?;
    let (version, supported) = build::compiler()?;
    let targets = targets(args, &version, &supported)?;
    let jobs = jobs(args, &targets)?;
    ensure!(!jobs.is_empty(), "no kernel is of this family and format");
    compile_all(args, &jobs)?;

    let mut built: Vec<(Target, Vec<(KernelSpec, Artifact)>)> = targets.iter().map(|&t| (t, Vec::new())).collect();
    let cache = cache_folder()?;
    for job in jobs {
        // Compiled by now, so this reads the cache.
        let artifact = build::compile(&cache, &job.spec, job.target)?.artifact;
        if let Some((_, kernels)) = built.iter_mut().find(|(target, _)| *target == job.target) {
            kernels.push((job.spec, artifact));
        }
    }
    finish(args, &version, &built)
}

/// The targets asked for.
fn targets(args: &Args, version: &str, supported: &[u32]) -> anyhow::Result<Vec<Target>> {
    let mut targets = Vec::new();
    for name in &args.arch {
        let Ok(arch) = name.parse::<u32>() else {
            bail!(
                "`{name}` is no architecture: expected numbers like 70,86,120 (the `a` of sm_90a is added by itself)"
            );
        };
        let target = match args.ptx {
            true => Target::Ptx { arch },
            false => Target::Cubin { arch, specific: false },
        };
        target.variant().map_err(|why| anyhow::anyhow!("architecture {arch}: {why}"))?;
        if !supported.contains(&arch) {
            let known: Vec<String> = supported.iter().filter(|&&a| a >= 70).map(u32::to_string).collect();
            bail!("NVRTC {version} does not know architecture {arch}; it compiles for {}", known.join(", "));
        }
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    Ok(targets)
}

/// Every kernel to compile, in an order that each worker finds too.
fn jobs(args: &Args, targets: &[Target]) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for &target in targets {
        let variant = target.variant().map_err(anyhow::Error::msg)?;
        let specs = manifest(variant).into_iter().filter(|s| wanted(&s.name, &args.family, &args.format));
        jobs.extend(specs.map(|spec| Job { spec, target }));
    }
    Ok(jobs)
}

/// Whether a kernel called `<family>_<layout>_<format>_<activation>…` is of the family and the format.
fn wanted(name: &str, family: &Option<String>, format: &Option<String>) -> bool {
    let of_family = |f: &String| name == f || name.starts_with(&format!("{f}_"));
    let of_format = |f: &String| {
        let activation = name.split_once("_nt_").and_then(|(_, rest)| rest.strip_prefix(f.as_str()));
        let is_type = |a: &str| {
            let a = a.split('_').next().unwrap_or_default();
            a == "q8" || DType::ALL.iter().any(|d| d.name() == a)
        };
        activation.and_then(|a| a.strip_prefix('_')).is_some_and(is_type)
    };
    family.as_ref().is_none_or(of_family) && format.as_ref().is_none_or(of_format)
}

/// Compiles the jobs in worker processes.
fn compile_all(args: &Args, jobs: &[Job]) -> anyhow::Result<()> {
    let cores = thread::available_parallelism().map_or(1, |n| n.get());
    let count = args.jobs.unwrap_or(cores).clamp(1, jobs.len());
    let progress = ProgressBar::new(jobs.len() as u64);
    progress.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} kernels, {eta} left")?);
    let mut workers: Vec<Child> = (0..count).map(|i| start(i, count)).collect::<anyhow::Result<_>>()?;

    let (sender, reports) = mpsc::channel();
    for worker in &mut workers {
        let lines = BufReader::new(worker.stdout.take().context("a worker without output")?).lines();
        let sender = sender.clone();
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    }
    drop(sender);
    let (mut done, mut errors) = (0, Vec::new());
    for line in reports {
        let report: Report = serde_json::from_str(&line).with_context(|| format!("a worker said `{line}`"))?;
        done += 1;
        progress.inc(1);
        errors.extend(report.error);
    }
    progress.finish_and_clear();
    for worker in &mut workers {
        let status = worker.wait()?;
        ensure!(status.success(), "a worker stopped ({status})");
    }
    ensure!(done == jobs.len(), "{done} of {} kernels were reported", jobs.len());
    ensure!(errors.is_empty(), "{} of {} kernels failed:\n{}", errors.len(), jobs.len(), errors.join("\n"));
    Ok(())
}

/// Starts worker `index` of `count`: the same command line, so that it finds the same jobs.
fn start(index: usize, count: usize) -> anyhow::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--worker")
        .arg(format!("{index}/{count}"))
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a worker")
}

/// A worker's life.
fn work(args: &Args, worker: &str) -> anyhow::Result<()> {
    let parsed = worker.split_once('/').and_then(|(i, n)| Some((i.parse::<usize>().ok()?, n.parse::<usize>().ok()?)));
    let (index, count) = parsed.filter(|&(_, n)| n > 0).with_context(|| format!("`--worker {worker}`"))?;
    let (version, supported) = build::compiler()?;
    let jobs = jobs(args, &targets(args, &version, &supported)?)?;
    let cache = cache_folder()?;
    let mut out = std::io::stdout().lock();
    for (job, Job { spec, target }) in jobs.iter().enumerate().skip(index).step_by(count) {
        let error = build::compile(&cache, spec, *target).err().map(|e| e.to_string());
        // A parent that is gone makes this fail, which ends the worker too.
        writeln!(out, "{}", serde_json::to_string(&Report { job, error })?)?;
        out.flush()?;
    }
    Ok(())
}

/// Where kernels are kept between runs of the command.
fn cache_folder() -> anyhow::Result<PathBuf> {
    Ok(nvrtc::target_folder()?.join("kernels").join("cache"))
}

/// Writes bundles and the lock file, or compares with it.
fn finish(args: &Args, version: &str, built: &[(Target, Vec<(KernelSpec, Artifact)>)]) -> anyhow::Result<()> {
    let committed = Lock::read()?;
    let mut lock = committed.clone();
    let all = args.family.is_none() && args.format.is_none();
    for (target, kernels) in built.iter().filter(|(target, _)| !target.is_ptx()) {
        lock.update(version, *target, kernels, all);
    }
    for (target, kernels) in built {
        for (spec, artifact) in kernels {
            if let Some(resources) = artifact.resources.filter(|r| r.spill_bytes > 0) {
                println!("{target} {}: spills {} bytes", spec.name, resources.spill_bytes);
            }
        }
    }
    if args.check {
        let differences = lock.differences(&committed);
        let path = Lock::path();
        ensure!(committed != Lock::default(), "there is no {}: run the command without --check", path.display());
        ensure!(
            differences.is_empty(),
            "{} is stale, run the command without --check (its numbers are from NVRTC {}, these from {version}):\n{}",
            path.display(),
            committed.nvrtc,
            differences.join("\n")
        );
        println!("{} kernels as in {}", built.iter().map(|(_, k)| k.len()).sum::<usize>(), path.display());
        return Ok(());
    }
    let out = match &args.out {
        Some(out) => out.clone(),
        None => nvrtc::target_folder()?.join("kernels"),
    };
    for (target, kernels) in built {
        write_bundle(&out, *target, version, kernels)?;
    }
    if lock != committed {
        lock.write()?;
        println!("{} changed", Lock::path().display());
    }
    Ok(())
}

fn write_bundle(out: &Path, target: Target, version: &str, kernels: &[(KernelSpec, Artifact)]) -> anyhow::Result<()> {
    let path = out.join(format!("{target}.{BUNDLE_EXTENSION}"));
    Bundle::write(&path, target, version, kernels)?;
    let bytes: usize = kernels.iter().map(|(_, artifact)| artifact.image.len()).sum();
    println!("{}: {} kernels, {} KiB", path.display(), kernels.len(), bytes.div_ceil(1024));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(text: &str) -> Option<String> {
        Some(text.into())
    }

    fn args(arch: &str, ptx: bool) -> Args {
        let arch = arch.split(',').map(str::to_owned).collect();
        Args { arch, ptx, family: None, format: None, check: false, out: None, jobs: None, worker: None }
    }

    #[test]
    fn kernels_are_chosen_by_family_and_format() {
        let name = "gemm_nt_fp8_e4m3_block128_f16_t128";
        assert!(wanted(name, &None, &None) && wanted(name, &some("gemm"), &None));
        assert!(wanted(name, &some("gemm"), &some("fp8_e4m3_block128")));
        assert!(!wanted(name, &some("gemv"), &None) && !wanted(name, &some("gem"), &None));
        assert!(!wanted(name, &None, &some("fp8_e4m3")) && !wanted(name, &None, &some("fp8")));
        assert!(wanted("mmq_nt_q4_0_q8_1", &None, &some("q4_0")) && wanted("read_probe", &None, &None));
        assert!(wanted("gemv_nt_f16_bf16", &None, &some("f16")) && !wanted("gemv_nt_q4_0_bf16", &None, &some("q4")));
    }

    #[test]
    fn architectures_are_checked() {
        let supported = [50, 61, 70, 75, 86, 90, 120];
        let names = |arch, ptx| -> Vec<String> {
            targets(&args(arch, ptx), "12.9", &supported).unwrap().iter().map(Target::to_string).collect()
        };
        assert_eq!(names("70,86,70", false), ["sm_70", "sm_86"]);
        assert_eq!(names("70", true), ["compute_70"]);
        let error = |arch| targets(&args(arch, false), "12.9", &supported).unwrap_err().to_string();
        assert!(error("61").contains("older than 7.0"), "{}", error("61"));
        assert!(error("88").contains("does not know architecture 88") && error("88").contains("70, 75, 86"));
        assert!(error("sm_86").contains("70,86,120") && error("90a").contains("by itself"));
    }
}

//! `cargo xtask build-kernels`: compiles every kernel of the manifest for
//! the given chips into bundles, or checks them against `kernels.lock`.
//!
//! Worker processes fill a cache in the target folder, from which
//! bundles are assembled, one a weight format or operation. Unchanged kernels are not compiled again, and an
//! interrupted build continues where it stopped.

mod files;
mod job;
mod sample;
mod selection;
mod workers;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use qgemm_cuda::{Target, all_kernels, build, manifest};
use xtask::workspace;

use crate::kernels_lock::{Differences, Lock, Row};
use crate::nvrtc;
use crate::sass::Disassembler;
use files::Built;
pub use files::part;
use job::Job;
use sample::{of_day, sample};
use selection::Selection;

/// Options of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Chips to compile for, by compute capability: `70,86,120`. Kernels with
    /// chip-specific instructions are compiled for `sm_90a`, `sm_120a`. With
    /// `--check`, the default is the chips of `kernels.lock`.
    #[arg(long, value_delimiter = ',', required_unless_present = "check", value_name = "ARCH,…")]
    arch: Vec<String>,
    /// Write portable PTX, which runs on these chips and all newer
    /// ones, instead of machine code.
    #[arg(long)]
    ptx: bool,
    #[command(flatten)]
    selection: Selection,
    /// Write nothing; fail when registers, spills or shared memory are worse
    /// than in `kernels.lock`, or when it is stale.
    #[arg(long, conflicts_with_all = ["ptx", "out"])]
    check: bool,
    /// Check quickly: compile each kernel for only one of
    /// the chips, in rotation.
    #[arg(long, requires = "check")]
    sample: bool,
    /// Every sixth kernel of the sample: the part for this day, if
    /// the compiler is that of `kernels.lock`.
    #[arg(long, requires = "sample", value_name = "DAY")]
    of_day: Option<u64>,
    /// Folder for the bundles, instead of `kernels` in the target folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Number of processes, instead of one per core.
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Run as worker I of N.
    #[arg(long, hide = true, value_name = "I/N")]
    worker: Option<String>,
}

/// Its kernels as rows of `kernels.lock`.
struct Rows {
    target: Target,
    rows: Vec<(String, Row)>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.worker.is_none() {
        nvrtc::ensure()?;
    }
    let (version, supported) = build::compiler()?;
    let lock = Lock::read()?;
    if args.of_day.is_some() && lock != Lock::default() && lock.nvrtc != version {
        eprintln!("skipped: kernels.lock: it is from NVRTC {}, and this is {version}", lock.nvrtc);
        return Ok(());
    }
    let targets = targets(args, &lock, &version, &supported)?;
    let selection = args.selection.resolved()?;
    let all = jobs(&selection, &targets)?;
    let mut jobs = if args.sample { sample(&all, &targets) } else { all.clone() };
    if let Some(day) = args.of_day {
        jobs = of_day(jobs, day);
    }
    let cache = workspace::target_folder()?.join("kernels").join("cache");
    if let Some(worker) = &args.worker {
        return workers::work(&jobs, &cache, worker);
    }
    ensure!(!jobs.is_empty(), "no kernel is of this operation, family, format and name");
    let out = match &args.out {
        Some(out) => out.clone(),
        None => workspace::target_folder()?.join("kernels"),
    };
    if args.check {
        let path = Lock::path();
        ensure!(lock != Lock::default(), "there is no {}: run the command without --check", path.display());
        let of = &lock.nvrtc;
        ensure!(*of == version, "{} is from NVRTC {of}, and numbers of {version} differ", path.display());
    } else {
        // Check before the work, not after it.
        files::writable(&out)?;
    }

    let disassembler = if args.ptx { None } else { Disassembler::find()? };

    workers::compile_all(&jobs, args.jobs)?;
    let mut built: Vec<Built> = targets.iter().map(|&target| Built { target, kernels: Vec::new() }).collect();
    for Job { spec, target } in jobs {
        // Already compiled, so this reads the cache.
        let artifact = build::compile(&cache, &spec, target)?.artifact;
        if let Some(built) = built.iter_mut().find(|b| b.target == target) {
            built.kernels.push((spec, artifact));
        }
    }
    let rows = if args.ptx { Vec::new() } else { rows(&built, disassembler.as_ref())? };
    for Rows { target, rows } in &rows {
        for (name, row) in rows.iter().filter(|(_, row)| row.spills > 0) {
            println!("{target} {name}: spills {} bytes", row.spills);
        }
    }
    match args.check {
        true => check(&selection, &lock, &all, &rows),
        false => {
            built.iter().try_for_each(|built| files::write(&out, &version, built))?;
            update_lock(&version, &rows)
        }
    }
}

/// The requested targets.
fn targets(args: &Args, lock: &Lock, version: &str, supported: &[u32]) -> anyhow::Result<Vec<Target>> {
    let mut targets = Vec::new();
    let names = if args.arch.is_empty() { &lock.chips() } else { &args.arch };
    for name in names {
        // Each kernel decides whether it needs `sm_90a`, so
        // both names mean the same.
        let Ok(arch) = name.strip_suffix('a').unwrap_or(name).parse::<u32>() else {
            bail!("`{name}` is no architecture: expected numbers like 70,86,120");
        };
        let target = match args.ptx {
            true => Target::Ptx { arch, specific: false },
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

/// Every kernel to compile, in the same order for all workers.
fn jobs(selection: &Selection, targets: &[Target]) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for &target in targets {
        let variant = target.variant().map_err(anyhow::Error::msg)?;
        let mut specs = if selection.names_formats() { all_kernels(variant) } else { manifest(variant) };
        specs.retain(|spec| selection.has(&spec.name) && target.has_room_for(spec));
        jobs.extend(specs.into_iter().map(|spec| Job { spec, target }));
    }
    Ok(jobs)
}

/// Rows of `kernels.lock` for the built kernels. Without a disassembler
/// they lack instructions, which is reported.
fn rows(built: &[Built], disassembler: Option<&Disassembler>) -> anyhow::Result<Vec<Rows>> {
    match disassembler {
        Some(found) => println!("matrix instructions from {}", found.path().display()),
        None => println!("no nvdisasm here: matrix instructions are not looked at"),
    }
    let (mut all, mut faults) = (Vec::new(), Vec::new());
    for Built { target, kernels } in built {
        let mut rows = Vec::new();
        let by_chip: BTreeSet<Target> = kernels.iter().map(|(_, artifact)| artifact.target).collect();
        for chip in by_chip {
            let kernels: Vec<_> = kernels.iter().filter(|(_, artifact)| artifact.target == chip).collect();
            let cubins: Vec<&[u8]> = kernels.iter().map(|(_, artifact)| artifact.image.as_slice()).collect();
            let seen = match disassembler {
                Some(found) if found.knows(chip) => found.read(chip, &cubins)?.into_iter().map(Some).collect(),
                Some(_) => {
                    println!("nvdisasm does not know {chip}: matrix instructions are not looked at");
                    vec![None; cubins.len()]
                }
                None => vec![None; cubins.len()],
            };
            for ((spec, artifact), code) in kernels.into_iter().zip(seen) {
                let name = &spec.name;
                let mma = code.map(|code| {
                    faults.extend(code.faults.iter().map(|fault| format!("{chip} {name}: {fault}")));
                    code.mma
                });
                let resources = artifact.resources.context("machine code whose resources are unknown")?;
                rows.push((spec.name.clone(), Row::new(spec, resources, mma)));
            }
        }
        all.push(Rows { target: *target, rows });
    }
    ensure!(faults.is_empty(), "machine code that cannot ship:\n{}", faults.join("\n"));
    Ok(all)
}

/// Compares with the lock file, and reports what was not compared.
fn check(selection: &Selection, lock: &Lock, all: &[Job], rows: &[Rows]) -> anyhow::Result<()> {
    let path = Lock::path();
    let mut found = Differences::default();
    let mut left_out = String::new();
    for Rows { target, rows } in rows {
        let names: Vec<String> = all.iter().filter(|j| j.target == *target).map(|j| j.spec.name.clone()).collect();
        let differences = lock.compare(*target, rows, &names, |name| selection.has(name));
        found.worse.extend(differences.worse);
        found.stale.extend(differences.stale);
        let built: BTreeSet<&String> = rows.iter().map(|(name, _)| name).collect();
        let rest: Vec<&String> = names.iter().filter(|name| !built.contains(name)).collect();
        if !rest.is_empty() {
            eprintln!(
                "skipped: kernels.lock {target}, {} of {} kernels: each kernel was compiled for one chip only; \
                 `cargo xtask build-kernels --check` compiles all",
                rest.len(),
                names.len()
            );
            rest.iter().for_each(|name| left_out += &format!("{target} {name}\n"));
        }
    }
    if !left_out.is_empty() {
        let list = workspace::target_folder()?.join("kernels").join("not-checked.txt");
        fs::write(&list, left_out).with_context(|| format!("writing {}", list.display()))?;
        println!("what was not compiled: {}", list.display());
    }
    let spilling = rows.iter().flat_map(|r| &r.rows).filter(|(_, row)| row.spills > 0).count();
    ensure!(
        found.worse.is_empty(),
        "kernels became worse than {} says; if that is meant, run the command without --check:\n{}",
        path.display(),
        [found.worse, found.stale].concat().join("\n")
    );
    ensure!(
        found.stale.is_empty(),
        "{} is stale (nothing became worse): run the command without --check:\n{}",
        path.display(),
        found.stale.join("\n")
    );
    ensure!(spilling == 0, "{spilling} kernels spill registers (listed above); no shipped configuration may");
    println!("{} kernels as in {}", rows.iter().map(|r| r.rows.len()).sum::<usize>(), path.display());
    Ok(())
}

/// Updates the lock file, unless it is from another compiler.
fn update_lock(version: &str, rows: &[Rows]) -> anyhow::Result<()> {
    let path = Lock::path();
    // Read now instead of before the work: another build
    // may have finished meanwhile.
    let lock = Lock::read()?;
    if lock != Lock::default() && lock.nvrtc != version {
        println!(
            "{} stays as it is: it is from NVRTC {}, and this is {version} (delete it to start anew)",
            path.display(),
            lock.nvrtc
        );
        return Ok(());
    }
    let mut new = lock.clone();
    for Rows { target, rows } in rows {
        let variant = target.variant().map_err(anyhow::Error::msg)?;
        let shipped = manifest(variant).into_iter().filter(|spec| target.has_room_for(spec));
        new.update(version, *target, rows, &shipped.map(|spec| spec.name).collect());
    }
    for changed in new.write()? {
        println!("{} changed", changed.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(arch: &str, ptx: bool) -> Args {
        let arch = arch.split(',').filter(|a| !a.is_empty()).map(str::to_owned).collect();
        Args {
            arch,
            ptx,
            selection: Selection::default(),
            check: false,
            sample: false,
            of_day: None,
            out: None,
            jobs: None,
            worker: None,
        }
    }

    #[test]
    fn architectures_are_checked() {
        let supported = [50, 61, 70, 75, 86, 90, 120];
        let chosen = |arch, ptx| targets(&args(arch, ptx), &Lock::default(), "12.9", &supported);
        let names = |arch, ptx| -> Vec<String> { chosen(arch, ptx).unwrap().iter().map(Target::to_string).collect() };
        assert_eq!(names("70,86,70", false), ["sm_70", "sm_86"]);
        assert_eq!(names("90a,90,120a", false), ["sm_90", "sm_120"]);
        assert_eq!(names("70", true), ["compute_70"]);
        let error = |arch| chosen(arch, false).unwrap_err().to_string();
        assert!(error("61").contains("older than 7.0"), "{}", error("61"));
        assert!(error("88").contains("does not know architecture 88") && error("88").contains("70, 75, 86"));
        assert!(error("sm_86").contains("70,86,120") && error("volta").contains("`volta`"));
    }
}

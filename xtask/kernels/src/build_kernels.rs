//! `cargo xtask build-kernels`: compiles every kernel of the manifest for
//! the given chips into bundles, or checks them against `kernels.lock`.
//!
//! Worker processes fill a cache in the target folder, from which
//! bundles are assembled. Unchanged kernels are not compiled again, and an
//! interrupted build continues where it stopped.

mod job;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use qgemm_cuda::{Artifact, BUNDLE_EXTENSION, Bundle, KernelSpec, Target, all_kernels, build, manifest};
use qgemm_formats::Format;
use qgemm_hal::{KernelId, Spec};
use xtask::workspace;

use crate::kernels_lock::{Differences, Lock, Row};
use crate::nvrtc;
use crate::sass::Disassembler;
use job::Job;

/// Days after which all of the sample has been drawn.
const DAYS: u64 = 6;
/// Maximum size of a bundle in bytes.
const MAX_BUNDLE_BYTES: u64 = 20_000_000;

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
    /// Only kernels of this family (`gemv`).
    #[arg(long)]
    family: Option<String>,
    /// Only kernels of these weight formats (`q4_k,q6_k`).
    #[arg(long, value_delimiter = ',', value_name = "FORMAT,…")]
    format: Vec<Format>,
    /// Only kernels whose identity contains this text
    /// (`main_loop=gemm_sliced_k`), or one of several.
    #[arg(long, value_name = "PART")]
    named: Vec<String>,
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

/// Kernels built for a target.
struct Built {
    target: Target,
    kernels: Vec<(KernelSpec, Artifact)>,
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
    let all = jobs(args, &targets)?;
    let mut jobs = if args.sample { sample(&all, &targets) } else { all.clone() };
    if let Some(day) = args.of_day {
        jobs = (day..).zip(jobs).filter(|(number, _)| number.is_multiple_of(DAYS)).map(|(_, job)| job).collect();
    }
    let cache = workspace::target_folder()?.join("kernels").join("cache");
    if let Some(worker) = &args.worker {
        return workers::work(&jobs, &cache, worker);
    }
    ensure!(!jobs.is_empty(), "no kernel is of this family, format and name");
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
        writable(&out)?;
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
        true => check(args, &lock, &all, &rows),
        false => {
            built.iter().try_for_each(|built| write_bundle(&out, &version, built))?;
            update_lock(args, &version, &rows)
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
fn jobs(args: &Args, targets: &[Target]) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for &target in targets {
        let variant = target.variant().map_err(anyhow::Error::msg)?;
        let mut specs = if args.format.is_empty() { manifest(variant) } else { all_kernels(variant) };
        specs.retain(|spec| args.wants(&spec.name));
        jobs.extend(specs.into_iter().map(|spec| Job { spec, target }));
    }
    Ok(jobs)
}

/// One of `jobs` for each kind, with one tile and one
/// target. In name order, kinds rotate through the targets
/// and shift by one each round, so that repeating names meet
/// every target; so do tiles.
fn sample(jobs: &[Job], targets: &[Target]) -> Vec<Job> {
    let mut of = BTreeMap::<String, Vec<&Job>>::new();
    for job in jobs {
        of.entry(kind(&job.spec)).or_default().push(job);
    }
    let count = targets.len();
    let chosen = of.values().enumerate().filter_map(|(i, jobs)| {
        let from = (i + i / count) % count;
        let of_target = |target: &Target| jobs.iter().filter(|job| job.target == *target).collect::<Vec<_>>();
        let tiles = targets[from..].iter().chain(&targets[..from]).map(of_target).find(|tiles| !tiles.is_empty())?;
        Some((**tiles[i % tiles.len()]).clone())
    });
    chosen.collect()
}

/// Kind of a kernel, without its tile and ring copies:
/// operation, family, mechanism and types.
fn kind(spec: &KernelSpec) -> String {
    /// Main loops whose CTAs share rings.
    const RINGS: [&str; 2] = ["sm80_cp_async", "sm120_tma_ws"];
    let Ok(id) = spec.name.parse::<KernelId>() else { return spec.name.clone() };
    match id.spec {
        Spec::Gemm(gemm) => {
            let mechanism = if RINGS.contains(&gemm.main_loop.as_str()) { "rings" } else { gemm.main_loop.as_str() };
            format!("{} {mechanism} {} {}", id.family, gemm.w, gemm.x)
        }
        Spec::Experts(experts) => format!("experts {} {} {} {}", id.family, experts.main_loop, experts.w, experts.x),
        other => format!("{} {} {other:?}", id.operation(), id.family),
    }
}

impl Args {
    fn wants_all(&self) -> bool {
        self.family.is_none() && self.format.is_empty() && self.named.is_empty()
    }

    /// Whether the kernel was requested.
    fn wants(&self, name: &str) -> bool {
        wanted(name, &self.family, &self.format)
            && (self.named.is_empty() || self.named.iter().any(|part| name.contains(part)))
    }
}

/// Whether the kernel belongs to the family and one of the
/// formats. Format-independent launches of `gemm` belong to it, too.
fn wanted(name: &str, family: &Option<String>, formats: &[Format]) -> bool {
    let Ok(id) = name.parse::<KernelId>() else { return family.is_none() && formats.is_empty() };
    let is_prologue = matches!(id.spec, Spec::Convert(_));
    let of_family = |f: &String| id.family.as_str() == f || is_prologue && f == "gemm";
    let of_format = id.spec.weight().map_or(is_prologue, |weight| formats.contains(&weight));
    family.as_ref().is_none_or(of_family) && (formats.is_empty() || of_format)
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
fn check(args: &Args, lock: &Lock, all: &[Job], rows: &[Rows]) -> anyhow::Result<()> {
    let path = Lock::path();
    let mut found = Differences::default();
    let mut left_out = String::new();
    for Rows { target, rows } in rows {
        let names: Vec<String> = all.iter().filter(|j| j.target == *target).map(|j| j.spec.name.clone()).collect();
        let differences = lock.compare(*target, rows, &names, |name| args.wants(name));
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
fn update_lock(args: &Args, version: &str, rows: &[Rows]) -> anyhow::Result<()> {
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
        new.update(version, *target, rows, args.wants_all());
    }
    if new != lock {
        new.write()?;
        println!("{} changed", path.display());
    }
    Ok(())
}

/// Checks that files can be created in the folder, which
/// is created if necessary.
fn writable(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)
        .and_then(|()| tempfile::tempfile_in(folder))
        .map(drop)
        .with_context(|| format!("bundles cannot be written to {}", folder.display()))
}

fn write_bundle(out: &Path, version: &str, Built { target, kernels }: &Built) -> anyhow::Result<()> {
    let path = out.join(format!("{target}.{BUNDLE_EXTENSION}"));
    let len = Bundle::write(&path, *target, version, kernels)?;
    let unpacked: usize = kernels.iter().map(|(_, artifact)| artifact.image.len()).sum();
    println!(
        "{}: {} kernels, {:.1} MB ({:.1} MB unpacked)",
        path.display(),
        kernels.len(),
        len as f64 / 1e6,
        unpacked as f64 / 1e6
    );
    if len > MAX_BUNDLE_BYTES {
        println!("{target}: more than the {} MB that a bundle may weigh", MAX_BUNDLE_BYTES / 1_000_000);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use qgemm_hal::Variant;

    use super::*;

    fn args(arch: &str, ptx: bool) -> Args {
        let arch = arch.split(',').filter(|a| !a.is_empty()).map(str::to_owned).collect();
        Args {
            arch,
            ptx,
            family: None,
            format: Vec::new(),
            named: Vec::new(),
            check: false,
            sample: false,
            of_day: None,
            out: None,
            jobs: None,
            worker: None,
        }
    }

    #[test]
    fn kernels_are_chosen_by_family_and_format() {
        let formats = |names: &[&str]| -> Vec<Format> { names.iter().map(|n| n.parse().unwrap()).collect() };
        let chosen = |family: Option<&str>, of: &[&str]| -> BTreeSet<String> {
            let (family, of) = (family.map(str::to_owned), formats(of));
            let names = manifest(Variant::Sm120).into_iter().map(|spec| spec.name);
            names.filter(|name| wanted(name, &family, &of)).collect()
        };
        let all = chosen(None, &[]);
        assert_eq!(all.len(), manifest(Variant::Sm120).len());
        let of = |family, part: &str| chosen(family, &["q4_0"]).iter().filter(|name| name.contains(part)).count();
        assert!(of(None, "w=q4_0") > 10 && of(None, "w=q4_0") == of(None, "w="));
        assert_eq!((of(None, "convert:"), of(None, "probe:"), of(Some("gemv"), "convert:")), (48, 0, 0));
        assert!(of(Some("gemm"), "gemm:gemm:") > 5 && of(Some("gemm"), "gemm:gemv:") == 0);
        assert_eq!((of(Some("gemm"), "convert:"), of(Some("repack"), "pack:repack:")), (48, 1));
        // A format whose name starts with another's name
        // is a different format.
        let fp8 = chosen(None, &["fp8_e4m3"]);
        assert!(fp8.iter().all(|name| !name.contains("block128")));
        let two = chosen(Some("gemv"), &["q4_0", "q6_k"]);
        assert_eq!(two.len(), chosen(Some("gemv"), &["q4_0"]).len() + chosen(Some("gemv"), &["q6_k"]).len());
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

    #[test]
    fn a_sample_holds_each_kind_once_and_every_chip() {
        let chips = ["70", "75", "80", "86", "89", "90", "120"];
        for arch in [chips.join(","), "70,86,120".into(), "80".into()] {
            let args = args(&arch, false);
            let targets = targets(&args, &Lock::default(), "12.9", &[70, 75, 80, 86, 89, 90, 120]).unwrap();
            let all = jobs(&args, &targets).unwrap();
            let chosen = sample(&all, &targets);
            let kinds = |jobs: &[Job]| jobs.iter().map(|j| kind(&j.spec)).collect::<BTreeSet<_>>();
            assert_eq!(kinds(&chosen), kinds(&all));
            assert_eq!(chosen.len(), kinds(&all).len());
            assert!(kinds(&all).contains("gemv gemv q4_k f16"), "a kind has no tile");
            for &target in &targets {
                let of_chip = chosen.iter().filter(|j| j.target == target);
                let activations: BTreeSet<&str> = of_chip
                    .filter_map(|j| ["x=f16,", "x=bf16,", "x=f32,"].into_iter().find(|a| j.spec.name.contains(a)))
                    .collect();
                assert_eq!(activations.len(), 3, "{target} of {arch}: {activations:?}");
            }
        }
    }
}

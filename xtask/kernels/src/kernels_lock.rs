//! `kernels.lock`: registers, spills, shared memory and matrix instructions
//! of every kernel, so that changes show up in review. A folder with
//! a file for each chip and operation.

mod row;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, ensure};
use qgemm_cuda::Target;
use xtask::workspace;

use crate::atomic;
pub use row::{Mma, Row};

/// Extension of a file.
const EXTENSION: &str = "lock";

/// Contents of the folder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lock {
    /// Compiler version of the numbers.
    pub nvrtc: String,
    /// Kernels by target and name.
    pub targets: BTreeMap<String, BTreeMap<String, Row>>,
}

/// Differences between kernels and the file, one line each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Increased registers (beyond noise), spills, stack or shared memory.
    pub worse: Vec<String>,
    /// Any other difference: the file must be rewritten.
    pub stale: Vec<String>,
}

impl Lock {
    /// Path of the folder.
    pub fn path() -> PathBuf {
        workspace::root().join("crates/qgemm-cuda/kernels.lock")
    }

    /// The committed files; empty when there are none.
    ///
    /// # Errors
    /// When a file cannot be parsed, or two are from different compilers.
    pub fn read() -> anyhow::Result<Self> {
        Self::read_in(&Self::path())
    }

    fn read_in(folder: &Path) -> anyhow::Result<Self> {
        let mut lock = Self::default();
        for path in files(folder)? {
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let target = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
            let (nvrtc, rows) = text::parse(&text).with_context(|| format!("parsing {}", path.display()))?;
            let others = if lock.nvrtc.is_empty() { nvrtc } else { &lock.nvrtc };
            ensure!(others == nvrtc, "{} is from NVRTC {nvrtc}, other files from {others}", path.display());
            lock.nvrtc = nvrtc.to_owned();
            lock.targets.entry(target.into_owned()).or_default().extend(rows);
        }
        Ok(lock)
    }

    /// Writes the files that differ, each atomically, and deletes those of no kernel.
    /// Returns the paths of these.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&self) -> anyhow::Result<Vec<PathBuf>> {
        self.write_in(&Self::path())
    }

    fn write_in(&self, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let mut wanted = BTreeMap::new();
        for (target, rows) in &self.targets {
            let mut operations = BTreeMap::<&str, Vec<(&str, &Row)>>::new();
            for (name, row) in rows {
                operations.entry(text::operation(name)).or_default().push((name, row));
            }
            for (operation, rows) in operations {
                let path = folder.join(target).join(operation).with_extension(EXTENSION);
                wanted.insert(path, text::print(&self.nvrtc, target, &rows));
            }
        }
        let mut changed = Vec::new();
        for path in files(folder)?.into_iter().filter(|path| !wanted.contains_key(path)) {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
            changed.push(path);
        }
        for (path, text) in wanted {
            if fs::read_to_string(&path).is_ok_and(|current| current == text) {
                continue;
            }
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            atomic::write(&path, text.as_bytes())?;
            changed.push(path);
        }
        Ok(changed)
    }

    /// Chips in the files, as `--arch` takes them.
    pub fn chips(&self) -> Vec<String> {
        let mut chips: Vec<u32> = self.targets.keys().filter_map(|t| Some(t.parse::<Target>().ok()?.arch())).collect();
        chips.sort_unstable();
        chips.iter().map(u32::to_string).collect()
    }

    /// Merges the kernels built for `target`. Rows whose registers differ by noise alone stay
    /// as they are. Kernels that are not among `names`, all shipped ones, are removed. Known
    /// instructions are kept when the new kernel was not disassembled.
    pub fn update(&mut self, nvrtc: &str, target: Target, built: &[(String, Row)], names: &BTreeSet<String>) {
        nvrtc.clone_into(&mut self.nvrtc);
        let rows = self.targets.entry(target.to_string()).or_default();
        for (name, row) in built {
            let mut row = row.clone();
            if let Some(old) = rows.remove(name) {
                row.mma = row.mma.or_else(|| old.mma.clone());
                row = old.unless_changed(row);
            }
            rows.insert(name.clone(), row);
        }
        rows.retain(|name, _| names.contains(name));
        self.targets.retain(|_, rows| !rows.is_empty());
    }

    /// Differences of the kernels of `target`. `built` are some
    /// or all of them; `names` are all expected ones (among
    /// those that `wanted` picks).
    pub fn compare(
        &self,
        target: Target,
        built: &[(String, Row)],
        names: &[String],
        wanted: impl Fn(&str) -> bool,
    ) -> Differences {
        let none = BTreeMap::new();
        let rows = self.targets.get(&target.to_string()).unwrap_or(&none);
        let mut found = Differences::default();
        for (name, now) in built {
            let Some(then) = rows.get(name) else { continue };
            let (worse, other) = then.changes(now);
            if !worse.is_empty() {
                found.worse.push(format!("{target} {name}: {}", [worse, other].concat().join(", ")));
            } else if !other.is_empty() {
                found.stale.push(format!("{target} {name}: {}", other.join(", ")));
            }
        }
        let new = names.iter().filter(|name| !rows.contains_key(*name));
        found.stale.extend(new.map(|name| format!("{target} {name}: new")));
        let gone = rows.keys().filter(|name| wanted(name) && !names.contains(name));
        found.stale.extend(gone.map(|name| format!("{target} {name}: gone")));
        found
    }
}

/// Files of the folder, by chip and operation.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for chip in entries(folder)? {
        files.extend(entries(&chip)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == EXTENSION)));
    }
    Ok(files)
}

/// Entries of a folder in order of their names; none if the folder does not exist.
fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let list = match fs::read_dir(folder) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        list => list.with_context(|| format!("reading {}", folder.display()))?,
    };
    let mut paths = list.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(registers: u32) -> Row {
        Row { registers, shared: 1024, ..Row::default() }
    }

    fn rows(rows: &[(&str, u32)]) -> Vec<(String, Row)> {
        rows.iter().map(|&(name, registers)| (name.to_owned(), row(registers))).collect()
    }

    fn target() -> Target {
        Target::Cubin { arch: 86, specific: false }
    }

    /// Updates with all kernels of a target.
    fn update(lock: &mut Lock, target: Target, built: &[(String, Row)]) {
        lock.update("12.9", target, built, &built.iter().map(|(name, _)| name.clone()).collect());
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&n| n.to_owned()).collect()
    }

    #[test]
    fn the_committed_files_are_as_they_would_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::read().unwrap();
        for path in lock.write_in(folder.path()).unwrap() {
            let committed = Lock::path().join(path.strip_prefix(folder.path()).unwrap());
            let read = |path: &Path| fs::read_to_string(path).unwrap();
            assert!(read(&committed) == read(&path), "{}", committed.display());
        }
        assert_eq!(files(folder.path()).unwrap().len(), files(&Lock::path()).unwrap().len());
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut lock = Lock::default();
        let rewritten = |lock: &Lock| -> Vec<String> {
            let paths = lock.write_in(folder.path()).unwrap();
            assert_eq!(Lock::read_in(folder.path()).unwrap(), *lock);
            paths.iter().map(|p| p.strip_prefix(folder.path()).unwrap().display().to_string()).collect()
        };
        assert!(rewritten(&lock).is_empty());
        update(&mut lock, target(), &rows(&[("gemm:b", 40), ("norm:a", 32)]));
        let mma = Some(Mma::from([("HMMA.884.F32.F32".to_owned(), 64)]));
        let volta = Target::Cubin { arch: 70, specific: false };
        update(&mut lock, volta, &[("gemm:a".into(), Row { mma, ..row(32) })]);
        assert_eq!(rewritten(&lock), ["sm_70/gemm.lock", "sm_86/gemm.lock", "sm_86/norm.lock"]);
        assert_eq!(lock.chips(), ["70", "86"]);
        assert!(rewritten(&lock).is_empty());
        update(&mut lock, target(), &rows(&[("gemm:b", 48)]));
        assert_eq!(rewritten(&lock), ["sm_86/norm.lock", "sm_86/gemm.lock"]);
    }

    #[test]
    fn worse_is_told_from_otherwise_different() {
        let mut lock = Lock::default();
        update(&mut lock, target(), &rows(&[("a", 32), ("b", 40), ("c", 48), ("e", 50)]));
        let built = rows(&[("a", 36), ("b", 45), ("c", 43), ("d", 48)]);
        let found = lock.compare(target(), &built, &names(&["a", "b", "c", "d"]), |_| true);
        assert_eq!(found.worse, ["sm_86 b: registers 40 -> 45"]);
        assert_eq!(found.stale, ["sm_86 c: registers 48 -> 43", "sm_86 d: new", "sm_86 e: gone"]);
        for (what, spilling) in [
            ("spills", Row { spills: 4, ..row(24) }),
            ("stack", Row { stack: 8, ..row(24) }),
            ("shared", Row { shared: 1025, ..row(24) }),
        ] {
            let found = lock.compare(target(), &[("a".into(), spilling)], &[], |_| false);
            assert!(found.worse[0].contains(what) && found.worse[0].contains("registers 32 -> 24"), "{found:?}");
        }
    }

    #[test]
    fn a_part_of_the_kernels_is_compared_with_its_part() {
        let mut lock = Lock::default();
        update(&mut lock, target(), &rows(&[("gemm_a", 32), ("gemv_a", 40)]));
        let found = lock.compare(target(), &rows(&[("gemv_a", 40)]), &names(&["gemv_a"]), |n| n.starts_with("gemv"));
        assert_eq!(found, Differences::default());
        let all = BTreeSet::from(["gemm_a", "gemv_a"].map(str::to_owned));
        let update = |lock: &mut Lock, registers| {
            lock.update("12.9", target(), &rows(&[("gemv_a", registers)]), &all);
            assert_eq!(lock.targets["sm_86"].len(), 2);
            lock.targets["sm_86"]["gemv_a"].registers
        };
        assert_eq!(update(&mut lock, 44), 40, "noise");
        assert_eq!(update(&mut lock, 45), 45);
    }

    #[test]
    fn instructions_are_kept_and_compared_where_they_are_known() {
        let seen = |count| Row { mma: Some(Mma::from([("HMMA.16816.F32".to_owned(), count)])), ..row(32) };
        let mut lock = Lock::default();
        update(&mut lock, target(), &[("a".into(), seen(64))]);
        let compare = |row| lock.compare(target(), &[("a".into(), row)], &names(&["a"]), |_| true);
        assert_eq!(compare(row(32)), Differences::default(), "no disassembler here");
        assert_eq!(compare(seen(64)), Differences::default());
        let changed = compare(seen(32));
        assert!(changed.worse.is_empty() && changed.stale[0].contains("mma"), "{changed:?}");
        update(&mut lock, target(), &rows(&[("a", 37)]));
        assert_eq!(lock.targets["sm_86"]["a"], Row { registers: 37, ..seen(64) });
    }
}

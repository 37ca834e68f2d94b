//! `kernels.lock`: registers, spills, shared memory and matrix instructions
//! of every kernel, so that changes show up in review.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use qgemm_cuda::{KernelSpec, Resources, Target};
use serde::{Deserialize, Serialize};
use xtask::workspace;

use crate::atomic;

/// Matrix instructions of a kernel by name (`HMMA.16816.F32`),
/// with their number in the code.
pub type Mma = BTreeMap<String, u32>;

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lock {
    /// Compiler version of the numbers.
    pub nvrtc: String,
    /// Kernels by target and name.
    pub targets: BTreeMap<String, BTreeMap<String, Row>>,
}

/// Resources and matrix instructions of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Registers per thread.
    pub registers: u32,
    /// Spilled bytes per thread.
    pub spills: u32,
    /// Stack bytes per thread.
    pub stack: u32,
    /// Shared memory of a CTA, dynamic included.
    pub shared: u32,
    /// Absent when the kernel was not disassembled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mma: Option<Mma>,
}

impl Row {
    /// The row of `spec` with `resources`.
    pub fn new(spec: &KernelSpec, resources: Resources, mma: Option<Mma>) -> Self {
        Self {
            registers: resources.registers,
            spills: resources.spill_bytes,
            stack: resources.stack_bytes,
            shared: resources.shared_bytes + dynamic_shared_bytes(&spec.prelude),
            mma,
        }
    }
}

/// Dynamic shared memory of a launch, from the kernel's prelude.
fn dynamic_shared_bytes(prelude: &str) -> u32 {
    let value = prelude.lines().find_map(|line| line.strip_prefix("constexpr unsigned QG_SHARED_BYTES = "));
    value.and_then(|v| v.trim_end_matches(';').parse().ok()).unwrap_or(0)
}

/// Registers that a kernel may have more or fewer than the file says. An unrelated
/// change of an epilogue moves that many, and no reviewer looks at them.
const REGISTER_NOISE: u32 = 4;

/// Differences between kernels and the file, one line each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Increased registers (beyond noise), spills, stack or shared memory.
    pub worse: Vec<String>,
    /// Any other difference: the file must be rewritten.
    pub stale: Vec<String>,
}

impl Lock {
    /// Path of the file.
    pub fn path() -> PathBuf {
        workspace::root().join("crates/qgemm-cuda/kernels.lock")
    }

    /// The committed file; empty when there is none.
    ///
    /// # Errors
    /// When the file cannot be parsed.
    pub fn read() -> anyhow::Result<Self> {
        let path = Self::path();
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| format!("parsing {}", path.display())),
            Err(_) => Ok(Self::default()),
        }
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&self) -> anyhow::Result<()> {
        atomic::write(&Self::path(), self.text()?.as_bytes())
    }

    /// Chips in the file, as `--arch` takes them.
    pub fn chips(&self) -> Vec<String> {
        let mut chips: Vec<u32> = self.targets.keys().filter_map(|t| Some(t.parse::<Target>().ok()?.arch())).collect();
        chips.sort_unstable();
        chips.iter().map(u32::to_string).collect()
    }

    /// One line per kernel, so that a diff names it.
    fn text(&self) -> anyhow::Result<String> {
        let mut out = format!("{{\n  \"nvrtc\": {},\n  \"targets\": {{", serde_json::to_string(&self.nvrtc)?);
        for (t, (target, rows)) in self.targets.iter().enumerate() {
            out += &format!("{}\n    {}: {{", if t > 0 { "," } else { "" }, serde_json::to_string(target)?);
            for (r, (name, row)) in rows.iter().enumerate() {
                let comma = if r > 0 { "," } else { "" };
                out += &format!("{comma}\n      {}: {}", serde_json::to_string(name)?, serde_json::to_string(row)?);
            }
            out += "\n    }";
        }
        out += "\n  }\n}\n";
        Ok(out)
    }

    /// Merges the kernels built for `target`. Rows whose registers differ by noise alone stay as
    /// they are. With `all`, kernels that
    /// were not built are removed. Known instructions are kept when the
    /// new kernel was not disassembled.
    pub fn update(&mut self, nvrtc: &str, target: Target, built: &[(String, Row)], all: bool) {
        nvrtc.clone_into(&mut self.nvrtc);
        let rows = self.targets.entry(target.to_string()).or_default();
        let mut before = rows.clone();
        if all {
            rows.clear();
        }
        for (name, row) in built {
            let mut row = row.clone();
            if let Some(old) = before.remove(name) {
                row.mma = row.mma.or_else(|| old.mma.clone());
                row = old.unless_changed(row);
            }
            rows.insert(name.clone(), row);
        }
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

impl Row {
    /// This row, or `now` if it differs by more than noise.
    fn unless_changed(self, now: Row) -> Row {
        let (worse, other) = self.changes(&now);
        if worse.is_empty() && other.is_empty() && self.mma.is_some() == now.mma.is_some() { self } else { now }
    }

    /// Regressions in `now`, and other changes.
    fn changes(&self, now: &Row) -> (Vec<String>, Vec<String>) {
        let (mut worse, mut other) = (Vec::new(), Vec::new());
        for (what, a, b) in [
            ("registers", self.registers, now.registers),
            ("spills", self.spills, now.spills),
            ("stack", self.stack, now.stack),
            ("shared", self.shared, now.shared),
        ] {
            let is_noise = what == "registers" && a.abs_diff(b) <= REGISTER_NOISE;
            if a != b && !is_noise {
                let lines = if b > a { &mut worse } else { &mut other };
                lines.push(format!("{what} {a} -> {b}"));
            }
        }
        if let (Some(a), Some(b)) = (&self.mma, &now.mma)
            && a != b
        {
            other.push(format!("mma {a:?} -> {b:?}"));
        }
        (worse, other)
    }
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

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&n| n.to_owned()).collect()
    }

    #[test]
    fn the_text_is_the_json_that_it_is_read_from() {
        let mut lock = Lock::default();
        assert_eq!(serde_json::from_str::<Lock>(&lock.text().unwrap()).unwrap(), lock);
        lock.update("12.9", target(), &rows(&[("b", 40), ("a", 32)]), true);
        let mma = Some(Mma::from([("HMMA.884.F32.F32".to_owned(), 64)]));
        let volta = Target::Cubin { arch: 70, specific: false };
        lock.update("12.9", volta, &[("a".into(), Row { mma, ..row(32) })], true);
        assert_eq!(serde_json::from_str::<Lock>(&lock.text().unwrap()).unwrap(), lock);
        assert_eq!(lock.chips(), ["70", "86"]);
    }

    #[test]
    fn worse_is_told_from_otherwise_different() {
        let mut lock = Lock::default();
        lock.update("12.9", target(), &rows(&[("a", 32), ("b", 40), ("c", 48), ("e", 50)]), true);
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
        lock.update("12.9", target(), &rows(&[("gemm_a", 32), ("gemv_a", 40)]), true);
        let found = lock.compare(target(), &rows(&[("gemv_a", 40)]), &names(&["gemv_a"]), |n| n.starts_with("gemv"));
        assert_eq!(found, Differences::default());
        let update = |lock: &mut Lock, registers| {
            lock.update("12.9", target(), &rows(&[("gemv_a", registers)]), false);
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
        lock.update("12.9", target(), &[("a".into(), seen(64))], true);
        let compare = |row| lock.compare(target(), &[("a".into(), row)], &names(&["a"]), |_| true);
        assert_eq!(compare(row(32)), Differences::default(), "no disassembler here");
        assert_eq!(compare(seen(64)), Differences::default());
        let changed = compare(seen(32));
        assert!(changed.worse.is_empty() && changed.stale[0].contains("mma"), "{changed:?}");
        lock.update("12.9", target(), &rows(&[("a", 37)]), true);
        assert_eq!(lock.targets["sm_86"]["a"], Row { registers: 37, ..seen(64) });
    }

    #[test]
    fn dynamic_shared_memory_is_read_from_the_prelude() {
        let prelude =
            "#define A 1\nconstexpr unsigned QG_THREADS = 128;\nconstexpr unsigned QG_SHARED_BYTES = 20512;\n";
        assert_eq!(dynamic_shared_bytes(prelude), 20512);
        assert_eq!(dynamic_shared_bytes(""), 0);
    }
}

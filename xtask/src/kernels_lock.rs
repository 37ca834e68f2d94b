//! `kernels.lock`: registers, spills and shared memory of every kernel, so that a change of them shows in review.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use qgemm_cuda::{Artifact, KernelSpec, Resources, Target};
use serde::{Deserialize, Serialize};

use crate::workspace;

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lock {
    /// Version of the compiler that the numbers are from.
    pub nvrtc: String,
    /// Kernels by target and name.
    pub targets: BTreeMap<String, BTreeMap<String, Row>>,
}

/// What a kernel needs of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread spills.
    pub spills: u32,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// Static shared memory of a block.
    pub shared: u32,
}

impl From<Resources> for Row {
    fn from(r: Resources) -> Self {
        Self { registers: r.registers, spills: r.spill_bytes, stack: r.stack_bytes, shared: r.shared_bytes }
    }
}

impl Lock {
    /// Where the file is.
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

    /// Writes the file.
    ///
    /// # Errors
    /// When that fails.
    pub fn write(&self) -> anyhow::Result<()> {
        let path = Self::path();
        fs::write(&path, self.text()?).with_context(|| format!("writing {}", path.display()))
    }

    /// One line a kernel, so that a difference names it.
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

    /// Takes in what was built for `target`; with `all`, kernels that were not built are gone.
    pub fn update(&mut self, nvrtc: &str, target: Target, kernels: &[(KernelSpec, Artifact)], all: bool) {
        nvrtc.clone_into(&mut self.nvrtc);
        let rows = self.targets.entry(target.to_string()).or_default();
        if all {
            rows.clear();
        }
        let built = kernels.iter().filter_map(|(spec, artifact)| Some((spec.name.clone(), artifact.resources?.into())));
        rows.extend(built);
        self.targets.retain(|_, rows| !rows.is_empty());
    }

    /// What differs from `committed`, a line each.
    pub fn differences(&self, committed: &Lock) -> Vec<String> {
        let mut lines = Vec::new();
        let none = BTreeMap::new();
        for target in self.targets.keys().chain(committed.targets.keys().filter(|t| !self.targets.contains_key(*t))) {
            let (now, then) =
                (self.targets.get(target).unwrap_or(&none), committed.targets.get(target).unwrap_or(&none));
            for name in now.keys().chain(then.keys().filter(|n| !now.contains_key(*n))) {
                match (then.get(name), now.get(name)) {
                    (Some(a), Some(b)) if a == b => {}
                    (Some(a), Some(b)) => lines.push(format!("{target} {name}: {a:?} became {b:?}")),
                    (None, _) => lines.push(format!("{target} {name}: new")),
                    (_, None) => lines.push(format!("{target} {name}: gone")),
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, registers: u32) -> (KernelSpec, Artifact) {
        let spec =
            KernelSpec { name: name.into(), entry: "e", text: "", symbol: "s", prelude: String::new(), arch_specific: false };
        let resources = Some(Resources { registers, ..Default::default() });
        (spec, Artifact { target: target(), nvrtc: "12.9".into(), resources, image: Vec::new() })
    }

    fn target() -> Target {
        Target::Cubin { arch: 86, specific: false }
    }

    #[test]
    fn the_text_is_the_json_that_it_is_read_from() {
        let mut lock = Lock::default();
        assert_eq!(serde_json::from_str::<Lock>(&lock.text().unwrap()).unwrap(), lock);
        lock.update("12.9", target(), &[kernel("b", 40), kernel("a", 32)], true);
        lock.update("12.9", Target::Cubin { arch: 70, specific: false }, &[kernel("a", 32)], true);
        assert_eq!(serde_json::from_str::<Lock>(&lock.text().unwrap()).unwrap(), lock);
    }

    #[test]
    fn differences_name_what_changed() {
        let mut then = Lock::default();
        then.update("12.9", target(), &[kernel("a", 32), kernel("b", 40), kernel("c", 48)], true);
        assert!(then.differences(&then).is_empty());
        let mut now = then.clone();
        now.update("12.9", target(), &[kernel("a", 32), kernel("b", 41), kernel("d", 48)], true);
        let lines = now.differences(&then);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].starts_with("sm_86 b: ") && lines[1] == "sm_86 d: new" && lines[2] == "sm_86 c: gone");
    }

    #[test]
    fn a_part_of_the_kernels_leaves_the_rest() {
        let mut lock = Lock::default();
        lock.update("12.9", target(), &[kernel("a", 32), kernel("b", 40)], true);
        lock.update("12.9", target(), &[kernel("b", 41)], false);
        assert_eq!(lock.targets["sm_86"].len(), 2);
        assert_eq!(lock.targets["sm_86"]["b"].registers, 41);
    }
}

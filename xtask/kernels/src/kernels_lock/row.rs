//! Rows of `kernels.lock`.

use std::collections::BTreeMap;

use qgemm_cuda::{KernelSpec, Resources};

/// Matrix instructions of a kernel by name (`HMMA.16816.F32`),
/// with their number in the code.
pub type Mma = BTreeMap<String, u32>;

/// Registers that a kernel may have more or fewer than the file says. An unrelated
/// change of an epilogue moves that many, and no reviewer looks at them.
const REGISTER_NOISE: u32 = 4;

/// Resources and matrix instructions of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    pub mma: Option<Mma>,
}

impl Row {
    /// The row of `spec` with `resources`.
    pub fn new(spec: &KernelSpec, resources: Resources, mma: Option<Mma>) -> Self {
        Self {
            registers: resources.registers,
            spills: resources.spill_bytes,
            stack: resources.stack_bytes,
            shared: resources.shared_bytes + spec.shared_bytes(),
            mma,
        }
    }

    /// This row, or `now` if it differs by more than noise.
    pub fn unless_changed(self, now: Row) -> Row {
        let (worse, other) = self.changes(&now);
        if worse.is_empty() && other.is_empty() && self.mma.is_some() == now.mma.is_some() { self } else { now }
    }

    /// Regressions in `now`, and other changes.
    pub fn changes(&self, now: &Row) -> (Vec<String>, Vec<String>) {
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

//! Compilation targets: machine code of one chip (`sm_90a`), or PTX
//! (`compute_70`, `compute_90a`).

use std::fmt;
use std::str::FromStr;

use qgemm_hal::Variant;

use crate::arch;
use crate::spec::KernelSpec;

/// Compilation target of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Machine code. Runs on chips of the same major version
    /// and at least this minor version; with `specific`
    /// (`sm_90a`) only on this chip.
    Cubin {
        /// Compute capability, 10 × major + minor.
        arch: u32,
        /// Whether instructions outside the forward-compatible set may be used.
        specific: bool,
    },
    /// PTX, which the driver compiles for the chip: any of at
    /// least this version; with `specific` (`compute_90a`) only this chip.
    Ptx {
        /// Compute capability, 10 × major + minor.
        arch: u32,
        /// Whether instructions outside the forward-compatible set may be used.
        specific: bool,
    },
}

impl Target {
    /// Compute capability, 10 × major + minor.
    pub const fn arch(self) -> u32 {
        match self {
            Target::Cubin { arch, .. } | Target::Ptx { arch, .. } => arch,
        }
    }

    /// Whether the result is PTX.
    pub const fn is_ptx(self) -> bool {
        matches!(self, Target::Ptx { .. })
    }

    /// The target with chip-specific instructions if `specific` asks for them.
    pub(crate) const fn with_specific(self, specific: bool) -> Self {
        match self {
            Target::Cubin { arch, .. } => Target::Cubin { arch, specific },
            Target::Ptx { arch, .. } => Target::Ptx { arch, specific },
        }
    }

    /// Whether the result runs on `chip`.
    pub const fn runs_on(self, chip: u32) -> bool {
        match self {
            Target::Cubin { arch, specific: true } | Target::Ptx { arch, specific: true } => arch == chip,
            Target::Cubin { arch, specific: false } => arch / 10 == chip / 10 && arch <= chip,
            Target::Ptx { arch, specific: false } => arch <= chip,
        }
    }

    /// Whether the target's chip has the shared memory of a launch. PTX is for
    /// later chips, too, which may have more.
    pub fn has_room_for(self, spec: &KernelSpec) -> bool {
        self.is_ptx() || arch::most_shared_of_chip(self.arch()).is_ok_and(|most| spec.shared_bytes() <= most)
    }

    /// Kernel variant that a machine of this architecture uses by default.
    ///
    /// # Errors
    /// A message, for architectures older than `sm_70`.
    pub fn variant(self) -> Result<Variant, String> {
        arch::variant(self.arch())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, arch, specific) = match self {
            Target::Cubin { arch, specific } => ("sm", arch, specific),
            Target::Ptx { arch, specific } => ("compute", arch, specific),
        };
        write!(f, "{kind}_{arch}{}", if *specific { "a" } else { "" })
    }
}

impl FromStr for Target {
    type Err = String;

    /// Parses `sm_86`, `sm_90a`, `compute_70`, `compute_90a`.
    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || format!("`{s}` is no target: expected `sm_86`, `sm_90a` or `compute_70`");
        let (kind, version) = s.split_once('_').ok_or_else(bad)?;
        let digits = version.strip_suffix('a');
        let specific = digits.is_some();
        let arch = digits.unwrap_or(version).parse().map_err(|_| bad())?;
        match kind {
            "compute" => Ok(Target::Ptx { arch, specific }),
            "sm" => Ok(Target::Cubin { arch, specific }),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["sm_70", "sm_86", "sm_90a", "sm_120a", "compute_70", "compute_90a"] {
            assert_eq!(name.parse::<Target>().unwrap().to_string(), name);
        }
        for name in ["90", "sm_", "sm_9x", "compute_90b", "sm_90f", "ptx_90", ""] {
            assert!(name.parse::<Target>().is_err(), "{name}");
        }
    }

    #[test]
    fn code_runs_where_the_driver_takes_it() {
        let runs = |target: &str, chip| target.parse::<Target>().unwrap().runs_on(chip);
        assert!(runs("sm_80", 86) && runs("sm_80", 89) && runs("sm_120", 121));
        assert!(!runs("sm_86", 80) && !runs("sm_80", 90) && !runs("sm_70", 75 + 10));
        assert!(runs("sm_90a", 90) && !runs("sm_120a", 121));
        assert!(runs("compute_70", 90) && !runs("compute_90", 89));
        assert!(runs("compute_90a", 90) && !runs("compute_90a", 100));
    }
}

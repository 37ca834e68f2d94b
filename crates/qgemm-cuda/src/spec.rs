//! [`KernelSpec`]: everything a kernel is compiled from, except the target.

use crate::hash::{self, Hasher, Sha256Hash};
use crate::source;

/// One kernel: an entry source with a prelude of constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// Unique name in errors, traces, bundles, caches and `kernels.lock`. For
    /// kernels that plans launch, the text of a
    /// [`KernelId`](qgemm_hal::KernelId).
    pub name: String,
    /// Name of the entry source, for messages: `entry/sm80_gemm_cp_async.cu`.
    pub entry: &'static str,
    /// Text of the entry source: an embedded one
    /// ([`source::entry`](crate::source)), or one of a test.
    pub text: &'static str,
    /// `extern "C"` name of the kernel.
    pub symbol: &'static str,
    /// C++ text before the source: variant and tile constants.
    pub prelude: String,
    /// Whether it uses instructions that only one chip supports
    /// (`wgmma`, `setmaxnreg`, block-scaled `mma`) and is therefore
    /// compiled for `sm_90a` instead of `sm_90`.
    pub arch_specific: bool,
}

impl KernelSpec {
    /// Dynamic shared memory of a launch in bytes, if the prelude
    /// states it; 0 otherwise.
    pub fn shared_bytes(&self) -> u32 {
        let line =
            |line: &str| line.strip_prefix("constexpr unsigned QG_SHARED_BYTES = ")?.strip_suffix(';')?.parse().ok();
        self.prelude.lines().find_map(line).unwrap_or(0)
    }

    /// Hash of name, entry, symbol and prelude. Included sources and
    /// the target are hashed separately.
    pub fn key(&self) -> Sha256Hash {
        let mut hasher = Hasher::new();
        hasher.field(self.name.as_bytes());
        hasher.field(self.entry.as_bytes());
        hasher.field(self.text.as_bytes());
        hasher.field(self.symbol.as_bytes());
        hasher.field(self.prelude.as_bytes());
        hasher.field(&[u8::from(self.arch_specific)]);
        hasher.finish()
    }

    /// Hash of everything that the kernel is compiled from.
    pub fn source_hash(&self) -> Sha256Hash {
        let mut hasher = Hasher::new();
        hasher.field(&self.key().0);
        hasher.field(&hash::of_sources(source::included(&self.prelude, self.text).into_iter()).0);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_shared_memory_is_read_from_the_prelude() {
        let shared_bytes = |prelude: &str| {
            let (name, prelude) = (String::new(), prelude.to_owned());
            KernelSpec { name, entry: "", text: "", symbol: "", prelude, arch_specific: false }.shared_bytes()
        };
        let prelude =
            "#define A 1\nconstexpr unsigned QG_THREADS = 128;\nconstexpr unsigned QG_SHARED_BYTES = 20512;\n";
        assert_eq!([shared_bytes(prelude), shared_bytes("")], [20512, 0]);
    }
}

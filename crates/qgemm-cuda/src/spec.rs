//! [`KernelSpec`]: what distinguishes one kernel from all others, before it is compiled.

use crate::hash::{self, Hasher, Sha256Hash};
use crate::source;

/// One kernel: an entry source and the constants before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// Unique name: the text of a [`KernelId`](qgemm_hal::KernelId), of kernels that plans launch. Names the kernel in errors,
    /// traces, bundles, caches and `kernels.lock`.
    pub name: String,
    /// Name of the source with the kernel, for messages: `entry/sm80_gemm_cp_async.cu`.
    pub entry: &'static str,
    /// That source: an embedded one ([`source::entry`](crate::source)), or a test's own.
    pub text: &'static str,
    /// The `extern "C"` name of the kernel in it.
    pub symbol: &'static str,
    /// C++ text put before the source: the variant and the tile configuration as constants.
    pub prelude: String,
    /// Whether it uses instructions that only one chip has (`wgmma`, `setmaxnreg`, block-scaled `mma`), so that it is
    /// compiled for `sm_90a` where another would be for `sm_90`.
    pub arch_specific: bool,
}

impl KernelSpec {
    /// Hash of the kernel's own part: name, entry, symbol and prelude. The sources that it includes and the target are
    /// hashed apart.
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

    /// Hash of all that the kernel is compiled from.
    pub fn source_hash(&self) -> Sha256Hash {
        let mut hasher = Hasher::new();
        hasher.field(&self.key().0);
        hasher.field(&hash::of_sources(source::included(&self.prelude, self.text).into_iter()).0);
        hasher.finish()
    }
}

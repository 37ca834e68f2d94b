//! [`KernelSpec`]: what distinguishes one kernel from all others, before it is compiled.

use crate::hash::{Hasher, Sha256Hash};

/// One kernel: an entry source and the constants before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// Unique name, family first: `gemm_nt_q4_k_f16` and the configuration after it. Names the kernel in
    /// errors, traces and `kernels.lock`.
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
    /// Hash of the kernel's own part: entry, symbol and prelude. The sources that it includes and the target are
    /// hashed apart.
    pub fn key(&self) -> Sha256Hash {
        let mut hasher = Hasher::new();
        hasher.field(self.entry.as_bytes());
        hasher.field(self.text.as_bytes());
        hasher.field(self.symbol.as_bytes());
        hasher.field(self.prelude.as_bytes());
        hasher.field(&[u8::from(self.arch_specific)]);
        hasher.finish()
    }
}

//! Capabilities of devices beyond their rates and sizes.

use std::fmt;

macro_rules! features {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Capability of a device, which families ask for
        /// and `qgemm devices` lists.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Feature {
            $($(#[$doc])* $variant,)*
        }

        impl Feature {
            /// Lower-case name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Feature::$variant => $name,)*
                }
            }
        }
    };
}

features! {
    /// x86 AVX2 with FMA and F16C.
    Avx2 = "avx2",
    /// AVX2 with 8-bit dot products.
    AvxVnni = "avx-vnni",
    /// x86 AVX-512 F, BW, DQ and VL.
    Avx512 = "avx512",
    /// AVX-512 with 8-bit dot products.
    Avx512Vnni = "avx512-vnni",
    /// Arm's Advanced SIMD.
    Neon = "neon",
    /// Advanced SIMD with 8-bit dot products.
    NeonDotprod = "neon-dotprod",
    /// CUDA's `dp4a`.
    Dp4a = "dp4a",
    /// `mma` in f16.
    F16Mma = "f16-mma",
    /// `ldmatrix`.
    Ldmatrix = "ldmatrix",
    /// `mma` of signed bytes.
    S8Mma = "s8-mma",
    /// `mma` in bf16.
    Bf16Mma = "bf16-mma",
    /// `cp.async`.
    CpAsync = "cp.async",
    /// `mma` in FP8.
    Fp8Mma = "fp8-mma",
    /// `wgmma`.
    Wgmma = "wgmma",
    /// TMA copies of tiles.
    Tma = "tma",
    /// `mma` with block scales.
    BlockScaledMma = "block-scaled-mma",
    /// Programmatic dependent launch.
    ProgrammaticLaunch = "programmatic-launch",
    /// The chip runs the kernels of an older chip, without its own
    /// matrix instructions (data-centre Blackwell runs Ampere's).
    OlderKernels = "older-kernels",
    /// Kernels are emulated on the host.
    Emulated = "emulated",
    /// A wgpu adapter that runs on the CPU.
    SoftwareAdapter = "software-adapter",
    /// A GPU that shares the host's memory.
    Integrated = "integrated",
    /// Workgroups may have 512 invocations.
    WideWorkgroups = "wide-workgroups",
    /// WGSL's `f16`.
    F16 = "f16",
    /// WGSL's cooperative matrices.
    CooperativeMatrices = "cooperative-matrices",
    /// WGSL's subgroup operations.
    Subgroups = "subgroups",
    /// Timestamps inside encoders.
    Timestamps = "timestamps",
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

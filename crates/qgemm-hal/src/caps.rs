//! What a device is and can do.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::error::HalError;

/// Which backend drives a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DeviceKind {
    /// An NVIDIA GPU through the CUDA driver.
    Cuda,
    /// Any GPU (or software adapter) through wgpu.
    Wgpu,
    /// The host's processor.
    Cpu,
    /// The CUDA kernels of one variant, emulated on the host.
    Emu,
    /// A device that does nothing, for tests of the layers above.
    Noop,
}

impl DeviceKind {
    /// Lower-case name, the part of a device name before the colon.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Cuda => "cuda",
            DeviceKind::Wgpu => "wgpu",
            DeviceKind::Cpu => "cpu",
            DeviceKind::Emu => "emu",
            DeviceKind::Noop => "noop",
        }
    }
}

/// A device by backend and ordinal: `cuda:0`, `emu:sm75`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The backend.
    pub kind: DeviceKind,
    /// Position among the backend's devices; of an emulated device, the number of its variant ([`Variant::number`]).
    pub ordinal: u32,
}

impl DeviceId {
    /// The host's processor.
    pub const CPU: DeviceId = DeviceId { kind: DeviceKind::Cpu, ordinal: 0 };
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Cpu | DeviceKind::Noop => f.write_str(self.kind.name()),
            DeviceKind::Emu => write!(f, "{}:sm{}", self.kind.name(), self.ordinal),
            _ => write!(f, "{}:{}", self.kind.name(), self.ordinal),
        }
    }
}

impl FromStr for DeviceId {
    type Err = HalError;

    /// Parses `cpu`, `noop`, `cuda`, `cuda:1`, `wgpu`, `wgpu:1`, `emu:sm75`.
    fn from_str(s: &str) -> Result<Self, HalError> {
        let bad = || HalError::BadDeviceName { name: s.to_owned() };
        let (name, place) = match s.split_once(':') {
            Some((name, place)) => (name, Some(place)),
            None => (s, None),
        };
        let kinds = [DeviceKind::Cuda, DeviceKind::Wgpu, DeviceKind::Cpu, DeviceKind::Emu, DeviceKind::Noop];
        let kind = kinds.into_iter().find(|k| k.name().eq_ignore_ascii_case(name)).ok_or_else(bad)?;
        let ordinal = match (kind, place) {
            (DeviceKind::Emu, Some(variant)) => variant.parse::<Variant>().map_err(|_| bad())?.number(),
            (DeviceKind::Emu, None) => return Err(bad()),
            (_, Some(ordinal)) => ordinal.parse().map_err(|_| bad())?,
            (_, None) => 0,
        };
        Ok(DeviceId { kind, ordinal })
    }
}

/// The generation of instructions that a CUDA kernel is written for.
///
/// Exhaustive on purpose: what is launched, packed and emulated is decided by it all over the CUDA backend, and the compiler names the
/// places that do not know a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Variant {
    /// Volta: `mma.m8n8k4`, `dp4a`.
    Sm70,
    /// Turing: `mma.m16n8k8`, `ldmatrix`.
    Sm75,
    /// Ampere: `mma.m16n8k16` in f16 and bf16, `cp.async`.
    Sm80,
    /// Ada: fp8 `mma`.
    Sm89,
    /// Hopper: `wgmma`, TMA.
    Sm90,
    /// Consumer Blackwell: block-scaled `mma`.
    Sm120,
}

impl Variant {
    /// All variants, oldest first.
    pub const ALL: [Variant; 6] =
        [Variant::Sm70, Variant::Sm75, Variant::Sm80, Variant::Sm89, Variant::Sm90, Variant::Sm120];

    /// The number in `sm_80`; kernels see it as `QG_VARIANT`.
    pub const fn number(self) -> u32 {
        match self {
            Variant::Sm70 => 70,
            Variant::Sm75 => 75,
            Variant::Sm80 => 80,
            Variant::Sm89 => 89,
            Variant::Sm90 => 90,
            Variant::Sm120 => 120,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm{}", self.number())
    }
}

impl FromStr for Variant {
    type Err = HalError;
    fn from_str(s: &str) -> Result<Self, HalError> {
        let digits = s.trim_start_matches("sm").trim_start_matches('_');
        Variant::ALL
            .into_iter()
            .find(|v| v.number().to_string() == digits)
            .ok_or_else(|| HalError::BadDeviceName { name: s.to_owned() })
    }
}

/// The arithmetic that a kernel's inner loop runs on; the cost model looks up its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Math {
    /// f32 fused multiply-add on the ordinary units.
    FmaF32,
    /// f16 or bf16 matrix instructions with f32 accumulation.
    TensorF16,
    /// TF32 matrix instructions with f32 accumulation.
    TensorTf32,
    /// Three bf16 matrix instructions for one product of f32, with f32 accumulation.
    TensorBf16x3,
    /// 8-bit integer dot products (`dp4a`, VNNI).
    DotI8,
    /// 8-bit integer matrix instructions with s32 accumulation.
    TensorS8,
    /// E4M3 and E5M2 matrix instructions with f32 accumulation.
    TensorFp8,
    /// Matrix instructions that scale blocks of E4M3 or E2M1 operands themselves, with f32 accumulation.
    TensorBlockScaled,
}

impl Math {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Math::FmaF32 => "fma",
            Math::TensorF16 => "tensor",
            Math::TensorTf32 => "tensor_tf32",
            Math::TensorBf16x3 => "tensor_bf16x3",
            Math::DotI8 => "dot",
            Math::TensorS8 => "tensor_s8",
            Math::TensorFp8 => "tensor_fp8",
            Math::TensorBlockScaled => "tensor_block_scaled",
        }
    }
}

/// What a device is and can do. Filled in once when the device is opened.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Which device.
    pub id: DeviceId,
    /// The vendor's name of it.
    pub name: String,
    /// The chip: `sm_90` for CUDA, the API (`vulkan`) for wgpu, the SIMD level for the CPU.
    pub arch: String,
    /// The kernel variant used on it (CUDA only). `QGEMM_VARIANT` lowers it.
    pub variant: Option<Variant>,
    /// Version of the driver or of what compiles kernels; empty where there is none. What was measured with another is not believed.
    pub driver: String,
    /// Streaming multiprocessors, compute units or cores.
    pub units: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Read bandwidth in bytes a second: measured where cheap, else from the clock and bus width.
    pub bandwidth: f64,
    /// Last-level cache in bytes.
    pub cache_bytes: u64,
    /// Shared (workgroup) memory that one block may use, in bytes.
    pub shared_bytes: u32,
    /// Largest buffer that one kernel argument may see, in bytes.
    pub max_buffer_bytes: u64,
    /// Multiply-adds a second by kind of arithmetic; an absent kind is not available.
    pub rates: Vec<(Math, f64)>,
    /// What a launch costs on the device before it does any work, in seconds; on a processor, one that wakes threads.
    pub launch_seconds: f64,
    /// Names of features, for tables and for families to ask about.
    pub features: BTreeSet<&'static str>,
}

impl DeviceInfo {
    /// Multiply-adds a second of `math`, or `None` where the device does not have it.
    pub fn rate(&self, math: Math) -> Option<f64> {
        self.rates.iter().find(|(m, _)| *m == math).map(|&(_, rate)| rate)
    }
}

//! Device identity and capabilities.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use qgemm_formats::DType;

use crate::error::HalError;
use crate::feature::Feature;

/// Backend of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DeviceKind {
    /// NVIDIA GPU through the CUDA driver.
    Cuda,
    /// GPU or software adapter through wgpu.
    Wgpu,
    /// The host CPU.
    Cpu,
    /// CUDA kernels of one variant, emulated on the host.
    Emu,
    /// A device that does nothing, for tests of higher layers.
    Noop,
}

impl DeviceKind {
    /// Lower-case name: the part of a device name before the colon.
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
    /// Index among the backend's devices; for an emulated device, its
    /// variant number ([`Variant::number`]).
    pub ordinal: u32,
}

impl DeviceId {
    /// The host CPU.
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

/// Generation of instructions that a CUDA kernel is written for.
///
/// Exhaustive on purpose: the CUDA backend launches, packs and
/// emulates by variant in many places, and the compiler then
/// names those that lack a new one.
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

    /// The number in `sm_80`; `QG_VARIANT` in kernels.
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

/// Arithmetic of a kernel's inner loop. The cost
/// model looks up its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Math {
    /// f32 FMA without matrix instructions.
    FmaF32,
    /// f16 or bf16 matrix instructions with f32 accumulation.
    TensorF16,
    /// TF32 matrix instructions with f32 accumulation.
    TensorTf32,
    /// f32 as three bf16 matrix instructions with f32 accumulation.
    TensorBf16x3,
    /// 8-bit integer dot products (`dp4a`, VNNI).
    DotI8,
    /// 8-bit integer matrix instructions with s32 accumulation.
    TensorS8,
    /// E4M3 and E5M2 matrix instructions with f32 accumulation.
    TensorFp8,
    /// Block-scaled matrix instructions (E4M3 or E2M1
    /// operands) with f32 accumulation.
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

/// Device identity and capabilities, filled in when the device is opened.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The device.
    pub id: DeviceId,
    /// The vendor's device name.
    pub name: String,
    /// Chip: `sm_90` for CUDA, the API (`vulkan`) for wgpu,
    /// the SIMD level for the CPU.
    pub arch: String,
    /// Kernel variant in use (CUDA only). `QGEMM_VARIANT` lowers it.
    pub variant: Option<Variant>,
    /// Version of the driver or of the kernel compiler; empty without
    /// one. Measurements with another version are ignored.
    pub driver: String,
    /// SMs, compute units or cores.
    pub units: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Read bandwidth in bytes per second: measured where that is cheap,
    /// else computed from clock and bus width.
    pub bandwidth: f64,
    /// Last-level cache in bytes.
    pub cache_bytes: u64,
    /// Maximum shared (workgroup) memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// Maximum buffer of one kernel argument in bytes.
    pub max_buffer_bytes: u64,
    /// Multiply-adds per second by kind of arithmetic. A
    /// missing kind is not supported.
    pub rates: Vec<(Math, f64)>,
    /// Latency of a launch in seconds, before it does any work.
    /// On a CPU, of a launch that wakes threads.
    pub launch_seconds: f64,
    /// Capabilities, for tables and for queries by families.
    pub features: BTreeSet<Feature>,
}

impl DeviceInfo {
    /// Multiply-adds per second of `math`, or `None` when the
    /// device does not support it.
    pub fn rate(&self, math: Math) -> Option<f64> {
        self.rates.iter().find(|(m, _)| *m == math).map(|&(_, rate)| rate)
    }

    /// Matrix instructions that multiply operands of `dtype`, if the
    /// device has them.
    pub fn matrix_math(&self, dtype: DType) -> Option<Math> {
        let least = match dtype {
            DType::F32 => return None,
            DType::F16 => Variant::Sm70,
            DType::BF16 => Variant::Sm80,
        };
        self.variant.filter(|&variant| variant >= least).map(|_| Math::TensorF16)
    }
}

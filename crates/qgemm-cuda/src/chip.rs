//! Chip properties by compute capability: kernel variant, rates, features.

use std::collections::BTreeSet;

use cudarc::driver::{result, sys};
use qgemm_hal::{DeviceId, DeviceInfo, DeviceKind, Feature, HalError, Math, Variant};

use crate::arch;
use crate::driver;
use crate::target::Target;

/// Lowers the kernel variant of every device: `QGEMM_VARIANT=sm70`.
const VARIANT_VARIABLE: &str = "QGEMM_VARIANT";

/// Share of the theoretical memory bandwidth that a read-only kernel
/// reaches (measured on an H200).
const READ_FRACTION: f64 = 0.91;

/// Chips that NVRTC 12.9 compiles machine code
/// for. Later chips run PTX.
const COMPILED_FOR: [u32; 12] = [70, 72, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121];

/// A device before a context is opened.
#[derive(Clone, Debug)]
pub(crate) struct Chip {
    /// Compute capability, 10 × major + minor.
    pub arch: u32,
    /// Kernel variant in use. It is below the chip's variant
    /// when the user lowered it.
    pub variant: Variant,
    /// Whether the user lowered it.
    pub lowered: bool,
    /// Device info for higher layers.
    pub info: DeviceInfo,
}

impl Chip {
    /// Compilation target of this device's kernels: its machine code; or PTX
    /// when the user lowered the variant (so that the driver compiles
    /// the older instructions) or the chip is newer than the compiler.
    pub(crate) fn target(&self) -> Target {
        match self.lowered || !COMPILED_FOR.contains(&self.arch) {
            true => Target::Ptx { arch: self.variant.number(), specific: false },
            false => Target::Cubin { arch: self.arch, specific: false },
        }
    }
}

/// Reads device `ordinal` from the driver, without opening a context.
pub(crate) fn read(ordinal: u32) -> Result<Chip, HalError> {
    let id = DeviceId { kind: DeviceKind::Cuda, ordinal };
    let fail = |call, e| HalError::Driver { device: id, call, message: driver::describe(e) };
    let device = result::device::get(ordinal as i32).map_err(|e| fail("cuDeviceGet", e))?;
    let name = result::device::get_name(device).map_err(|e| fail("cuDeviceGetName", e))?;
    // SAFETY: `device` was just returned by the driver.
    let memory_bytes = unsafe { result::device::total_mem(device) }.map_err(|e| fail("cuDeviceTotalMem", e))? as u64;
    let attribute = |attribute| {
        // SAFETY: `device` was just returned by the driver.
        unsafe { result::device::get_attribute(device, attribute) }
            .map(|v| u32::try_from(v).unwrap_or(0))
            .map_err(|e| fail("cuDeviceGetAttribute", e))
    };
    use sys::CUdevice_attribute_enum as A;
    let arch = 10 * attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
        + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let natural = arch::variant(arch).map_err(|why| HalError::NoDevice { device: id.to_string(), why })?;
    let wanted = std::env::var(VARIANT_VARIABLE).ok();
    let variant = lower(id, natural, wanted.as_deref())?;
    let lowered = variant != natural;

    let memory_clock = f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?) * 1e3;
    let bus_bytes = f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?) / 8.0;
    let numbers = ChipNumbers {
        name: &name,
        arch,
        units: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        clock: f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?) * 1e3,
        // Double data rate.
        bandwidth: 2.0 * memory_clock * bus_bytes,
        shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    };
    let info = DeviceInfo {
        driver: driver::version(),
        memory_bytes,
        cache_bytes: u64::from(attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        max_buffer_bytes: memory_bytes,
        features: features(arch, variant, lowered),
        ..numbers.info_as(id, variant)
    };
    Ok(Chip { arch, variant, lowered, info })
}

/// Numbers of a chip's data sheet that decide plans.
#[derive(Clone, Copy, Debug)]
pub struct ChipNumbers<'a> {
    /// Device name. Chips named GeForce accumulate in f32 at half rate.
    pub name: &'a str,
    /// Compute capability, 10 × major + minor.
    pub arch: u32,
    /// Multiprocessors.
    pub units: u32,
    /// Clock in Hz.
    pub clock: f64,
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Maximum shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

impl ChipNumbers<'_> {
    /// Description of such a device named `id`, without memory and
    /// features.
    ///
    /// # Errors
    /// When no kernels exist for the compute capability.
    pub fn info(&self, id: DeviceId) -> Result<DeviceInfo, String> {
        Ok(self.info_as(id, arch::variant(self.arch)?))
    }

    /// The description of a device that runs kernels of `variant`.
    fn info_as(&self, id: DeviceId, variant: Variant) -> DeviceInfo {
        let Self { name, arch, units, clock, bandwidth, shared_bytes } = *self;
        let rate = |(math, per_clock)| (math, per_clock * f64::from(units) * clock);
        DeviceInfo {
            id,
            name: name.to_owned(),
            arch: format!("sm_{arch}"),
            variant: Some(variant),
            driver: String::new(),
            units,
            memory_bytes: 0,
            bandwidth: bandwidth * READ_FRACTION,
            cache_bytes: 0,
            shared_bytes,
            max_buffer_bytes: 0,
            rates: rates(arch, variant, name.contains("GeForce")).map(rate).to_vec(),
            launch_seconds: 3e-6,
            features: BTreeSet::new(),
        }
    }
}

/// The variant that the user requested, if
/// the chip can run it.
fn lower(id: DeviceId, natural: Variant, wanted: Option<&str>) -> Result<Variant, HalError> {
    let Some(wanted) = wanted.filter(|w| !w.is_empty()) else { return Ok(natural) };
    let refuse = |why: String| HalError::Unsupported { device: id, what: format!("{VARIANT_VARIABLE}={wanted}"), why };
    let variant: Variant =
        wanted.parse().map_err(|_| refuse("expected one of sm70, sm75, sm80, sm89, sm90, sm120".into()))?;
    // Each variant's instructions exist on all later chips, except Hopper's.
    if variant > natural || (variant == Variant::Sm90 && natural != Variant::Sm90) {
        return Err(refuse(format!("the device runs {natural} kernels and those of older chips")));
    }
    Ok(variant)
}

/// Share of Hopper's tensor rate that `mma.sync`
/// reaches (measured on an H200).
pub(crate) const HOPPER_MMA_SYNC: f64 = 0.66;

/// Multiply-adds per clock and SM of a chip that runs kernels
/// of variant `run`, with f32 accumulation and without sparsity.
///
/// Sources: "Arithmetic Instructions" of the CUDA programming guide, and
/// the tensor-core rates of NVIDIA's architecture papers.
fn rates(arch: u32, run: Variant, geforce: bool) -> [(Math, f64); 8] {
    let fma = match arch {
        70..=80 => 64.0,
        _ => 128.0,
    };
    let tensor = match arch {
        70..75 => 512.0,
        // GeForce cards accumulate in f32 at half rate.
        75 | 86..=89 | 120..=121 => 512.0 / if geforce { 2.0 } else { 1.0 },
        90 => 2048.0,
        _ => 1024.0,
    };
    let tensor = match run {
        // On newer chips `mma.m8n8k4` is emulated by other instructions.
        Variant::Sm70 if arch >= 80 => fma,
        Variant::Sm75 | Variant::Sm80 | Variant::Sm89 if arch == 90 => tensor * HOPPER_MMA_SYNC,
        _ => tensor,
    };
    // FP8 has twice the 16-bit rate, if supported.
    let fp8 = if run >= Variant::Sm89 { 2.0 * tensor } else { tensor };
    // INT8 has full rate on GeForce cards; Volta lacks it.
    let bytes = match (arch, run) {
        (..75, _) | (_, Variant::Sm70) => 0.0,
        (75 | 86..=89 | 120..=121, _) => 1024.0,
        (90, Variant::Sm90) => 4096.0,
        (90, _) => 4096.0 * HOPPER_MMA_SYNC,
        _ => 2048.0,
    };
    [
        (Math::FmaF32, fma),
        (Math::TensorF16, tensor),
        // TF32 has half the 16-bit rate, with `mma.sync`.
        (Math::TensorTf32, if run < Variant::Sm80 { 0.0 } else { 0.5 * tensor }),
        // Three products for each result.
        (Math::TensorBf16x3, if run < Variant::Sm80 { 0.0 } else { tensor / 3.0 }),
        (Math::DotI8, 256.0),
        (Math::TensorFp8, fp8),
        (Math::TensorS8, bytes),
        // FP4 has full rate on GeForce cards, too.
        (Math::TensorBlockScaled, if run >= Variant::Sm120 { 2048.0 } else { 0.0 }),
    ]
}

/// Instructions that kernels of `variant` may use.
fn features(arch: u32, variant: Variant, lowered: bool) -> BTreeSet<Feature> {
    let mut features = BTreeSet::from([Feature::Dp4a, Feature::F16Mma]);
    if variant >= Variant::Sm75 {
        features.extend([Feature::Ldmatrix, Feature::S8Mma]);
    }
    if variant >= Variant::Sm80 {
        features.extend([Feature::Bf16Mma, Feature::CpAsync]);
    }
    if variant >= Variant::Sm89 {
        features.insert(Feature::Fp8Mma);
    }
    if variant == Variant::Sm90 {
        features.extend([Feature::Wgmma, Feature::Tma]);
    }
    if variant == Variant::Sm120 {
        features.insert(Feature::BlockScaledMma);
    }
    if arch >= 90 && !lowered {
        features.insert(Feature::ProgrammaticLaunch);
    }
    if arch::runs_older_kernels(arch) {
        features.insert(Feature::OlderKernels);
    }
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_can_be_lowered_but_not_raised() {
        let id = DeviceId { kind: DeviceKind::Cuda, ordinal: 0 };
        assert_eq!(lower(id, Variant::Sm90, None).unwrap(), Variant::Sm90);
        assert_eq!(lower(id, Variant::Sm90, Some("")).unwrap(), Variant::Sm90);
        assert_eq!(lower(id, Variant::Sm90, Some("sm70")).unwrap(), Variant::Sm70);
        assert_eq!(lower(id, Variant::Sm120, Some("89")).unwrap(), Variant::Sm89);
        for (natural, wanted) in [(Variant::Sm75, "sm80"), (Variant::Sm120, "sm90"), (Variant::Sm90, "volta")] {
            let error = lower(id, natural, Some(wanted)).unwrap_err();
            assert!(matches!(error, HalError::Unsupported { .. }), "{error}");
        }
    }

    #[test]
    fn kernels_are_compiled_for_the_chip_or_as_ptx() {
        let target = |arch, wanted: Option<Variant>| {
            let natural = arch::variant(arch).unwrap();
            let variant = wanted.unwrap_or(natural);
            let id = DeviceId { kind: DeviceKind::Cuda, ordinal: 0 };
            let info = DeviceInfo {
                id,
                name: String::new(),
                arch: format!("sm_{arch}"),
                variant: Some(variant),
                driver: String::new(),
                units: 1,
                memory_bytes: 0,
                bandwidth: 0.0,
                cache_bytes: 0,
                shared_bytes: 0,
                max_buffer_bytes: 0,
                rates: Vec::new(),
                launch_seconds: 0.0,
                features: BTreeSet::new(),
            };
            Chip { arch, variant, lowered: variant != natural, info }.target().to_string()
        };
        assert_eq!(target(86, None), "sm_86");
        assert_eq!(target(90, None), "sm_90");
        assert_eq!(target(90, Some(Variant::Sm70)), "compute_70");
        assert_eq!(target(130, None), "compute_80", "newer than the compiler");
    }

    #[test]
    fn matrix_instructions_of_older_variants_are_no_faster() {
        let tensor = |arch, run| rates(arch, run, false)[1].1;
        assert!(tensor(90, Variant::Sm80) < tensor(90, Variant::Sm90));
        assert!(tensor(90, Variant::Sm70) < tensor(90, Variant::Sm75));
        assert_eq!(tensor(75, Variant::Sm70), tensor(75, Variant::Sm75));
        assert_eq!(tensor(89, Variant::Sm80), tensor(89, Variant::Sm89));
    }

    #[test]
    fn features_follow_the_variant() {
        assert!(!features(90, Variant::Sm70, true).contains(&Feature::Bf16Mma));
        assert!(features(90, Variant::Sm90, false).contains(&Feature::Wgmma));
        assert!(!features(100, Variant::Sm80, false).contains(&Feature::Wgmma));
        assert!(!features(120, Variant::Sm120, false).contains(&Feature::Wgmma));
        let runs_older = |arch| features(arch, arch::variant(arch).unwrap(), false).contains(&Feature::OlderKernels);
        for arch in [70, 75, 80, 86, 87, 89, 90, 120, 121] {
            assert!(!runs_older(arch), "sm_{arch}");
        }
        assert!(runs_older(100) && runs_older(103) && runs_older(110));
    }
}

//! The real chip that each emulated device represents, for realistic plans.

use std::collections::BTreeSet;

use qgemm_hal::{DeviceId, DeviceInfo, DeviceKind, Feature, Math, Variant};

/// Chip properties that decide plans.
struct Chip {
    variant: Variant,
    name: &'static str,
    units: u32,
    /// Maximum shared memory of a CTA ("Technical Specifications per Compute
    /// Capability", CUDA programming guide).
    shared_kib: u32,
    /// Bandwidth in bytes per second, and clock in Hz
    /// (NVIDIA's data sheets).
    bandwidth: f64,
    clock: f64,
    /// Multiply-adds per clock and SM: f32 FMA, and f16 tensor cores
    /// (NVIDIA's architecture papers).
    fma: f64,
    tensor: f64,
}

/// One chip for each variant.
const CHIPS: [Chip; 6] = [
    chip(Variant::Sm70, "Tesla V100", 80, 96, 0.9e12, 1.53e9, 64.0, 512.0),
    chip(Variant::Sm75, "Tesla T4", 40, 64, 0.32e12, 1.59e9, 64.0, 512.0),
    chip(Variant::Sm80, "A100", 108, 163, 1.55e12, 1.41e9, 64.0, 1024.0),
    chip(Variant::Sm89, "L40", 142, 99, 0.86e12, 2.49e9, 128.0, 512.0),
    chip(Variant::Sm90, "H100", 132, 227, 3.35e12, 1.83e9, 128.0, 2048.0),
    chip(Variant::Sm120, "GeForce RTX 5090", 170, 99, 1.79e12, 2.41e9, 128.0, 256.0),
];

#[expect(clippy::too_many_arguments, reason = "a row of the table above")]
const fn chip(
    variant: Variant,
    name: &'static str,
    units: u32,
    shared_kib: u32,
    bandwidth: f64,
    clock: f64,
    fma: f64,
    tensor: f64,
) -> Chip {
    Chip { variant, name, units, shared_kib, bandwidth, clock, fma, tensor }
}

/// Device info of the emulated `variant`.
pub(crate) fn info(variant: Variant) -> DeviceInfo {
    let known = CHIPS.iter().find(|c| c.variant == variant);
    let chip = known.unwrap_or(&CHIPS[0]);
    let rate = |per_clock: f64| per_clock * f64::from(chip.units) * chip.clock;
    DeviceInfo {
        id: DeviceId { kind: DeviceKind::Emu, ordinal: variant.number() },
        name: format!("{} (emulated)", chip.name),
        arch: format!("sm_{}", variant.number()),
        variant: Some(variant),
        driver: String::new(),
        units: chip.units,
        memory_bytes: 8 << 30,
        bandwidth: chip.bandwidth,
        cache_bytes: 4 << 20,
        shared_bytes: chip.shared_kib * 1024,
        max_buffer_bytes: 8 << 30,
        rates: vec![
            (Math::FmaF32, rate(chip.fma)),
            (Math::TensorF16, rate(chip.tensor)),
            (Math::TensorTf32, if variant < Variant::Sm80 { 0.0 } else { rate(0.5 * chip.tensor) }),
            (Math::TensorBf16x3, if variant < Variant::Sm80 { 0.0 } else { rate(chip.tensor / 3.0) }),
            (Math::DotI8, rate(4.0 * chip.fma)),
            (Math::TensorFp8, rate(2.0 * chip.tensor)),
            (Math::TensorBlockScaled, if variant == Variant::Sm120 { rate(8.0 * chip.tensor) } else { 0.0 }),
            (Math::TensorS8, if variant == Variant::Sm70 { 0.0 } else { rate(2.0 * chip.tensor) }),
        ],
        launch_seconds: 3e-6,
        features: BTreeSet::from([Feature::Emulated]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_its_chip() {
        for variant in Variant::ALL {
            assert_eq!(info(variant).variant, Some(variant));
            assert_eq!(info(variant).id.to_string(), format!("emu:{variant}"));
            assert!(CHIPS.iter().any(|c| c.variant == variant), "{variant}");
        }
    }
}

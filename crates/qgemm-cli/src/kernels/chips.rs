//! Chips of the grid: every kernel variant, with many and few
//! multiprocessors (NVIDIA's data sheets).

use qgemm_api::emu::ChipNumbers;

/// Chips, by variant.
pub const CHIPS: [ChipNumbers<'static>; 16] = [
    chip("V100", 70, 80, 96, 0.9e12, 1.53e9),
    chip("T4", 75, 40, 64, 0.32e12, 1.59e9),
    chip("GeForce RTX 2080 Ti", 75, 68, 64, 0.616e12, 1.545e9),
    chip("A100", 80, 108, 163, 2.04e12, 1.41e9),
    chip("A30", 80, 56, 163, 0.933e12, 1.44e9),
    chip("GeForce RTX 3090", 86, 82, 99, 0.936e12, 1.695e9),
    chip("GeForce RTX 3060", 86, 28, 99, 0.36e12, 1.777e9),
    chip("A10", 86, 72, 99, 0.6e12, 1.695e9),
    chip("GeForce RTX 4090", 89, 128, 99, 1.008e12, 2.52e9),
    chip("L40", 89, 142, 99, 0.864e12, 2.49e9),
    chip("L4", 89, 58, 99, 0.3e12, 2.04e9),
    chip("H100 PCIe", 90, 114, 227, 2.04e12, 1.755e9),
    chip("H200", 90, 132, 227, 4.9e12, 1.83e9),
    chip("GeForce RTX 5090", 120, 170, 99, 1.792e12, 2.41e9),
    chip("GeForce RTX 5060 Ti", 120, 36, 99, 0.448e12, 2.57e9),
    chip("GB10", 121, 48, 99, 0.273e12, 2.4e9),
];

const fn chip(name: &str, arch: u32, units: u32, shared_kib: u32, bandwidth: f64, clock: f64) -> ChipNumbers<'_> {
    ChipNumbers { name, arch, units, clock, bandwidth, shared_bytes: shared_kib << 10 }
}

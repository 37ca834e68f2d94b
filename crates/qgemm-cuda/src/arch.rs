//! Properties that follow from the compute capability: kernel variant,
//! fragment layout, shared memory.

use qgemm_formats::prepack::FragmentLayout;
use qgemm_hal::{DeviceInfo, Unsupported, Variant};

/// Kernel variant of compute capability `arch`. Chips without a matching
/// variant use the newest one whose instructions they support: data-centre
/// Blackwell has neither `wgmma` nor block-scaled `mma.sync`.
pub(crate) fn variant(arch: u32) -> Result<Variant, String> {
    match arch {
        0..70 => Err(format!("compute capability {}.{} is older than 7.0", arch / 10, arch % 10)),
        70..75 => Ok(Variant::Sm70),
        75..80 => Ok(Variant::Sm75),
        89 => Ok(Variant::Sm89),
        90 => Ok(Variant::Sm90),
        120 | 121 => Ok(Variant::Sm120),
        _ => Ok(Variant::Sm80),
    }
}

/// Whether no variant has the chip's own matrix instructions.
pub(crate) fn runs_older_kernels(arch: u32) -> bool {
    arch >= 100 && variant(arch) == Ok(Variant::Sm80)
}

/// Fragment layout that kernels of `variant` read.
pub fn fragment_layout(variant: Variant) -> FragmentLayout {
    if variant == Variant::Sm70 { FragmentLayout::MmaM8N8K4 } else { FragmentLayout::MmaM16 }
}

/// Maximum dynamic shared memory of a CTA (CUDA C Programming Guide,
/// "Technical Specifications per Compute Capability").
pub(crate) fn most_shared(variant: Variant) -> u32 {
    match variant {
        Variant::Sm70 => 96 << 10,
        Variant::Sm75 => 64 << 10,
        Variant::Sm80 => 163 << 10,
        Variant::Sm90 => 227 << 10,
        Variant::Sm89 | Variant::Sm120 => 99 << 10,
    }
}

/// As [`most_shared`], for the chips of compute capability `arch`:
/// GeForce chips of Ampere have less than an A100.
pub(crate) fn most_shared_of_chip(arch: u32) -> Result<u32, String> {
    let variant = variant(arch)?;
    Ok(most_shared(if arch == 86 { Variant::Sm89 } else { variant }))
}

/// Checks that a CTA may use `needs` bytes of shared memory.
pub(crate) fn check_shared(needs: u32, info: &DeviceInfo) -> Result<(), Unsupported> {
    let has = info.shared_bytes;
    match needs <= has {
        true => Ok(()),
        false => Err(Unsupported::new(format!("needs {needs} bytes of shared memory, of which the device has {has}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chip_has_its_variant() {
        let table = [(70, 70), (72, 70), (75, 75), (80, 80), (86, 80), (87, 80), (89, 89), (90, 90)];
        for (arch, number) in table.into_iter().chain([(100, 80), (103, 80), (110, 80), (120, 120), (121, 120)]) {
            assert_eq!(variant(arch).unwrap().number(), number, "sm_{arch}");
        }
        assert!(variant(61).unwrap_err().contains("6.1"));
    }
}

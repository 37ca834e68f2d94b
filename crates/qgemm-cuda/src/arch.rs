//! What follows from a compute capability alone: the variant of kernels, and what kernels of a variant can count on.

use qgemm_formats::prepack::FragmentLayout;
use qgemm_hal::{DeviceInfo, Unsupported, Variant};

/// The kernel variant of compute capability `arch`. Chips without a variant of their own use the newest one
/// whose instructions they have: data centre Blackwell has neither `wgmma` nor block-scaled `mma.sync`.
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

/// The layout class that kernels of `variant` read.
pub fn fragment_layout(variant: Variant) -> FragmentLayout {
    if variant == Variant::Sm70 { FragmentLayout::MmaM8N8K4 } else { FragmentLayout::MmaM16 }
}

/// Most dynamic shared memory of a CTA (CUDA C Programming Guide, "Technical Specifications per Compute Capability").
pub(crate) fn most_shared(variant: Variant) -> u32 {
    match variant {
        Variant::Sm70 => 96 << 10,
        Variant::Sm75 => 64 << 10,
        Variant::Sm80 => 163 << 10,
        Variant::Sm90 => 227 << 10,
        Variant::Sm89 | Variant::Sm120 => 99 << 10,
    }
}

/// Whether the device has so many bytes of shared memory for a CTA.
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

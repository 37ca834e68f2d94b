//! [`Shares`]: what a kernel reaches of a chip's rates, where that was measured on another one.

use qgemm_hal::{DeviceInfo, Math, Variant};

use crate::chip::HOPPER_MMA_SYNC;

/// What the shares of arithmetic and bandwidth that a kernel states are shares of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::families) enum Shares {
    /// The chip's own rates.
    OfChip,
    /// What `mma.sync` reaches on an H200, and that card's bandwidth. Whatever stands beside matrix instructions takes as many cycles on
    /// other chips, whose matrix instructions take more of them; and as many bytes are under way, which is a larger share of less bandwidth.
    OfMmaSync,
}

/// An H200's bytes a second for each multiprocessor.
const BANDWIDTH_OF_UNIT: f64 = 4.47e12 / 132.0;
/// What kernels reach of a bandwidth that their copies could exceed.
const MOST_BANDWIDTH: f64 = 920.0;

impl Shares {
    /// The same, `(arithmetic, bandwidth)` per mille, of the rates of the chip that `info` describes.
    pub fn on(self, (arithmetic, bandwidth): (u32, u32), math: Math, info: &DeviceInfo) -> (u32, u32) {
        match (self, info.rate(math), info.rate(Math::DotI8)) {
            (Shares::OfMmaSync, Some(rate), Some(issued)) => {
                (arithmetic_on(f64::from(arithmetic), math, rate / issued, info) as u32, bandwidth_on(bandwidth, info))
            }
            _ => (arithmetic, bandwidth),
        }
    }
}

/// Of a rate that is `ratio` times that of `dp4a`, of which each chip issues as many a clock.
fn arithmetic_on(share: f64, math: Math, ratio: f64, info: &DeviceInfo) -> f64 {
    /// Multiply-adds a clock of an H200's multiprocessor by `wgmma` in f16, of bytes twice as many, and of any chip's by `dp4a`.
    const WGMMA: f64 = 2048.0;
    const DP4A: f64 = 256.0;
    let measured = HOPPER_MMA_SYNC * WGMMA / DP4A * if math == Math::TensorF16 { 1.0 } else { 2.0 };
    let of_wgmma = if info.variant == Some(Variant::Sm90) { HOPPER_MMA_SYNC } else { 1.0 };
    // Cycles beside those of the instructions, as a multiple of these.
    let beside = (1000.0 / share.max(1.0) - 1.0).max(0.0) * ratio * of_wgmma / measured;
    1000.0 / (1.0 + beside) * of_wgmma
}

fn bandwidth_on(share: u32, info: &DeviceInfo) -> u32 {
    let wider = BANDWIDTH_OF_UNIT * f64::from(info.units.max(1)) / info.bandwidth;
    (f64::from(share) * wider.max(1.0)).min(MOST_BANDWIDTH).max(f64::from(share)) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use qgemm_hal::{DeviceId, DeviceKind};

    use super::*;

    /// A chip whose matrix instructions multiply so often a clock, with a multiprocessor that runs at 1 Hz.
    fn chip(variant: Variant, tensor: f64, bandwidth: f64) -> DeviceInfo {
        DeviceInfo {
            id: DeviceId { kind: DeviceKind::Cuda, ordinal: 0 },
            name: String::new(),
            arch: String::new(),
            variant: Some(variant),
            driver: String::new(),
            units: 1,
            memory_bytes: 0,
            bandwidth,
            cache_bytes: 0,
            shared_bytes: 0,
            max_buffer_bytes: 0,
            rates: vec![(Math::TensorF16, tensor), (Math::DotI8, 256.0)],
            launch_seconds: 0.0,
            features: BTreeSet::new(),
        }
    }

    #[test]
    fn those_of_an_h200_stay_as_they_are() {
        let h200 = |variant, tensor| chip(variant, tensor, BANDWIDTH_OF_UNIT);
        let native = h200(Variant::Sm90, 2048.0);
        let (arithmetic, bandwidth) = Shares::OfMmaSync.on((500, 600), Math::TensorF16, &native);
        assert!(arithmetic.abs_diff((500.0 * HOPPER_MMA_SYNC) as u32) <= 1, "{arithmetic}");
        assert!(bandwidth.abs_diff(600) <= 1, "{bandwidth}");
        let as_sm80 = Shares::OfMmaSync.on((500, 600), Math::TensorF16, &h200(Variant::Sm80, 2048.0 * HOPPER_MMA_SYNC));
        assert!(as_sm80.0.abs_diff(500) <= 1, "{as_sm80:?}");
        assert_eq!(Shares::OfChip.on((500, 600), Math::TensorF16, &native), (500, 600));
    }

    #[test]
    fn slower_matrix_instructions_hide_more_of_what_stands_beside_them() {
        let on = |tensor| Shares::OfMmaSync.on((300, 500), Math::TensorF16, &chip(Variant::Sm80, tensor, 1e12)).0;
        assert!(on(256.0) > on(1024.0) && on(1024.0) > on(1351.0), "{} {}", on(256.0), on(1024.0));
        assert!(on(1.0) > 990 && on(1.0) <= 1000);
    }

    #[test]
    fn less_bandwidth_is_reached_to_a_larger_share() {
        let on = |share, bandwidth| {
            Shares::OfMmaSync.on((300, share), Math::TensorF16, &chip(Variant::Sm80, 1024.0, bandwidth)).1
        };
        assert_eq!(on(500, BANDWIDTH_OF_UNIT / 1.5), 750);
        assert_eq!(on(500, BANDWIDTH_OF_UNIT / 4.0), MOST_BANDWIDTH as u32);
        assert_eq!(on(950, BANDWIDTH_OF_UNIT / 4.0), 950);
        assert_eq!(on(500, BANDWIDTH_OF_UNIT * 2.0), 500);
    }
}

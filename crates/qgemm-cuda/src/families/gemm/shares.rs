//! [`Shares`]: reference rates of a kernel's efficiency, for chips other than the measured one.

use qgemm_hal::{DeviceInfo, Math, Variant};

use crate::chip::HOPPER_MMA_SYNC;

/// Reference rates of a kernel's efficiency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::families) enum Shares {
    /// The rates of the chip that it runs on.
    OfChip,
    /// `mma.sync` and the bandwidth of an H200.
    ///
    /// On other chips, instructions beside `mma` take as many cycles, while
    /// `mma` itself takes more. Bytes in flight are the same, which
    /// is a larger share of a lower bandwidth.
    OfMmaSync,
}

/// Bandwidth of an H200 per SM, in bytes per second.
const BANDWIDTH_OF_UNIT: f64 = 4.47e12 / 132.0;
/// Maximum share of the bandwidth, for kernels whose
/// copies could exceed it.
const MOST_BANDWIDTH: f64 = 920.0;

impl Shares {
    /// Converts `(arithmetic, bandwidth)`, per mille, to shares of
    /// the rates of the chip `info`.
    pub fn on(self, (arithmetic, bandwidth): (u32, u32), math: Math, info: &DeviceInfo) -> (u32, u32) {
        match (self, info.rate(math), info.rate(Math::DotI8)) {
            (Shares::OfMmaSync, Some(rate), Some(issued)) => {
                (arithmetic_on(f64::from(arithmetic), math, rate / issued, info) as u32, bandwidth_on(bandwidth, info))
            }
            _ => (arithmetic, bandwidth),
        }
    }
}

/// For a rate `ratio` times that of `dp4a`, which every chip
/// issues equally often per clock.
fn arithmetic_on(share: f64, math: Math, ratio: f64, info: &DeviceInfo) -> f64 {
    /// Multiply-adds per clock and SM: `wgmma` in f16 on an H200
    /// (twice as many for bytes), and `dp4a` on any chip.
    const WGMMA: f64 = 2048.0;
    const DP4A: f64 = 256.0;
    let measured = HOPPER_MMA_SYNC * WGMMA / DP4A * if math == Math::TensorF16 { 1.0 } else { 2.0 };
    let of_wgmma = if info.variant == Some(Variant::Sm90) { HOPPER_MMA_SYNC } else { 1.0 };
    // Cycles beside `mma`, relative to the cycles of `mma`.
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

    /// A chip with `tensor` matrix multiply-adds per
    /// clock and SM, at 1 Hz.
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

//! The read bandwidth as the roof of measurements, and why a share of it
//! exceeds 100 %.

use anyhow::Context as _;
use qgemm_api::{Context, DeviceKind};
use serde::{Deserialize, Serialize};

/// Least bytes that a CPU rotates through. Its last-level cache
/// may be shared, and reported in part.
pub const HOST_BYTES: usize = 1 << 30;

/// Why a measurement is faster than the read bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AboveRoof {
    /// The operands of all copies fit the caches.
    InCache,
    /// The bandwidth is an estimate, or was measured while other work ran.
    RoofTooLow,
}

impl AboveRoof {
    /// The cause of a share of the read bandwidth, for launches that
    /// rotate through so many bytes. `None` up to 100 %.
    pub fn of(ctx: &Context, share: f64, rotated_bytes: f64) -> Option<Self> {
        let info = ctx.info();
        // The caches of a CPU are not known.
        let caches = match info.id.kind {
            DeviceKind::Cpu => (2 * info.cache_bytes).max(HOST_BYTES as u64 / 2),
            _ => 2 * info.cache_bytes,
        };
        match share > 1.0 {
            true if rotated_bytes <= caches as f64 => Some(Self::InCache),
            true => Some(Self::RoofTooLow),
            false => None,
        }
    }
}

/// A share of the read bandwidth as text. A share above 100 % is no
/// number, but its cause.
pub fn share_text(share: f64, above: Option<AboveRoof>) -> String {
    match above {
        Some(AboveRoof::InCache) => "in cache".to_owned(),
        Some(AboveRoof::RoofTooLow) => "> roof".to_owned(),
        // Results of earlier versions do not state the cause.
        None if share > 1.0 => "> roof".to_owned(),
        None => format!("{:.1}%", share * 100.0),
    }
}

/// Read bandwidth in bytes per second: measured if possible,
/// otherwise as the device reports it.
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn read_bandwidth(ctx: &Context) -> anyhow::Result<f64> {
    const PROBE_BYTES: usize = 2 << 30;
    match ctx.info().id.kind {
        DeviceKind::Cuda => Ok(qgemm_api::cuda::read_bandwidth(&**ctx.device(), PROBE_BYTES)?),
        DeviceKind::Cpu => {
            let measured = qgemm_api::cpu::read_bandwidth(ctx.info().units as usize, HOST_BYTES);
            let cores = ctx.info().units;
            let expected =
                || format!("measuring the read bandwidth: expected {HOST_BYTES} bytes of memory and {cores} threads");
            measured.with_context(expected)
        }
        _ => Ok(ctx.info().bandwidth),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_share_above_the_roof_is_a_number() {
        let ctx = Context::open("cpu").expect("always there");
        let text = |share, bytes| share_text(share, AboveRoof::of(&ctx, share, bytes));
        assert_eq!(text(0.994, 1e6), "99.4%");
        assert_eq!([text(1.47, 1e6), text(1.47, 1e12)], ["in cache", "> roof"]);
        assert_eq!(share_text(1.47, None), "> roof");
    }
}

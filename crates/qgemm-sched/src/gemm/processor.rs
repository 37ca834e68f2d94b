//! Cost model of CPUs, where threads take tiles dynamically
//! ([`Schedule::Threads`](qgemm_hal::Schedule::Threads)).
//!
//! CPU kernels do not multiply padding. Waking the threads can
//! cost more than a small product.

use qgemm_hal::{CheckedGemm, DeviceInfo, Operation, TileConfig};

use super::bound::{Cost, ROOFLINE_P, efficiency};

/// Bytes per second that one core reads. Two to four
/// cores saturate most memories.
const CORE_BANDWIDTH: f64 = 2e10;
/// Seconds that a core needs to convert one value of
/// X (f32 to int8 blocks).
const X_VALUE: f64 = 3e-10;
/// Seconds that a thread needs to start and
/// finish a tile (one token).
const TILE: f64 = 2e-7;

/// Expected cost of a launch, with all units at `rate`.
pub fn cost(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, rate: f64) -> Cost {
    let threads = f64::from(config.threads.max(1));
    let count = |len: usize, tile: u32| len.div_ceil(tile.max(1) as usize) as f64;
    let tiles = count(op.stored_rows, config.tile_n) * count(op.m, config.tile_m);
    let tasks = tiles * f64::from(config.k_groups.max(1));
    // Average number of busy threads until the last one finishes.
    let busy = tasks / (tasks / threads).ceil().max(1.0);
    let macs = op.stored_rows as f64 * op.m as f64 * op.stored_k as f64;
    let core_rate = rate / f64::from(info.units.max(1)) * efficiency(config.efficiency.0);
    let values = op.m as f64 * op.k as f64;
    let math = macs / core_rate / busy;
    // No separate launch: the threads convert X as they go.
    let prologue = values * X_VALUE / threads.min(values.max(1.0));
    let tiles = tasks * TILE / busy;
    let memory = op.traffic() / info.bandwidth.min(threads * CORE_BANDWIDTH);
    let launch = if config.threads > 1 { info.launch_seconds } else { 0.0 };
    let busy = math + prologue + tiles;
    let seconds = launch + (busy.powf(ROOFLINE_P) + memory.powf(ROOFLINE_P)).powf(1.0 / ROOFLINE_P);
    Cost { tiles, prologue, ..Cost::of_parts(memory, math, launch, seconds) }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::{Math, Schedule};

    use super::*;
    use crate::gemm::select::tests::{config, info, op};

    fn seconds(m: usize, n: usize, k: usize, threads: u32, tile_m: u32) -> f64 {
        let units = 16;
        let (rates, launch_seconds) = (vec![(Math::DotI8, 16.0 * 1.6e11)], 1e-5);
        let info = DeviceInfo { units, bandwidth: 2e11, rates, launch_seconds, ..info() };
        let config = TileConfig { tile_n: 64, tile_m, threads, schedule: Schedule::Threads, ..config("gemm_int8") };
        cost(&op(m, n, k), &info, &config, info.rates[0].1).seconds
    }

    #[test]
    fn small_products_are_not_worth_waking_threads() {
        assert!(seconds(1, 384, 384, 1, 1) < seconds(1, 384, 384, 16, 1));
        assert!(seconds(1, 4096, 4096, 1, 1) > 2.0 * seconds(1, 4096, 4096, 16, 1));
        assert!(seconds(64, 1536, 384, 1, 64) > 2.0 * seconds(64, 1536, 384, 16, 64));
    }

    #[test]
    fn what_only_fills_up_a_tile_costs_nothing() {
        // One token more than a tile holds: a remainder
        // tile, or two even tiles.
        let (large, even) = (seconds(257, 4096, 4096, 1, 256), seconds(257, 4096, 4096, 1, 132));
        assert!((large / even - 1.0).abs() < 0.01, "{large} {even}");
    }

    #[test]
    fn few_tiles_leave_threads_idle() {
        let (one, sixteen) = (seconds(256, 64, 4096, 16, 256), seconds(256, 64, 4096, 16, 16));
        assert!(one > 3.0 * sixteen, "{one} {sixteen}");
    }
}

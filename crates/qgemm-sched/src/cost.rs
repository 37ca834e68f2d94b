//! The cost model: a roofline over whole waves of blocks.

use qgemm_hal::{CheckedGemm, DeviceInfo, TileConfig};

use crate::partition::Partition;

/// Share of a device's block slots that suffices to saturate its memory: loads of a block overlap, so fewer
/// blocks than slots still draw the full bandwidth.
const SATURATING_SHARE: f64 = 0.5;
/// Cost of meeting at a split tile's counter, as a share of a launch.
const FIXUP_LAUNCHES: f64 = 0.5;

/// Seconds that `partition` of `op` is expected to take on a device, or `None` when the device lacks the
/// configuration's arithmetic.
pub fn estimate(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> Option<f64> {
    let rate = info.rate(config.math)?;
    let waves = Waves::new(info, config, partition);
    let time = f64::max(arithmetic(info, config, partition, &waves, rate), memory(op, info, config, &waves));
    Some(time + fixup(info, config, partition) + info.launch_seconds)
}

/// How blocks fill the device: `full` waves of `slots` blocks, then `rest` blocks.
struct Waves {
    slots: f64,
    full: f64,
    rest: f64,
}

impl Waves {
    fn new(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> Self {
        let slots = f64::from(info.units.max(1)) * f64::from(config.blocks_per_unit.max(1));
        let full = (partition.blocks() / slots).floor();
        Self { slots, full, rest: partition.blocks() - full * slots }
    }
}

/// Time of the multiply-adds, padding included. Blocks that share a unit share its rate.
fn arithmetic(info: &DeviceInfo, config: &TileConfig, partition: &Partition, waves: &Waves, rate: f64) -> f64 {
    let units = f64::from(info.units.max(1));
    let [.., splits] = partition.grid();
    let steps = f64::from(partition.k_steps().div_ceil(splits));
    let block_macs = f64::from(config.tile_n) * f64::from(config.tile_m) * f64::from(config.tile_k) * steps;
    let blocks_of_a_unit = waves.full * f64::from(config.blocks_per_unit.max(1)) + (waves.rest / units).ceil();
    blocks_of_a_unit * block_macs * units / (rate * efficiency(config.efficiency.0))
}

/// Time of the operands' traffic: full waves at full bandwidth, the rest at what so few blocks can draw.
fn memory(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, waves: &Waves) -> f64 {
    let blocks = waves.full * waves.slots + waves.rest;
    let block_seconds = op.bytes() / blocks / (info.bandwidth * efficiency(config.efficiency.1));
    let drawn = (waves.rest / (waves.slots * SATURATING_SHARE)).clamp(f64::MIN_POSITIVE, 1.0);
    block_seconds * (waves.full * waves.slots + waves.rest / drawn)
}

/// Time of writing, meeting at and adding up the partial sums of split tiles.
fn fixup(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    let layout = partition.workspace_layout();
    if layout.bytes == 0 {
        return 0.0;
    }
    let traffic = 2.0 * (layout.bytes - layout.partials) as f64 / (info.bandwidth * efficiency(config.efficiency.1));
    traffic + FIXUP_LAUNCHES * info.launch_seconds
}

fn efficiency(per_mille: u32) -> f64 {
    f64::from(per_mille.max(1)) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::tests::{config, info, op};

    fn seconds(m: usize, n: usize, k: usize, config: &TileConfig, splits: u32) -> f64 {
        let op = op(m, n, k);
        let partition = Partition::new(&op, config, splits).expect("small");
        estimate(&op, &info(), config, &partition).expect("has the arithmetic")
    }

    #[test]
    fn a_tall_problem_is_bound_by_arithmetic_and_grows_with_m() {
        let c = TileConfig { tile_m: 64, tile_n: 64, ..config("gemm") };
        let (once, twice) = (seconds(4096, 4096, 4096, &c, 1), seconds(8192, 4096, 4096, &c, 1));
        assert!((1.9..2.1).contains(&(twice / once)), "{once} {twice}");
    }

    #[test]
    fn a_single_token_is_bound_by_memory() {
        let c = TileConfig { tile_m: 1, tile_n: 8, ..config("gemv") };
        let expected = op(1, 8192, 4096).bytes() / info().bandwidth;
        let got = seconds(1, 8192, 4096, &c, 1) - info().launch_seconds;
        assert!((0.9..1.2).contains(&(got / expected)), "{got} {expected}");
    }

    #[test]
    fn splitting_helps_a_grid_that_leaves_units_idle_only() {
        let c = TileConfig { tile_m: 16, tile_n: 64, max_splits: 8, ..config("gemm") };
        assert!(seconds(16, 128, 16384, &c, 8) < seconds(16, 128, 16384, &c, 1));
        assert!(seconds(512, 4096, 4096, &c, 8) > seconds(512, 4096, 4096, &c, 1));
    }

    #[test]
    fn padding_costs() {
        let wide = TileConfig { tile_m: 64, ..config("gemm") };
        let narrow = TileConfig { tile_m: 8, ..config("gemm") };
        assert!(seconds(8, 65536, 4096, &narrow, 1) < seconds(8, 65536, 4096, &wide, 1));
    }
}

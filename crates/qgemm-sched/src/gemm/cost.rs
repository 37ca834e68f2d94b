//! Cost model of GEMM.
//!
//! CTAs run phases one after another. Each phase is bound by
//! arithmetic or by memory. Starting tiles and adding the partial
//! sums of split tiles costs extra.

use qgemm_hal::{CheckedGemm, DeviceInfo, Math, Operation, Schedule, TileConfig, Variant};

use super::blocks::Blocks;
use super::bound::{Cost, ROOFLINE_P, efficiency};
use super::partition::{Partition, Phase};
use super::processor;

/// Speed of partial sums relative to memory: they
/// stay in the L2 cache.
const CACHE_FACTOR: f64 = 1.5;
/// Launch cost of a norm before the product that waits for
/// it, in launches. The first weight loads of the product
/// hide a part of the launch.
const NORM_LAUNCHES: f64 = 0.35;
/// Seconds that a CTA with a fused norm needs before its
/// first product: for the first pass over the row, and for
/// each further pass. A thread reads `STATISTICS_BYTES` in each pass
/// (fitted on an H200, one token).
const STATISTICS_SECONDS: [f64; 2] = [0.9e-6, 3e-6];
const STATISTICS_BYTES: f64 = 64.0;

/// Expected seconds of `partition` of `op`, or `None` when the device
/// lacks the config's arithmetic.
pub fn estimate(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> Option<f64> {
    cost(op, info, config, partition).map(|cost| cost.seconds)
}

/// Expected cost of `partition` of `op`, or `None` when the device
/// lacks the config's arithmetic.
pub fn cost(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> Option<Cost> {
    let rate = info.rate(config.math)?;
    if config.schedule == Schedule::Threads {
        return Some(processor::cost(op, info, config, rate));
    }
    if streams_rows(config) {
        return Some(of_streamed_rows(op, info, config, partition, rate));
    }
    let phases = partition.phases();
    let steps: f64 = phases.iter().map(Phase::steps).sum();
    // Rows of W that are re-read for other tokens come from
    // the L2 cache. They are no faster there: bytes in
    // flight limit the traffic.
    let again = f64::from(partition.m_tiles().saturating_sub(1)) * cached_rows(info, config, partition);
    let all_bytes = op.traffic() + op.weight_bytes() * again;
    let fixup = fixup(info, config, partition);
    let prologue = x_prologue(op, info, partition) + norm_of_x(op, info, config, partition);
    let mut cost = Cost { fixup, prologue, ..Cost::of_parts(0.0, 0.0, info.launch_seconds, 0.0) };
    for (place, phase) in phases.iter().enumerate() {
        let waves = Waves::new(info, config, phase);
        let bytes = all_bytes * phase.steps() / steps;
        let (math, tiles) = (arithmetic(info, config, phase, &waves, rate), tiles(info, config, phase, &waves));
        let (busy, memory) =
            (overlapping(math + tiles, latency(config, phase, &waves)), memory(bytes, info, config, &waves));
        cost.math += math;
        cost.tiles += tiles;
        cost.memory += memory;
        cost.seconds += overlapping(busy, memory);
        if place == 0 && partition.cuts_tiles() {
            cost.fixup += Blocks::of(config).cut_share * math;
        }
    }
    cost.seconds += cost.fixup + prologue + info.launch_seconds;
    Some(cost)
}

/// Largest N tile of a persistent grid that streams W in
/// memory order, with all of X resident in each CTA.
const STREAMED_ROWS: u32 = 16;

/// Speed at which X reaches all CTAs, relative to
/// W from memory. X loads overlap W loads (fitted
/// on an H200 with FP8).
const STREAMED_X_FACTOR: f64 = 2.0;

/// Cost of an idle CTA slot in the last round, as
/// a fraction of a busy one. The busy CTAs use the
/// bandwidth of idle ones.
const LAST_ROUND_IDLE: f64 = 0.3;

/// Whether CTAs stream rows of W past a resident X.
fn streams_rows(config: &TileConfig) -> bool {
    config.schedule == Schedule::StreamK && config.tile_n <= STREAMED_ROWS && config.k_groups > 1
}

/// Cost of such a grid: each CTA waits for X, then
/// runs its tiles in sequence.
fn of_streamed_rows(
    op: &CheckedGemm,
    info: &DeviceInfo,
    config: &TileConfig,
    partition: &Partition,
    rate: f64,
) -> Cost {
    let slots = f64::from(info.units.max(1));
    let tiles = blocks(partition);
    let waves = tiles / slots;
    let rounds = waves + LAST_ROUND_IDLE * (waves.ceil() - waves);
    let tile_bytes = op.weight_bytes() / tiles;
    let memory = rounds * slots * tile_bytes / (info.bandwidth * efficiency(config.efficiency.1));
    let x = slots.min(tiles) * op.m as f64 * op.x_row_bytes() / (STREAMED_X_FACTOR * info.bandwidth);
    let step_macs = f64::from(config.tile_n) * f64::from(config.tile_m) * f64::from(config.tile_k);
    let math = rounds * slots * step_macs * f64::from(partition.k_tiles()) / (rate * efficiency(config.efficiency.0));
    let prologue = x_prologue(op, info, partition) + norm_of_x(op, info, config, partition);
    let seconds = info.launch_seconds + prologue + x + overlapping(math, memory);
    Cost { tiles: x, prologue, ..Cost::of_parts(memory, math, info.launch_seconds, seconds) }
}

/// Combined time of two phases that overlap imperfectly.
pub(crate) fn overlapping(a: f64, b: f64) -> f64 {
    (a.powf(ROOFLINE_P) + b.powf(ROOFLINE_P)).powf(1.0 / ROOFLINE_P)
}

/// Time that CTAs wait for copies. The CTAs of a
/// wave wait concurrently.
fn latency(config: &TileConfig, phase: &Phase, waves: &Waves) -> f64 {
    let of = Blocks::of(config);
    let stages_a_tile = of.latency_columns.map_or(1.0, |columns| f64::from(config.tile_k) / f64::from(columns));
    let turns = (phase.steps_a_block / f64::from(config.k_groups)).ceil() * stages_a_tile;
    waves.count() * turns * of.latency / f64::from(config.stages.saturating_sub(1).max(1))
}

/// Cost of re-reading a W tile for other tokens, as a
/// fraction of the first read.
fn cached_rows(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    let is_one_wave = blocks(partition) <= slots(info, config);
    Blocks::of(config).cached_rows[usize::from(!is_one_wave)]
}

/// CTAs of all phases.
fn blocks(partition: &Partition) -> f64 {
    partition.phases().iter().map(|phase| phase.blocks).sum()
}

/// CTAs that the device runs concurrently.
fn slots(info: &DeviceInfo, config: &TileConfig) -> f64 {
    places(info, config) * f64::from(config.ctas_per_unit.max(1))
}

/// Units, or groups of units: a cluster
/// counts as one CTA here.
fn places(info: &DeviceInfo, config: &TileConfig) -> f64 {
    f64::from((info.units / config.cluster.max(1)).max(1))
}

/// CTA occupancy: `full` waves of `slots` CTAs, then `rest` CTAs.
struct Waves {
    slots: f64,
    full: f64,
    rest: f64,
}

impl Waves {
    fn new(info: &DeviceInfo, config: &TileConfig, phase: &Phase) -> Self {
        let slots = slots(info, config);
        let full = (phase.blocks / slots).floor();
        Self { slots, full, rest: phase.blocks - full * slots }
    }

    fn count(&self) -> f64 {
        self.full + if self.rest > 0.0 { 1.0 } else { 0.0 }
    }
}

/// Time of the multiply-adds, padding included. CTAs on one unit
/// share its rate. A unit with fewer CTAs than it can
/// hold does not reach the full rate.
fn arithmetic(info: &DeviceInfo, config: &TileConfig, phase: &Phase, waves: &Waves, rate: f64) -> f64 {
    let units = places(info, config);
    let step_macs = f64::from(config.tile_n) * f64::from(config.tile_m) * f64::from(config.tile_k);
    let room = f64::from(config.ctas_per_unit.max(1));
    let rest = (waves.rest / units).ceil();
    let Blocks { underfill, arithmetic: reached, .. } = *Blocks::of(config);
    let ctas_of_a_unit = waves.full * room + if rest > 0.0 { rest * (room / rest).powf(underfill) } else { 0.0 };
    ctas_of_a_unit * step_macs * phase.steps_a_block * units / (rate * reached * efficiency(config.efficiency.0))
}

/// Time of the operand traffic: full waves at full bandwidth, the
/// rest at the bandwidth that so few CTAs reach.
fn memory(bytes: f64, info: &DeviceInfo, config: &TileConfig, waves: &Waves) -> f64 {
    let blocks = waves.full * waves.slots + waves.rest;
    let block_seconds = bytes / blocks / (info.bandwidth * efficiency(config.efficiency.1));
    let drawn = (waves.rest / (waves.slots * Blocks::of(config).saturating)).clamp(f64::MIN_POSITIVE, 1.0);
    block_seconds * (waves.full * waves.slots + waves.rest / drawn)
}

/// Time of starting and finishing tiles. The CTA multiplies nothing
/// then, but other CTAs of the unit do.
fn tiles(info: &DeviceInfo, config: &TileConfig, phase: &Phase, waves: &Waves) -> f64 {
    Blocks::of(config).tile_launches * info.launch_seconds * waves.count() * phase.tiles_a_block
        / f64::from(config.ctas_per_unit.max(1))
}

/// Time of the split-K fix-up: writing, waiting for and adding
/// partial sums. Concurrent CTAs each reduce one tile and read
/// the partial sums of its peers.
fn fixup(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    let peers = partition.peers();
    if peers < 2 {
        return 0.0;
    }
    // Hopper's 8-bit kernels keep no peer's sums in registers, and all
    // peers write at the same time. That doubles the traffic.
    let on_hopper = config.variant == Some(Variant::Sm90);
    let passes = if on_hopper && matches!(config.math, Math::TensorFp8 | Math::TensorS8) { 2.0 } else { 1.0 };
    let tile_bytes = passes * f64::from(config.tile_n) * f64::from(config.tile_m) * 4.0;
    let slots = slots(info, config);
    let block_rate = CACHE_FACTOR * info.bandwidth / slots;
    let restarts = match config.schedule {
        Schedule::StreamK | Schedule::Threads => 0.0,
        Schedule::Grid => partition.phases().iter().map(|phase| (phase.blocks / slots).ceil() - 1.0).sum(),
    };
    // CTAs of the split phase run in waves when
    // they exceed the slots.
    let waves = partition.phases().iter().map(|phase| phase.blocks / slots).fold(0.0, f64::max);
    let Blocks { fixup_factor, fixup_launches: [meeting, of_full], restart_launches, .. } = *Blocks::of(config);
    let meeting = meeting + of_full * waves.min(1.0) + restart_launches * restarts;
    fixup_factor * (waves.max(1.0) * f64::from(peers) * tile_bytes / block_rate + meeting * info.launch_seconds)
}

/// Time of the X prologue: it reads X and
/// writes the padded copy.
fn x_prologue(op: &CheckedGemm, info: &DeviceInfo, partition: &Partition) -> f64 {
    let layout = partition.workspace_layout();
    let Some(region) = layout.x else { return 0.0 };
    let read = op.m as f64 * op.x_row_bytes();
    info.launch_seconds + (read + (layout.bytes - region.x) as f64) / info.bandwidth
}

/// Time of normalizing X: in a separate launch that
/// reads and writes X, or fused, where each CTA
/// reads its rows once more.
fn norm_of_x(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    match op.norm {
        None => 0.0,
        Some(_) if config.normalizes_x => {
            let waves = (blocks(partition) / slots(info, config)).ceil();
            let rows = op.m.min(config.tile_m as usize) as f64;
            let turns = (rows * op.x_row_bytes() / f64::from(config.threads.max(1)) / STATISTICS_BYTES).ceil();
            let [first, further] = STATISTICS_SECONDS;
            waves * (first + further * (turns - 1.0))
        }
        Some(_) => NORM_LAUNCHES * info.launch_seconds + 2.0 * op.m as f64 * op.x_row_bytes() / info.bandwidth,
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::XPrologue;

    use super::*;
    use crate::gemm::select::tests::{config, info, op};
    use crate::gemm::{Bound, Cut};

    fn seconds(m: usize, n: usize, k: usize, config: &TileConfig, splits: u32) -> f64 {
        let op = op(m, n, k);
        let slots = info().units * config.ctas_per_unit;
        let partition = Partition::new(&op, config, Cut::Parts(splits), slots).expect("small");
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
        let expected = op(1, 8192, 4096).traffic() / info().bandwidth;
        let got = seconds(1, 8192, 4096, &c, 1) - info().launch_seconds;
        assert!((0.9..1.2).contains(&(got / expected)), "{got} {expected}");
    }

    #[test]
    fn streamed_rows_take_the_time_of_their_bytes_and_of_x() {
        let c = TileConfig { tile_n: 16, tile_m: 8, k_groups: 8, schedule: Schedule::StreamK, ..config("gemm") };
        let own = |m, n| seconds(m, n, 4096, &c, 1) - info().launch_seconds;
        let units = info().units as usize;
        let rounds = |count: usize| own(1, 16 * units * count);
        // CTAs wait for X once.
        assert!((3.5..4.0).contains(&(rounds(8) / rounds(2))), "{} {}", rounds(2), rounds(8));
        // One more row tile starts a round, which costs
        // less than a full round.
        let (whole, one_more, next) = (rounds(2), own(1, 16 * (2 * units + 1)), rounds(3));
        assert!(whole < one_more && one_more < next, "{whole} {one_more} {next}");
        assert!(own(1, 16 * units) < own(8, 16 * units));
        let converts = TileConfig { x_prologue: Some(XPrologue::Convert { row_factors: false }), ..c };
        assert!(seconds(1, 14336, 4096, &converts, 1) > seconds(1, 14336, 4096, &c, 1) + info().launch_seconds);
    }

    #[test]
    fn a_persistent_grid_waits_for_its_stages_where_few_are_under_way() {
        let c = TileConfig { tile_m: 64, schedule: Schedule::StreamK, stages: 2, ..config("gemm") };
        let two = seconds(64, 512, 16384, &c, 1);
        let eight = seconds(64, 512, 16384, &TileConfig { stages: 8, ..c }, 1);
        assert!(two > 2.0 * eight, "{two} {eight}");
        // A k-tile of twice the width takes two stages.
        let wide = seconds(64, 512, 16384, &TileConfig { tile_k: 128, ..c }, 1);
        assert!((wide / two - 1.0).abs() < 0.1, "{wide} {two}");
    }

    #[test]
    fn a_persistent_grid_reads_rows_again_from_the_cache() {
        let grid = TileConfig { tile_m: 64, tile_n: 64, ..config("gemm") };
        let persistent = TileConfig { schedule: Schedule::StreamK, stages: 8, ..grid };
        let memory = |m, c: &TileConfig| {
            let op = op(m, 8192, 4096);
            let partition = Partition::new(&op, c, Cut::NONE, info().units * c.ctas_per_unit).expect("small");
            cost(&op, &info(), c, &partition).expect("has the arithmetic").memory
        };
        let more = |c| memory(512, c) / memory(64, c);
        assert!(more(&persistent) < 0.6 * more(&grid), "{} {}", more(&persistent), more(&grid));
    }

    #[test]
    fn splitting_helps_a_grid_that_leaves_units_idle_only() {
        let c = TileConfig { tile_m: 16, tile_n: 64, max_splits: 8, ..config("gemm") };
        assert!(seconds(16, 128, 16384, &c, 8) < seconds(16, 128, 16384, &c, 1));
        assert!(seconds(512, 4096, 4096, &c, 8) > seconds(512, 4096, 4096, &c, 1));
    }

    #[test]
    fn a_prologue_costs_a_launch_and_its_traffic() {
        let direct = config("gemm");
        let converts = TileConfig { x_prologue: Some(XPrologue::Convert { row_factors: true }), ..direct };
        let more = seconds(4096, 4096, 4096, &converts, 1) - seconds(4096, 4096, 4096, &direct, 1);
        let traffic = 4096.0 * (4096.0 * 4.0 + 4.0) / info().bandwidth;
        assert!((more / (info().launch_seconds + traffic) - 1.0).abs() < 1e-9, "{more}");
    }

    #[test]
    fn the_bound_is_the_part_that_takes_longest() {
        let bound = |m, c: &TileConfig, splits| {
            let op = op(m, 4096, 4096);
            let partition = Partition::new(&op, c, Cut::Parts(splits), 264).expect("small");
            let cost = cost(&op, &info(), c, &partition).expect("has the arithmetic");
            assert_eq!(Some(cost.seconds), estimate(&op, &info(), c, &partition));
            assert!(cost.seconds <= cost.math + cost.memory + cost.tiles + cost.fixup + cost.prologue + cost.launch);
            cost.bound()
        };
        let gemv = TileConfig { tile_m: 1, tile_n: 8, ..config("gemv") };
        assert_eq!(bound(1, &gemv, 1), Bound::Memory);
        assert_eq!(bound(4096, &TileConfig { tile_m: 64, ..config("gemm") }, 1), Bound::Math);
    }

    #[test]
    fn padding_costs() {
        let wide = TileConfig { tile_m: 64, ..config("gemm") };
        let narrow = TileConfig { tile_m: 8, ..config("gemm") };
        assert!(seconds(8, 65536, 4096, &narrow, 1) < seconds(8, 65536, 4096, &wide, 1));
    }
}

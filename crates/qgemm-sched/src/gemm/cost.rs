//! The cost model: what blocks do one after another, each phase bound by arithmetic or by memory, and what it costs to
//! begin tiles and to add up those that are cut.

use qgemm_hal::{CheckedGemm, DeviceInfo, Math, Operation, Schedule, TileConfig, Variant};
use serde::{Deserialize, Serialize};

use super::blocks::Blocks;
use super::partition::{Partition, Phase};
use super::processor;

/// How much faster partial sums pass between blocks than data comes from memory: they stay in the last-level cache.
const CACHE_FACTOR: f64 = 1.5;
/// The roofline's p-norm: where arithmetic and memory take the same time, they take `2^(1/4)` of it
/// together, for they do not overlap perfectly. Measured kernels have such a bend, too, and without the norm the choice
/// jumps to and fro where two configurations cross.
pub(super) const ROOFLINE_P: f64 = 4.0;

/// What the launch of a norm costs before a product that waits for it, as a share of a launch (measured on an H200: 1.0 to 1.2 µs, of which the
/// product's first weights hide a part).
const NORM_LAUNCHES: f64 = 0.35;
/// Seconds that a block which normalizes X itself needs before its first product, and more for each time that its threads read again, of
/// which each reads so many bytes at once (measured on an H200, one token: 0.6 to 1.2 µs for up to 64 bytes, 2.5 to 4.4 for 80 to 128).
const STATISTICS_SECONDS: [f64; 2] = [0.9e-6, 3e-6];
const STATISTICS_BYTES: f64 = 64.0;

/// What the cost model expects of a launch, by what takes the time, in seconds. Arithmetic and memory overlap, so that the parts add up
/// to more than the whole.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cost {
    /// Multiply-adds, padding included.
    pub math: f64,
    /// Traffic of the operands.
    pub memory: f64,
    /// Beginning and ending tiles.
    pub tiles: f64,
    /// Writing, meeting at and adding up the partial sums of cut tiles.
    pub fixup: f64,
    /// The launch that makes the kernel's X.
    pub prologue: f64,
    /// The launch itself.
    pub launch: f64,
    /// All of it.
    pub seconds: f64,
}

/// What a launch is bound by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Bound {
    /// Traffic of the operands.
    Memory,
    /// Multiply-adds.
    Math,
    /// Beginning and ending tiles.
    Tiles,
    /// Adding up partial sums.
    Fixup,
    /// The launch that makes the kernel's X.
    Prologue,
    /// The launch itself.
    Launch,
}

impl Bound {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Math => "math",
            Bound::Tiles => "tiles",
            Bound::Fixup => "fixup",
            Bound::Prologue => "prologue",
            Bound::Launch => "launch",
        }
    }
}

impl Cost {
    /// The cost of an operation that only moves `memory` seconds of bytes and multiplies for `math` seconds, both at once.
    pub fn of_parts(memory: f64, math: f64, launch: f64, seconds: f64) -> Self {
        Self { math, memory, tiles: 0.0, fixup: 0.0, prologue: 0.0, launch, seconds }
    }

    /// The cost of `count` of these, one after the other, that are launched together.
    pub fn repeated(self, count: usize) -> Self {
        let times = |seconds: f64| seconds * count as f64;
        Self {
            math: times(self.math),
            memory: times(self.memory),
            tiles: times(self.tiles),
            fixup: times(self.fixup),
            prologue: times(self.prologue),
            launch: self.launch,
            seconds: self.launch + times(self.seconds - self.launch),
        }
    }

    /// The part that takes longest; among equals the one that is named first.
    pub fn bound(&self) -> Bound {
        let Self { math, memory, tiles, fixup, prologue, launch, .. } = *self;
        let rest = [
            (Bound::Math, math),
            (Bound::Tiles, tiles),
            (Bound::Fixup, fixup),
            (Bound::Prologue, prologue),
            (Bound::Launch, launch),
        ];
        rest.into_iter().fold((Bound::Memory, memory), |most, part| if part.1 > most.1 { part } else { most }).0
    }
}

/// Seconds that `partition` of `op` is expected to take on a device, or `None` when the device lacks the
/// configuration's arithmetic.
pub fn estimate(op: &CheckedGemm, info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> Option<f64> {
    cost(op, info, config, partition).map(|cost| cost.seconds)
}

/// What `partition` of `op` is expected to cost on a device, or `None` when the device lacks the configuration's arithmetic.
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
    // Rows of W that blocks read for other tokens come from the last-level cache, at no higher rate: what limits a kernel's
    // traffic is how much of it is under way (measured on an H200, 8 and 16 tokens a tile).
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

/// Most rows of a tile of a persistent grid whose blocks stream W in the order of memory, each with all of X that it needs.
const STREAMED_ROWS: u32 = 16;

/// How much faster X comes to all of them than W comes from memory, which it does while W is on its way (measured on an H200: 8 and 16 tokens
/// of 14336 x 4096 in FP8 took 1.1 and 2.1 µs longer than one).
const STREAMED_X_FACTOR: f64 = 2.0;

/// What blocks without a tile in the last round cost of what they would with one: the others draw more of the bandwidth meanwhile.
const LAST_ROUND_IDLE: f64 = 0.3;

/// Whether blocks stream rows of W past an X that they keep.
fn streams_rows(config: &TileConfig) -> bool {
    config.schedule == Schedule::StreamK && config.tile_n <= STREAMED_ROWS && config.k_groups > 1
}

/// The cost of such blocks: each waits for X, and then its tiles come one after another.
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

/// The time of two things that overlap, but not perfectly.
pub(crate) fn overlapping(a: f64, b: f64) -> f64 {
    (a.powf(ROOFLINE_P) + b.powf(ROOFLINE_P)).powf(1.0 / ROOFLINE_P)
}

/// Time in which blocks wait for copies: those of a wave do so at the same time.
fn latency(config: &TileConfig, phase: &Phase, waves: &Waves) -> f64 {
    let of = Blocks::of(config);
    let stages_a_tile = of.latency_columns.map_or(1.0, |columns| f64::from(config.tile_k) / f64::from(columns));
    let turns = (phase.steps_a_block / f64::from(config.k_groups)).ceil() * stages_a_tile;
    waves.count() * turns * of.latency / f64::from(config.stages.saturating_sub(1).max(1))
}

/// What it costs to read rows of W once more, for other tokens, of what it costs the first time.
fn cached_rows(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    let is_one_wave = blocks(partition) <= slots(info, config);
    Blocks::of(config).cached_rows[usize::from(!is_one_wave)]
}

/// Blocks of all phases.
fn blocks(partition: &Partition) -> f64 {
    partition.phases().iter().map(|phase| phase.blocks).sum()
}

/// Blocks that the device has room for at a time.
fn slots(info: &DeviceInfo, config: &TileConfig) -> f64 {
    places(info, config) * f64::from(config.ctas_per_unit.max(1))
}

/// Units, or groups of so many units as a cluster takes, which is a block here.
fn places(info: &DeviceInfo, config: &TileConfig) -> f64 {
    f64::from((info.units / config.cluster.max(1)).max(1))
}

/// How blocks fill the device: `full` waves of `slots` blocks, then `rest` blocks.
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

/// Time of the multiply-adds, padding included. Blocks that share a unit share its rate; fewer than have room there do not
/// reach all of it.
fn arithmetic(info: &DeviceInfo, config: &TileConfig, phase: &Phase, waves: &Waves, rate: f64) -> f64 {
    let units = places(info, config);
    let step_macs = f64::from(config.tile_n) * f64::from(config.tile_m) * f64::from(config.tile_k);
    let room = f64::from(config.ctas_per_unit.max(1));
    let rest = (waves.rest / units).ceil();
    let Blocks { underfill, arithmetic: reached, .. } = *Blocks::of(config);
    let ctas_of_a_unit = waves.full * room + if rest > 0.0 { rest * (room / rest).powf(underfill) } else { 0.0 };
    ctas_of_a_unit * step_macs * phase.steps_a_block * units / (rate * reached * efficiency(config.efficiency.0))
}

/// Time of the operands' traffic: full waves at full bandwidth, the rest at what so few blocks can draw.
fn memory(bytes: f64, info: &DeviceInfo, config: &TileConfig, waves: &Waves) -> f64 {
    let blocks = waves.full * waves.slots + waves.rest;
    let block_seconds = bytes / blocks / (info.bandwidth * efficiency(config.efficiency.1));
    let drawn = (waves.rest / (waves.slots * Blocks::of(config).saturating)).clamp(f64::MIN_POSITIVE, 1.0);
    block_seconds * (waves.full * waves.slots + waves.rest / drawn)
}

/// Time of beginning and ending tiles, in which a block multiplies nothing, but others of the same unit do.
fn tiles(info: &DeviceInfo, config: &TileConfig, phase: &Phase, waves: &Waves) -> f64 {
    Blocks::of(config).tile_launches * info.launch_seconds * waves.count() * phase.tiles_a_block
        / f64::from(config.ctas_per_unit.max(1))
}

/// Time of writing, meeting at and adding up the partial sums of a split tile. As many as there are blocks at a time are added up at
/// the same time, each by one block, which reads those of the others.
fn fixup(info: &DeviceInfo, config: &TileConfig, partition: &Partition) -> f64 {
    let peers = partition.peers();
    if peers < 2 {
        return 0.0;
    }
    // Hopper's kernels on codes of eight bits keep no peer's sums in registers, and all write while others do: 17 us and not 9 us, measured
    // on an H200 for 512 tokens of 14336 x 4096.
    let on_hopper = config.variant == Some(Variant::Sm90);
    let passes = if on_hopper && matches!(config.math, Math::TensorFp8 | Math::TensorS8) { 2.0 } else { 1.0 };
    let tile_bytes = passes * f64::from(config.tile_n) * f64::from(config.tile_m) * 4.0;
    let slots = slots(info, config);
    let block_rate = CACHE_FACTOR * info.bandwidth / slots;
    let restarts = match config.schedule {
        Schedule::StreamK | Schedule::Threads => 0.0,
        Schedule::Grid => partition.phases().iter().map(|phase| (phase.blocks / slots).ceil() - 1.0).sum(),
    };
    // Blocks of the phase that is cut follow one another where they are more than fit.
    let waves = partition.phases().iter().map(|phase| phase.blocks / slots).fold(0.0, f64::max);
    let Blocks { fixup_factor, fixup_launches: [meeting, of_full], restart_launches, .. } = *Blocks::of(config);
    let meeting = meeting + of_full * waves.min(1.0) + restart_launches * restarts;
    fixup_factor * (waves.max(1.0) * f64::from(peers) * tile_bytes / block_rate + meeting * info.launch_seconds)
}

/// Time of the launch that converts X: X is read, the padded copy written.
fn x_prologue(op: &CheckedGemm, info: &DeviceInfo, partition: &Partition) -> f64 {
    let layout = partition.workspace_layout();
    let Some(region) = layout.x else { return 0.0 };
    let read = op.m as f64 * op.x_row_bytes();
    info.launch_seconds + (read + (layout.bytes - region.x) as f64) / info.bandwidth
}

/// Time in which X is normalized: by a launch of its own, which reads and writes it, or by each block, which reads its rows once more.
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

pub(super) fn efficiency(per_mille: u32) -> f64 {
    f64::from(per_mille.max(1)) / 1000.0
}

#[cfg(test)]
mod tests {
    use qgemm_hal::XPrologue;

    use super::*;
    use crate::gemm::Cut;
    use crate::gemm::select::tests::{config, info, op};

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
        // X is waited for once.
        assert!((3.5..4.0).contains(&(rounds(8) / rounds(2))), "{} {}", rounds(2), rounds(8));
        // One row tile more begins a round, which costs less than a whole one.
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
        // A k-tile of twice the columns is two stages.
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

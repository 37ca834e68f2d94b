//! What a [`PlanRecord`](super::PlanRecord) is made of.

use qgemm_hal::{DeviceInfo, Geometry, LaunchPlan, LaunchSequence, Schedule, TileConfig};
use qgemm_sched::{Bound, Cost, Refusal};
use serde::{Deserialize, Serialize};

/// The device that something was planned for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceRecord {
    /// `cuda:0`, `emu:sm120`.
    pub id: String,
    /// The vendor's name of it.
    pub name: String,
    /// The chip: `sm_90`, `vulkan`, the SIMD level of a processor.
    pub arch: String,
    /// The kernel variant used on it, where the backend has several.
    pub variant: Option<String>,
    /// Version of the driver, or of what compiles kernels; empty where there is none.
    pub driver: String,
    /// Multiprocessors, compute units or cores.
    pub units: u32,
}

impl DeviceRecord {
    /// Of a device.
    pub(crate) fn of(info: &DeviceInfo) -> Self {
        Self {
            id: info.id.to_string(),
            name: info.name.clone(),
            arch: info.arch.clone(),
            variant: info.variant.map(|variant| variant.to_string()),
            driver: info.driver.clone(),
            units: info.units,
        }
    }
}

/// Sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Tokens.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

/// The tile of a kernel, and the resources of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tile {
    /// Stored rows of W.
    pub n: u32,
    /// Tokens.
    pub m: u32,
    /// Values along K of a k-tile.
    pub k: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs that a unit runs at once.
    pub ctas_per_unit: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Groups of warps that share K.
    pub k_groups: u32,
    /// Stages of the copy pipeline.
    pub stages: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

impl Tile {
    /// Of a configuration.
    pub(crate) fn of(config: &TileConfig) -> Self {
        Self {
            n: config.tile_n,
            m: config.tile_m,
            k: config.tile_k,
            threads: config.threads,
            ctas_per_unit: config.ctas_per_unit,
            warps_n: config.warps_n,
            k_groups: config.k_groups,
            stages: config.stages,
            shared_bytes: config.shared_bytes,
        }
    }
}

/// What CTAs share the work along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SplitAxis {
    /// Tokens.
    M,
    /// Output features, and tokens where there are more than a tile has.
    N,
    /// Output features, and K in equal parts.
    K,
    /// Heads of attention.
    Head,
    /// Ranges of one length: of k-tiles over several tiles, or of elements.
    Range,
}

/// How CTAs come to their tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DispatchSchedule {
    /// A CTA for each tile, or for each part of one.
    Static,
    /// As many CTAs as run at once; tiles are cut into ranges, one a CTA.
    StreamK,
    /// As many CTAs as run at once, each with whole tiles in turn.
    Persistent,
}

/// How the work is shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Dispatch {
    /// What it is cut along.
    pub split_axis: SplitAxis,
    /// Tiles along M, N and K, of operations whose tiles are known before their kernels are.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tiles: Option<Sizes>,
    /// Threads of a CTA.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub threads: Option<u32>,
    /// CTAs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ctas: Option<u64>,
    /// How they come to their tiles.
    pub schedule: DispatchSchedule,
    /// The grid, x fastest.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grid: Option<[u32; 3]>,
    /// CTAs that share a tile's K, or the keys of attention, at most.
    pub parts: u32,
    /// Of stream-K: tiles that are cut.
    pub cut_tiles: u32,
    /// Of stream-K: CTAs that take a range of them each.
    pub cut_ctas: u32,
    /// Of stream-K and persistent grids: tiles along N that are worked through together.
    pub swizzle_group: u32,
}

impl Dispatch {
    /// A CTA or a thread for each piece along `split_axis`, and for each of `parts` of it.
    pub(crate) fn along(split_axis: SplitAxis, parts: u32) -> Self {
        Self {
            split_axis,
            tiles: None,
            threads: None,
            ctas: None,
            schedule: DispatchSchedule::Static,
            grid: None,
            parts,
            cut_tiles: 0,
            cut_ctas: 0,
            swizzle_group: 0,
        }
    }

    /// Of a launch.
    pub(crate) fn of(plan: &LaunchPlan) -> Self {
        let cut = plan.stream_k.unwrap_or_default();
        let (schedule, split_axis) = match (plan.config.schedule, cut.cut_tiles) {
            (Schedule::StreamK, 0) => (DispatchSchedule::Persistent, SplitAxis::N),
            (Schedule::StreamK, _) => (DispatchSchedule::StreamK, SplitAxis::Range),
            (Schedule::Threads, _) => (DispatchSchedule::Static, threads_axis(plan)),
            (Schedule::Grid, _) if plan.splits > 1 => (DispatchSchedule::Static, SplitAxis::K),
            (Schedule::Grid, _) if plan.n_tiles == 1 && plan.m_tiles > 1 => (DispatchSchedule::Static, SplitAxis::M),
            (Schedule::Grid, _) => (DispatchSchedule::Static, SplitAxis::N),
        };
        let parts = match cut.cut_tiles {
            0 => plan.splits,
            tiles if cut.is_even() => cut.cut_ctas / tiles,
            tiles => cut.cut_ctas.div_ceil(tiles) + 1,
        };
        Self {
            split_axis,
            tiles: Some(Sizes { m: plan.m_tiles as usize, n: plan.n_tiles as usize, k: plan.k_tiles as usize }),
            threads: Some(plan.config.threads),
            ctas: Some(plan.grid_of_ctas().iter().map(|&g| u64::from(g)).product()),
            schedule,
            grid: Some(plan.grid_of_ctas()),
            parts,
            cut_tiles: cut.cut_tiles,
            cut_ctas: cut.cut_ctas,
            swizzle_group: cut.swizzle_group,
        }
    }
}

/// Along what threads of a processor share a launch: along K where there are fewer tiles than threads and K is in parts, by tokens where
/// these make enough tiles and features do not.
fn threads_axis(plan: &LaunchPlan) -> SplitAxis {
    let (threads, tiles) = (plan.config.threads, u64::from(plan.m_tiles) * u64::from(plan.n_tiles));
    match () {
        () if tiles < u64::from(threads) && plan.config.k_groups > 1 => SplitAxis::K,
        () if plan.m_tiles >= threads && plan.n_tiles < threads => SplitAxis::M,
        () => SplitAxis::N,
    }
}

/// What partial sums become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReductionType {
    /// There are none: one warp or thread has all of K.
    None,
    /// They are added up, in f32.
    Sum,
}

/// The order in which partial sums are added up, which is the same in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Warps of a CTA, in a tree of fixed form.
    #[serde(rename = "fixed_tree")]
    FixedTree,
    /// The last CTA to arrive adds all of them in the order of their ranges.
    LastArriverInOrder,
    /// All of them are added in their order, once they are there.
    InOrder,
}

/// How partial sums of a tile come together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Reduction {
    /// What they become.
    #[serde(rename = "type")]
    pub kind: ReductionType,
    /// Where they wait in the workspace, where they do.
    pub partial_buffer: Option<WorkspaceRegion>,
    /// In which order they are added, where there are any.
    pub order: Option<ReductionOrder>,
}

impl Reduction {
    /// A sum of parts, which lie in the first region of a workspace.
    pub(crate) fn of_parts(workspace: Vec<WorkspaceRegion>, order: ReductionOrder) -> Self {
        Self { kind: ReductionType::Sum, partial_buffer: workspace.into_iter().next(), order: Some(order) }
    }

    /// Of a launch.
    pub(crate) fn of(plan: &LaunchPlan) -> Self {
        let workspace = &plan.workspace;
        let partials = WorkspaceRegion::new("partials", workspace.partials, workspace.partial_bytes);
        let (kind, order) = match (plan.shared_tiles(), plan.config.k_groups) {
            (0, 0 | 1) => (ReductionType::None, None),
            (0, _) => (ReductionType::Sum, Some(ReductionOrder::FixedTree)),
            // CUDA's kernels are of a variant.
            _ if plan.config.variant.is_none() => (ReductionType::Sum, Some(ReductionOrder::InOrder)),
            _ => (ReductionType::Sum, Some(ReductionOrder::LastArriverInOrder)),
        };
        Self { kind, partial_buffer: (plan.shared_tiles() > 0).then_some(partials), order }
    }
}

/// The launch before the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PrologueRecord {
    /// What it does: `convert_x`.
    pub name: String,
    /// The format that it makes of X.
    pub x_format: String,
    /// Whether each token is multiplied by a power of two.
    pub row_factors: bool,
}

/// Bytes of a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkspaceRegion {
    /// What is kept there.
    pub name: String,
    /// First byte.
    pub offset: usize,
    /// Their number.
    pub bytes: usize,
}

impl WorkspaceRegion {
    /// One region that fills a workspace; none of an empty one.
    pub(crate) fn whole(name: &str, bytes: usize) -> Vec<Self> {
        (bytes > 0).then(|| Self::new(name, 0, bytes)).into_iter().collect()
    }

    /// Bytes of this name.
    pub(crate) fn new(name: &str, offset: usize, bytes: usize) -> Self {
        Self { name: name.to_owned(), offset, bytes }
    }
}

/// What an operation must move and multiply at least, against what the device can. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Roof {
    /// Bytes, each operand once.
    pub bytes: f64,
    /// Additions and multiplications, padding aside.
    pub operations: f64,
    /// Bytes a second of the device.
    pub bandwidth: f64,
    /// Additions and multiplications a second of the chosen kernel's arithmetic.
    pub operation_rate: Option<f64>,
    /// Time of the bytes.
    pub memory_seconds: f64,
    /// Time of the arithmetic.
    pub math_seconds: Option<f64>,
    /// The longer of the two, over what the plan is expected to take.
    pub share: Option<f64>,
}

impl Roof {
    /// Of `bytes` and multiply-adds on a device that does `rate` of these a second, in a plan that should take `expected` seconds.
    pub(super) fn new(info: &DeviceInfo, bytes: f64, macs: f64, rate: Option<f64>, expected: Option<f64>) -> Self {
        let memory_seconds = bytes / info.bandwidth;
        let math_seconds = rate.map(|rate| macs / rate);
        let least = memory_seconds.max(math_seconds.unwrap_or(0.0));
        Self {
            bytes,
            operations: 2.0 * macs,
            bandwidth: info.bandwidth,
            operation_rate: rate.map(|rate| 2.0 * rate),
            memory_seconds,
            math_seconds,
            share: expected.map(|expected| least / expected),
        }
    }
}

/// A candidate of an operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CandidateRecord {
    /// The kernel's identity.
    pub kernel_id: String,
    /// The family.
    pub family: String,
    /// How K is cut, in words.
    pub cut: String,
    /// Seconds that the cost model expects.
    pub seconds: f64,
    /// The same by what takes the time. Arithmetic and memory overlap.
    pub cost: Cost,
    /// What takes longest.
    pub bound: Bound,
    /// Seconds that were measured, where the tuned table knows them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub measured_seconds: Option<f64>,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
    /// Whether the plan is of this one.
    pub chosen: bool,
}

/// A family that does not serve an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RefusalRecord {
    /// The family.
    pub family: String,
    /// Its reason.
    pub why: String,
}

impl From<&Refusal> for RefusalRecord {
    fn from(refusal: &Refusal) -> Self {
        Self { family: refusal.family.to_owned(), why: refusal.reason.why.clone() }
    }
}

/// One launch of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LaunchRecord {
    /// The kernel.
    pub kernel_id: String,
    /// The grid, x fastest.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

impl LaunchRecord {
    /// Every launch of a sequence.
    pub(super) fn all(sequence: &LaunchSequence) -> Vec<Self> {
        let launch = |step: &qgemm_hal::LaunchStep| {
            let Geometry { grid, threads, shared_bytes } = step.geometry();
            Self { kernel_id: step.kernel_id().to_string(), grid, threads, shared_bytes }
        };
        sequence.steps().iter().map(launch).collect()
    }
}

/// How K is cut, in words.
pub(crate) fn cut_text(plan: &LaunchPlan) -> String {
    match &plan.stream_k {
        Some(cut) if cut.cut_tiles > 0 => {
            format!(
                "{} of {} tiles by {} CTAs",
                cut.cut_tiles,
                u64::from(plan.n_tiles) * u64::from(plan.m_tiles),
                cut.cut_ctas
            )
        }
        None if plan.splits > 1 => format!("{} parts", plan.splits),
        _ => "whole tiles".to_owned(),
    }
}

//! Parts of a [`PlanRecord`](super::PlanRecord).

use qgemm_hal::{DeviceInfo, Geometry, LaunchPlan, LaunchSequence, Schedule, TileConfig};
use qgemm_sched::{Bound, Cost, Refusal};
use serde::{Deserialize, Serialize};

/// Device of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceRecord {
    /// Device id: `cuda:0`, `emu:sm120`.
    pub id: String,
    /// Vendor's device name.
    pub name: String,
    /// Architecture: `sm_90`, `vulkan`, or the SIMD level of a CPU.
    pub arch: String,
    /// Kernel variant, if the backend has several.
    pub variant: Option<String>,
    /// Version of the driver or kernel compiler. Empty without one.
    pub driver: String,
    /// Multiprocessors, compute units or cores.
    pub units: u32,
}

impl DeviceRecord {
    /// Record of a device.
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

/// M, N and K of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Tokens.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

/// Tile of a kernel, and resources of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tile {
    /// Stored rows of W per tile.
    pub n: u32,
    /// Tokens per tile.
    pub m: u32,
    /// K of a k-tile.
    pub k: u32,
    /// Threads per CTA.
    pub threads: u32,
    /// Resident CTAs per multiprocessor (occupancy).
    pub ctas_per_unit: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Warp groups that split K.
    pub k_groups: u32,
    /// Pipeline stages.
    pub stages: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
}

impl Tile {
    /// Record of a config.
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

/// Axis along which CTAs partition the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SplitAxis {
    /// Tokens.
    M,
    /// Output features, and tokens beyond one tile.
    N,
    /// Output features and split-K.
    K,
    /// Attention heads.
    Head,
    /// Equal ranges: of k-tiles across tiles, or of elements.
    Range,
}

/// Assignment of tiles to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DispatchSchedule {
    /// One CTA per tile or split.
    Static,
    /// Stream-K: a persistent grid with one range of k-tiles per CTA.
    StreamK,
    /// Persistent grid with whole tiles.
    Persistent,
}

/// Work partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Dispatch {
    /// Partitioned axis.
    pub split_axis: SplitAxis,
    /// Tiles along M, N and K, if they do not depend on the kernel.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tiles: Option<Sizes>,
    /// Threads per CTA.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub threads: Option<u32>,
    /// Number of CTAs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ctas: Option<u64>,
    /// Assignment of tiles to CTAs.
    pub schedule: DispatchSchedule,
    /// Grid, x fastest.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grid: Option<[u32; 3]>,
    /// Maximum CTAs per tile (split-K) or per query (split-KV).
    pub parts: u32,
    /// Stream-K: number of split tiles.
    pub cut_tiles: u32,
    /// Stream-K: number of CTAs with a range of split tiles.
    pub cut_ctas: u32,
    /// Swizzle group: tiles along N in raster order, for stream-K and persistent grids.
    pub swizzle_group: u32,
}

impl Dispatch {
    /// One CTA or thread per item along `split_axis`, times `parts`.
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

    /// Work partition of a launch.
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

/// Axis by which CPU threads share a launch.
///
/// K when it is split and there are fewer tiles than threads. M when tokens make enough
/// tiles and features do not.
fn threads_axis(plan: &LaunchPlan) -> SplitAxis {
    let (threads, tiles) = (plan.config.threads, u64::from(plan.m_tiles) * u64::from(plan.n_tiles));
    match () {
        () if tiles < u64::from(threads) && plan.config.k_groups > 1 => SplitAxis::K,
        () if plan.m_tiles >= threads && plan.n_tiles < threads => SplitAxis::M,
        () => SplitAxis::N,
    }
}

/// Reduction of partial sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReductionType {
    /// No partial sums: one warp or thread has all of K.
    None,
    /// Sum in f32.
    Sum,
}

/// Order of the reduction, identical in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Fixed tree over the warps of a CTA.
    #[serde(rename = "fixed_tree")]
    FixedTree,
    /// The last CTA to arrive adds all partial sums in range order.
    LastArriverInOrder,
    /// All partial sums are added in order once complete.
    InOrder,
}

/// Reduction of a tile's partial sums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Reduction {
    /// Kind of reduction.
    #[serde(rename = "type")]
    pub kind: ReductionType,
    /// Workspace region of the partial sums, if any.
    pub partial_buffer: Option<WorkspaceRegion>,
    /// Order of additions, if any.
    pub order: Option<ReductionOrder>,
}

impl Reduction {
    /// Sum of partial sums in the first workspace region.
    pub(crate) fn of_parts(workspace: Vec<WorkspaceRegion>, order: ReductionOrder) -> Self {
        Self { kind: ReductionType::Sum, partial_buffer: workspace.into_iter().next(), order: Some(order) }
    }

    /// Reduction of a launch.
    pub(crate) fn of(plan: &LaunchPlan) -> Self {
        let workspace = &plan.workspace;
        let partials = WorkspaceRegion::new("partials", workspace.partials, workspace.partial_bytes);
        let (kind, order) = match (plan.shared_tiles(), plan.config.k_groups) {
            (0, 0 | 1) => (ReductionType::None, None),
            (0, _) => (ReductionType::Sum, Some(ReductionOrder::FixedTree)),
            // CUDA kernels have a variant.
            _ if plan.config.variant.is_none() => (ReductionType::Sum, Some(ReductionOrder::InOrder)),
            _ => (ReductionType::Sum, Some(ReductionOrder::LastArriverInOrder)),
        };
        Self { kind, partial_buffer: (plan.shared_tiles() > 0).then_some(partials), order }
    }
}

/// X prologue launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PrologueRecord {
    /// Operation: `convert_x`.
    pub name: String,
    /// Resulting format of X.
    pub x_format: String,
    /// Whether each token has a power-of-two factor.
    pub row_factors: bool,
}

/// Region of a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkspaceRegion {
    /// Contents.
    pub name: String,
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

impl WorkspaceRegion {
    /// Region that fills the workspace; none if it is empty.
    pub(crate) fn whole(name: &str, bytes: usize) -> Vec<Self> {
        (bytes > 0).then(|| Self::new(name, 0, bytes)).into_iter().collect()
    }

    /// Region with this name.
    pub(crate) fn new(name: &str, offset: usize, bytes: usize) -> Self {
        Self { name: name.to_owned(), offset, bytes }
    }
}

/// Roofline: minimum bytes and operations against the device's
/// peaks. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Roof {
    /// Bytes, each operand once.
    pub bytes: f64,
    /// Additions and multiplications, without padding.
    pub operations: f64,
    /// Device bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Peak rate of the chosen kernel's arithmetic, in additions and
    /// multiplications per second.
    pub operation_rate: Option<f64>,
    /// Memory time.
    pub memory_seconds: f64,
    /// Arithmetic time.
    pub math_seconds: Option<f64>,
    /// Longer of both times, as a share of the expected time.
    pub share: Option<f64>,
}

impl Roof {
    /// Roofline of `bytes` and multiply-adds, on a device with `rate` of these per second,
    /// for a plan that takes `expected` seconds.
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

/// Candidate of an operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CandidateRecord {
    /// Kernel id.
    pub kernel_id: String,
    /// Family name.
    pub family: String,
    /// Split of K, in words.
    pub cut: String,
    /// Estimated seconds by the cost model.
    pub seconds: f64,
    /// Estimate by cost component. Arithmetic and memory overlap.
    pub cost: Cost,
    /// Bottleneck.
    pub bound: Bound,
    /// Measured seconds, if in the tuned table.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub measured_seconds: Option<f64>,
    /// Workspace in bytes.
    pub workspace_bytes: usize,
    /// Whether the plan uses this candidate.
    pub chosen: bool,
}

/// Refusal of a family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RefusalRecord {
    /// Family name.
    pub family: String,
    /// Reason.
    pub why: String,
}

impl From<&Refusal> for RefusalRecord {
    fn from(refusal: &Refusal) -> Self {
        Self { family: refusal.family.to_owned(), why: refusal.reason.why.clone() }
    }
}

/// A coarser [`XPrecision`](crate::XPrecision) and what it would gain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PermissionRecord {
    /// Name of the permission, such as `mxfp4`.
    pub x_precision: String,
    /// Format in which the kernel would multiply X.
    pub x_format: String,
    /// Expected seconds, with the launch that quantizes X.
    pub seconds: f64,
}

/// Launch of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LaunchRecord {
    /// Kernel id.
    pub kernel_id: String,
    /// Grid, x fastest.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
}

impl LaunchRecord {
    /// All launches of a sequence.
    pub(super) fn all(sequence: &LaunchSequence) -> Vec<Self> {
        let launch = |step: &qgemm_hal::LaunchStep| {
            let Geometry { grid, threads, shared_bytes } = step.geometry();
            Self { kernel_id: step.kernel_id().to_string(), grid, threads, shared_bytes }
        };
        sequence.steps().iter().map(launch).collect()
    }
}

/// Split of K, in words.
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

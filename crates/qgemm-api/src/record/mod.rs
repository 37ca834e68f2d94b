//! Plan record ([`PlanRecord`]): a plan and its reasons, as data. Made on request,
//! so planning does not pay for it.

mod gemm;
mod operation;
mod parts;
mod text;

use serde::{Deserialize, Serialize};

pub use parts::{
    CandidateRecord, DeviceRecord, Dispatch, DispatchSchedule, LaunchRecord, PermissionRecord, PrologueRecord,
    Reduction, ReductionOrder, ReductionType, RefusalRecord, Roof, Sizes, SplitAxis, Tile, WorkspaceRegion,
};

pub(crate) use gemm::GemmSubject;
pub(crate) use operation::{Recorded, record};
pub(crate) use parts::cut_text;

/// Record of a plan: chosen kernel, other candidates, and
/// reasons. Times are in seconds.
///
/// It describes a plan ([`Plan::record`](crate::Plan::record)), or a problem without
/// one ([`Context::explain`](crate::Context::explain)). Its text is a page for
/// people; serialised, it is data.
///
/// ```
/// use qgemm_api::{Context, DType};
///
/// let ctx = Context::open("cpu")?;
/// // A weight that is nowhere: its description is enough.
/// let weight = ctx.describe_weight("q4_k".parse()?, 4096, 4096)?;
/// let record = ctx.explain(&weight.problem(8).x_dtype(DType::F16))?;
/// let chosen = record.chosen().expect("a family serves it");
/// assert!(record.candidates.len() > 1 && chosen.seconds > 0.0);
/// println!("{record}");
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanRecord {
    /// Operation: `gemm`.
    pub operation: String,
    /// Problem in words: sizes, formats, types.
    pub problem: String,
    /// Device.
    pub device: DeviceRecord,
    /// M, N and K. Absent for operations without multiplications.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub shape: Option<Sizes>,
    /// Kernel id. Absent when nothing is launched or no family serves the operation.
    pub kernel_id: Option<String>,
    /// Hash of the kernel's sources, in hexadecimal.
    pub source_hash: Option<String>,
    /// Reason for the choice.
    pub why: String,
    /// Matrix instructions that the kernel leaves unused, such as `tensor`: FMA bounds it,
    /// although the device multiplies the problem's types by them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub unused_math: Option<String>,
    /// Tile.
    pub tile: Option<Tile>,
    /// Work partition.
    pub dispatch: Option<Dispatch>,
    /// Reduction of partial sums.
    pub reduction: Option<Reduction>,
    /// X prologue: the launch that makes the kernel's X.
    pub prologue: Option<PrologueRecord>,
    /// Workspace in bytes.
    pub workspace_bytes: usize,
    /// Workspace regions by offset.
    pub workspace: Vec<WorkspaceRegion>,
    /// Roofline: minimum bytes and operations against the device's peaks.
    pub roof: Roof,
    /// All candidates, fastest by the cost model first.
    pub candidates: Vec<CandidateRecord>,
    /// Families that do not serve the operation.
    pub refused: Vec<RefusalRecord>,
    /// Permitted roundings of X that would make a product faster. Only in records without
    /// a plan ([`Context::explain`](crate::Context::explain)).
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub permissions: Vec<PermissionRecord>,
    /// Launches of a run, if kernels are ready.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub launches: Vec<LaunchRecord>,
}

impl PlanRecord {
    /// Candidate of the plan.
    pub fn chosen(&self) -> Option<&CandidateRecord> {
        self.candidates.iter().find(|candidate| candidate.chosen)
    }
}

//! [`PlanRecord`]: what a plan is and why, as data. It is made on request, so planning does not pay for it.

mod gemm;
mod operation;
mod parts;
mod text;

use serde::{Deserialize, Serialize};

pub use parts::{
    CandidateRecord, DeviceRecord, Dispatch, DispatchSchedule, LaunchRecord, PrologueRecord, Reduction, ReductionOrder,
    ReductionType, RefusalRecord, Roof, Sizes, SplitAxis, Tile, WorkspaceRegion,
};

pub(crate) use gemm::GemmSubject;
pub(crate) use operation::{Recorded, record};
pub(crate) use parts::cut_text;

/// What will run for one operation, what else there was, and why it was not taken: of a plan ([`Plan::record`](crate::Plan::record)),
/// or of a problem on a device that has none yet ([`Context::explain`](crate::Context::explain)). Its text is a page for people;
/// serialised, it is the same as data. Times are in seconds.
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
    /// The operation: `gemm`.
    pub operation: String,
    /// What it computes, in words: sizes, formats, types.
    pub problem: String,
    /// The device.
    pub device: DeviceRecord,
    /// Sizes of the product; absent of operations that multiply nothing.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub shape: Option<Sizes>,
    /// Identity of the chosen kernel; absent where nothing is launched, or nobody serves the operation.
    pub kernel_id: Option<String>,
    /// Hash of the chosen kernel's sources, in hexadecimal digits.
    pub source_hash: Option<String>,
    /// Why that one.
    pub why: String,
    /// Its tile.
    pub tile: Option<Tile>,
    /// How the work is shared.
    pub dispatch: Option<Dispatch>,
    /// How partial sums come together.
    pub reduction: Option<Reduction>,
    /// The launch that makes the kernel's X.
    pub prologue: Option<PrologueRecord>,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
    /// What lies where in it, in the order of their offsets.
    pub workspace: Vec<WorkspaceRegion>,
    /// What must be moved and multiplied, against what the device can.
    pub roof: Roof,
    /// Every way to run it, the fastest by the cost model first.
    pub candidates: Vec<CandidateRecord>,
    /// Families that do not serve it.
    pub refused: Vec<RefusalRecord>,
    /// The launches of a run, where kernels have been made ready.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub launches: Vec<LaunchRecord>,
}

impl PlanRecord {
    /// The candidate that the plan is of.
    pub fn chosen(&self) -> Option<&CandidateRecord> {
        self.candidates.iter().find(|candidate| candidate.chosen)
    }
}

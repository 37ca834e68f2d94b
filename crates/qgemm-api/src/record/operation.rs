//! Plan records of every operation except `gemm`: additions to
//! the operation's description.

use qgemm_hal::{DeviceInfo, Operation};
use qgemm_sched::{Candidates, Offered};

use super::PlanRecord;
use super::parts::{
    CandidateRecord, DeviceRecord, Dispatch, Reduction, RefusalRecord, Roof, Sizes, SplitAxis, Tile, WorkspaceRegion,
};

/// Record entries of an operation's plan.
pub(crate) trait Recorded: Operation {
    /// Product sizes of the operation.
    fn sizes(&self) -> Option<Sizes> {
        None
    }
    /// The tile of a plan.
    fn tile(_: &Self::Plan) -> Option<Tile> {
        None
    }
    /// Work partition of a plan.
    fn cut(_: &Self::Plan) -> String {
        "whole tiles".into()
    }
    /// Work distribution of a plan: by rows, mostly one per token.
    fn dispatch(&self, _: &Self::Plan) -> Dispatch {
        Dispatch::along(SplitAxis::M, 1)
    }
    /// Reduction of partial results; `None` where there are none.
    fn reduction(&self, _: &Self::Plan, _: &DeviceInfo) -> Option<Reduction> {
        None
    }
    /// Regions of a plan's workspace.
    fn workspace(&self, _: &Self::Plan) -> Vec<WorkspaceRegion> {
        Vec::new()
    }
}

/// Record of the scheduler's choice, with reasons.
pub(crate) fn record<O: Recorded>(op: &O, info: &DeviceInfo, all: &Candidates<'_, O>) -> PlanRecord {
    let first = all.offered.first();
    let rate = first.and_then(|best| O::math(&best.plan)).and_then(|math| info.rate(math));
    let workspace_bytes = first.map_or(0, |best| op.workspace_bytes(&best.plan));
    let workspace = first.map(|best| op.workspace(&best.plan)).unwrap_or_default();
    let candidate = |(place, offer): (usize, &Offered<'_, O>)| CandidateRecord {
        kernel_id: op.kernel_id(&offer.plan).to_string(),
        family: offer.family.name().to_owned(),
        cut: O::cut(&offer.plan),
        seconds: offer.cost.seconds,
        cost: offer.cost,
        bound: offer.cost.bound(),
        measured_seconds: offer.measured,
        workspace_bytes: op.workspace_bytes(&offer.plan),
        chosen: place == 0,
    };
    let why = match all.offered.as_slice() {
        [] => "no family serves it".to_owned(),
        [Offered { measured: Some(seconds), cost, .. }, ..] => {
            let (us, bound) = (seconds * 1e6, cost.bound().name());
            format!("measured: {us:.2} us, which overrules the cost model; bound by {bound}")
        }
        [only] => format!("the only candidate; bound by {}", only.cost.bound().name()),
        [best, next, ..] => {
            let difference = (next.cost.seconds / best.cost.seconds - 1.0) * 100.0;
            let bound = best.cost.bound().name();
            format!("the lowest estimate, {difference:.1} % below the next; bound by {bound}")
        }
    };
    PlanRecord {
        operation: O::NAME.to_owned(),
        problem: op.describe(),
        device: DeviceRecord::of(info),
        shape: op.sizes(),
        kernel_id: first.map(|best| op.kernel_id(&best.plan).to_string()),
        source_hash: first.map(|best| format!("{:016x}", best.family.source_hash(op, O::config(&best.plan)))),
        why,
        unused_math: first.and_then(|best| op.unused_math(&best.plan, info)).map(|math| math.name().to_owned()),
        tile: first.and_then(|best| O::tile(&best.plan)),
        dispatch: first.map(|best| op.dispatch(&best.plan)),
        reduction: first.and_then(|best| op.reduction(&best.plan, info)),
        prologue: None,
        workspace_bytes,
        workspace,
        roof: Roof::new(
            info,
            op.traffic(),
            op.macs(),
            rate,
            first.map(|best| best.measured.unwrap_or(best.cost.seconds)),
        ),
        candidates: all.offered.iter().enumerate().map(candidate).collect(),
        refused: all.refusals.iter().map(RefusalRecord::from).collect(),
        permissions: Vec::new(),
        launches: Vec::new(),
    }
}

//! Records of operations other than products with one weight.

use qgemm_hal::{
    AttentionPlan, CheckedAttention, CheckedConvert, CheckedExperts, CheckedIndexer, CheckedKvAppend, CheckedMatmul,
    CheckedNorm, CheckedOptimizer, CheckedQuantize, CheckedRouting, ConvertPlan, DeviceInfo, DeviceKind, ExpertsPlan,
    IndexerLaunch, MatmulConfig, MatmulPlan, Operation, OptimizerLaunch, RoutingLaunches, Schedule,
};
use qgemm_sched::{Candidates, Offered};

use super::PlanRecord;
use super::parts::{
    CandidateRecord, DeviceRecord, Dispatch, DispatchSchedule, Reduction, ReductionOrder, RefusalRecord, Roof, Sizes,
    SplitAxis, Tile, WorkspaceRegion,
};

/// What a record needs to know of an operation's plan.
pub(crate) trait Recorded: Operation {
    /// Sizes of its product.
    fn sizes(&self) -> Option<Sizes> {
        None
    }
    /// The tile of a plan.
    fn tile(_: &Self::Plan) -> Option<Tile> {
        None
    }
    /// How a plan cuts the work.
    fn cut(_: &Self::Plan) -> String {
        "whole tiles".into()
    }
    /// How a plan shares the work: by rows, of which most operations have one a token.
    fn dispatch(&self, _: &Self::Plan) -> Dispatch {
        Dispatch::along(SplitAxis::M, 1)
    }
    /// How partial results of a plan come together; `None` where there are none.
    fn reduction(_: &Self::Plan, _: &DeviceInfo) -> Option<Reduction> {
        None
    }
    /// Size of a plan's workspace, and what lies where in it.
    fn workspace(_: &Self::Plan) -> (usize, Vec<WorkspaceRegion>) {
        (0, Vec::new())
    }
}

/// What the scheduler would choose, and why.
pub(crate) fn record<O: Recorded>(op: &O, info: &DeviceInfo, all: &Candidates<'_, O>) -> PlanRecord {
    let first = all.offered.first();
    let rate = first.and_then(|best| O::math(&best.plan)).and_then(|math| info.rate(math));
    let (workspace_bytes, workspace) = first.map(|best| O::workspace(&best.plan)).unwrap_or_default();
    let candidate = |(place, offer): (usize, &Offered<'_, O>)| CandidateRecord {
        kernel_id: op.kernel_id(&offer.plan).to_string(),
        family: offer.family.name().to_owned(),
        cut: O::cut(&offer.plan),
        seconds: offer.cost.seconds,
        cost: offer.cost,
        bound: offer.cost.bound(),
        measured_seconds: offer.measured,
        workspace_bytes: O::workspace(&offer.plan).0,
        chosen: place == 0,
    };
    let why = match all.offered.as_slice() {
        [] => "no family serves it".to_owned(),
        [Offered { measured: Some(seconds), cost, .. }, ..] => {
            let (us, bound) = (seconds * 1e6, cost.bound().name());
            format!("measured: {us:.2} us, which overrules the cost model; bound by {bound}")
        }
        [only] => format!("the only way there is; bound by {}", only.cost.bound().name()),
        [best, next, ..] => {
            let difference = (next.cost.seconds / best.cost.seconds - 1.0) * 100.0;
            let bound = best.cost.bound().name();
            format!("the least expected time, {difference:.1} % before the next; bound by {bound}")
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
        tile: first.and_then(|best| O::tile(&best.plan)),
        dispatch: first.map(|best| op.dispatch(&best.plan)),
        reduction: first.and_then(|best| O::reduction(&best.plan, info)),
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
        launches: Vec::new(),
    }
}

impl Recorded for CheckedConvert {
    fn dispatch(&self, _: &ConvertPlan) -> Dispatch {
        Dispatch::along(SplitAxis::Range, 1)
    }
}

impl Recorded for CheckedRouting {
    fn workspace(plan: &RoutingLaunches) -> (usize, Vec<WorkspaceRegion>) {
        let bytes = plan.config.workspace_bytes;
        let counts = (bytes > 0).then(|| WorkspaceRegion::new("counts", 0, bytes));
        (bytes, counts.into_iter().collect())
    }
}

impl Recorded for CheckedExperts {
    fn sizes(&self) -> Option<Sizes> {
        Some(Sizes { m: self.each.m, n: self.each.out_features, k: self.each.k })
    }

    fn tile(plan: &ExpertsPlan) -> Option<Tile> {
        Some(Tile::of(&plan.config.tile))
    }

    fn cut(plan: &ExpertsPlan) -> String {
        if plan.config.grouped { "whole tiles".into() } else { "a tile a slot".into() }
    }

    fn workspace(plan: &ExpertsPlan) -> (usize, Vec<WorkspaceRegion>) {
        let parts =
            [("products", plan.products, plan.product_bytes), ("scratch", plan.scratch, plan.config.scratch_bytes)];
        let plain = plan.dequantized.map(|region| ("plain x", region.x, region.rows * region.row_bytes));
        let regions = parts.into_iter().chain(plain).filter(|(_, _, bytes)| *bytes > 0);
        (plan.workspace_bytes, regions.map(|(name, at, bytes)| WorkspaceRegion::new(name, at, bytes)).collect())
    }

    fn dispatch(&self, plan: &ExpertsPlan) -> Dispatch {
        let schedule = match plan.config.tile.schedule {
            Schedule::StreamK => DispatchSchedule::Persistent,
            Schedule::Grid | Schedule::Threads => DispatchSchedule::Static,
        };
        Dispatch { schedule, threads: Some(plan.config.tile.threads), ..Dispatch::along(SplitAxis::N, 1) }
    }
}

impl Recorded for CheckedNorm {}

impl Recorded for CheckedOptimizer {
    fn dispatch(&self, _: &OptimizerLaunch) -> Dispatch {
        Dispatch::along(SplitAxis::Range, 1)
    }
}

impl Recorded for CheckedKvAppend {}

impl Recorded for CheckedIndexer {
    fn workspace(plan: &IndexerLaunch) -> (usize, Vec<WorkspaceRegion>) {
        let bytes = plan.config.workspace_bytes;
        let parts = (bytes > 0).then(|| WorkspaceRegion::new("scores", 0, bytes));
        (bytes, parts.into_iter().collect())
    }
}

impl Recorded for CheckedQuantize {}

impl Recorded for CheckedMatmul {
    fn sizes(&self) -> Option<Sizes> {
        Some(Sizes { m: self.m, n: self.n, k: self.k })
    }

    fn workspace(plan: &MatmulPlan) -> (usize, Vec<WorkspaceRegion>) {
        let layout = &plan.workspace;
        let sums = (layout.partial_bytes > 0)
            .then(|| WorkspaceRegion::new("partial accumulators", layout.partials, layout.partial_bytes));
        let factors = (plan.config.factor_bytes > 0)
            .then(|| WorkspaceRegion::new("factors", plan.factors, plan.config.factor_bytes as usize));
        (layout.bytes, sums.into_iter().chain(factors).collect())
    }

    fn cut(plan: &MatmulPlan) -> String {
        match plan.splits {
            1 => "whole tiles".into(),
            splits => format!("K in {splits} parts"),
        }
    }

    fn dispatch(&self, plan: &MatmulPlan) -> Dispatch {
        let MatmulConfig { tile_m, tile_n, tile_k, .. } = plan.config;
        let tiles = |len: usize, tile: u32| len.div_ceil(tile.max(1) as usize);
        let tiles = Sizes { m: tiles(self.m, tile_m), n: tiles(self.n, tile_n), k: tiles(self.k, tile_k) };
        let split_axis = match (plan.splits > 1, tiles.n == 1 && tiles.m > 1) {
            (true, _) => SplitAxis::K,
            (false, true) => SplitAxis::M,
            (false, false) => SplitAxis::N,
        };
        Dispatch { tiles: Some(tiles), ..Dispatch::along(split_axis, plan.splits) }
    }

    fn reduction(plan: &MatmulPlan, info: &DeviceInfo) -> Option<Reduction> {
        let order = match info.id.kind {
            DeviceKind::Cpu => ReductionOrder::FixedTree,
            DeviceKind::Wgpu => ReductionOrder::InOrder,
            _ => ReductionOrder::LastArriverInOrder,
        };
        (plan.splits > 1).then(|| Reduction::of_parts(Self::workspace(plan).1, order))
    }
}

impl Recorded for CheckedAttention {
    fn cut(plan: &AttentionPlan) -> String {
        match plan.config.parts {
            1 => "whole sequences".into(),
            parts => format!("keys in {parts} parts of {}", plan.config.part_keys),
        }
    }

    fn workspace(plan: &AttentionPlan) -> (usize, Vec<WorkspaceRegion>) {
        let bytes = plan.config.workspace_bytes;
        let what = if plan.config.parts > 1 { "partial results" } else { "lists of tiles" };
        let region = (bytes > 0).then(|| WorkspaceRegion::new(what, 0, bytes));
        (bytes, region.into_iter().collect())
    }

    fn dispatch(&self, plan: &AttentionPlan) -> Dispatch {
        Dispatch::along(SplitAxis::Head, plan.config.parts)
    }

    fn reduction(plan: &AttentionPlan, _: &DeviceInfo) -> Option<Reduction> {
        (plan.config.parts > 1).then(|| Reduction::of_parts(Self::workspace(plan).1, ReductionOrder::InOrder))
    }
}

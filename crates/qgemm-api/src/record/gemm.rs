//! Plan records of GEMM.

use qgemm_hal::{CheckedGemm, DeviceInfo, Families, LaunchPlan, LaunchSequence, Operation, XPrecision, XPrologue};
use qgemm_sched::gemm::{Considered, Explanation, explain};
use qgemm_sched::{Preferences, TunedTable};

use super::PlanRecord;
use super::parts::{
    CandidateRecord, DeviceRecord, Dispatch, LaunchRecord, PermissionRecord, PrologueRecord, Reduction, RefusalRecord,
    Roof, Sizes, Tile, WorkspaceRegion, cut_text,
};
use crate::error::Error;

/// GEMM problem with everything that affects its plan.
pub(crate) struct GemmSubject<'a> {
    pub op: &'a CheckedGemm,
    pub info: &'a DeviceInfo,
    pub families: Families<CheckedGemm>,
    pub preferences: &'a Preferences,
    pub tuned: &'a TunedTable,
}

impl GemmSubject<'_> {
    /// Record of the scheduler's choice and its reasons.
    ///
    /// # Errors
    /// When the requested family does not exist.
    pub fn explain(&self) -> Result<PlanRecord, Error> {
        let Some(explanation) = self.explanation()? else { return Ok(self.nothing()) };
        Ok(self.record(&explanation, explanation.chosen, None))
    }

    /// [`GemmSubject::explain`], with the permissions that would make the product faster.
    /// Each is planned, so that it takes many times as long.
    ///
    /// # Errors
    /// As [`GemmSubject::explain`].
    pub fn explain_with_permissions(&self) -> Result<PlanRecord, Error> {
        let record = self.explain()?;
        let Some(seconds) = record.chosen().map(|chosen| chosen.seconds) else { return Ok(record) };
        Ok(PlanRecord { permissions: self.permissions(seconds)?, ..record })
    }

    /// Other roundings of a plain X with which the product should take less than `seconds`.
    fn permissions(&self, seconds: f64) -> Result<Vec<PermissionRecord>, Error> {
        /// Time saved for a permission to be worth saying.
        const LEAST_GAIN: f64 = 0.05;
        let mut faster: Vec<PermissionRecord> = Vec::new();
        if self.op.x.planes.is_some() {
            return Ok(faster);
        }
        for x_precision in XPrecision::ALL.into_iter().filter(|&other| other != self.op.x_precision) {
            let op = CheckedGemm { x_precision, ..self.op.clone() };
            let all = explain(&op, self.info, self.families, self.preferences, self.tuned)?;
            let Some(other) = all.chosen.map(|place| &all.considered[place]) else { continue };
            let x_format = other.plan.config.x_format.name();
            let is_new = faster.iter().all(|known| known.x_format != x_format);
            if is_new && other.cost.seconds < seconds * (1.0 - LEAST_GAIN) {
                let (x_precision, x_format) = (x_precision.name().to_owned(), x_format.to_owned());
                faster.push(PermissionRecord { x_precision, x_format, seconds: other.cost.seconds });
            }
        }
        Ok(faster)
    }

    /// Record of a plan with `launch`, whether or not the scheduler would choose it.
    ///
    /// # Errors
    /// As [`GemmSubject::explain`].
    pub fn of_plan(&self, launch: &LaunchPlan, sequence: &LaunchSequence) -> Result<PlanRecord, Error> {
        let Some(explanation) = self.explanation()? else { return Ok(self.nothing()) };
        let place = explanation.position(launch);
        Ok(self.record(&explanation, place, Some(sequence)))
    }

    fn explanation(&self) -> Result<Option<Explanation<'static>>, Error> {
        if self.op.m == 0 {
            return Ok(None);
        }
        Ok(Some(explain(self.op, self.info, self.families, self.preferences, self.tuned)?))
    }

    /// Record of a problem without tokens.
    fn nothing(&self) -> PlanRecord {
        let empty = Explanation { considered: Vec::new(), refusals: Vec::new(), chosen: None };
        PlanRecord { why: "there are no tokens: nothing is launched".into(), ..self.record(&empty, None, None) }
    }

    fn record(&self, all: &Explanation<'_>, taken: Option<usize>, sequence: Option<&LaunchSequence>) -> PlanRecord {
        let op = self.op;
        let chosen = taken.map(|place| &all.considered[place]);
        let plan = chosen.map(|c| &c.plan);
        let rate = plan.and_then(|plan| self.info.rate(plan.config.math));
        let expected = chosen.map(|c| c.measured.unwrap_or(c.cost.seconds));
        let candidate = |(place, c): (usize, &Considered<'_>)| CandidateRecord {
            kernel_id: c.plan.config.kernel_id(op.format).to_string(),
            family: c.family.name().to_owned(),
            cut: cut_text(&c.plan),
            seconds: c.cost.seconds,
            cost: c.cost,
            bound: c.cost.bound(),
            measured_seconds: c.measured,
            workspace_bytes: c.plan.workspace.bytes,
            chosen: Some(place) == taken,
        };
        PlanRecord {
            operation: CheckedGemm::NAME.to_owned(),
            problem: op.describe(),
            device: DeviceRecord::of(self.info),
            shape: Some(Sizes { m: op.m, n: op.out_features, k: op.k }),
            kernel_id: plan.map(|plan| plan.config.kernel_id(op.format).to_string()),
            source_hash: chosen.map(|c| format!("{:016x}", c.family.source_hash(&op.product(&c.plan), &c.plan.config))),
            why: why(all, taken),
            unused_math: plan.and_then(|plan| op.unused_math(plan, self.info)).map(|math| math.name().to_owned()),
            tile: plan.map(|plan| Tile::of(&plan.config)),
            dispatch: plan.map(Dispatch::of),
            reduction: plan.map(Reduction::of),
            prologue: plan.and_then(prologue),
            workspace_bytes: plan.map_or(0, |plan| workspace_end(op, plan)),
            workspace: plan.map(|plan| workspace(op, plan)).unwrap_or_default(),
            roof: Roof::new(self.info, op.traffic(), op.macs(), rate, expected),
            candidates: all.considered.iter().enumerate().map(candidate).collect(),
            refused: all.refusals.iter().map(RefusalRecord::from).collect(),
            permissions: Vec::new(),
            launches: sequence.map(LaunchRecord::all).unwrap_or_default(),
        }
    }
}

/// Reason for the chosen candidate.
fn why(all: &Explanation<'_>, taken: Option<usize>) -> String {
    let Some(place) = taken else { return "no family serves it".into() };
    let this = &all.considered[place];
    let bound = this.cost.bound().name();
    if all.chosen != taken {
        return format!("the caller chose it; bound by {bound}");
    }
    if let Some(measured) = this.measured {
        return format!("measured: {:.2} us, which overrules the cost model; bound by {bound}", measured * 1e6);
    }
    let next = all.considered.iter().enumerate().find(|(other, _)| *other != place);
    let Some((other, next)) = next else { return format!("the only candidate; bound by {bound}") };
    let difference = (next.cost.seconds / this.cost.seconds - 1.0) * 100.0;
    match other < place {
        // The scheduler accepts a slightly slower plan for exact weights, and ranks
        // batch-invariant plans for another M.
        true => format!(
            "within {:.1} % of the fastest expected, which rounds weights or is not the same for every batch; bound by {bound}",
            -difference
        ),
        false => format!("the lowest estimate, {difference:.1} % below the next; bound by {bound}"),
    }
}

fn prologue(plan: &LaunchPlan) -> Option<PrologueRecord> {
    if plan.workspace.dequantized.is_some() && plan.config.x_prologue.is_none() {
        let x_format = plan.config.x_format.name().to_owned();
        return Some(PrologueRecord { name: "dequantize_x".into(), x_format, row_factors: false });
    }
    if let Some(regions) = &plan.workspace.quantized {
        let x_format = regions.format.name().to_owned();
        return Some(PrologueRecord { name: "quantize_x".into(), x_format, row_factors: false });
    }
    match plan.config.x_prologue? {
        XPrologue::Convert { row_factors } => Some(PrologueRecord {
            name: if plan.workspace.dequantized.is_some() { "dequantize_x, convert_x" } else { "convert_x" }.into(),
            x_format: plan.config.x_format.name().to_owned(),
            row_factors,
        }),
        _ => None,
    }
}

/// Workspace of a product in bytes, including normalized rows of X.
fn workspace_end(op: &CheckedGemm, plan: &LaunchPlan) -> usize {
    op.normed_regions_of(plan).map_or(plan.workspace.bytes, |regions| regions.all().end)
}

/// Workspace regions of a product.
fn workspace(op: &CheckedGemm, plan: &LaunchPlan) -> Vec<WorkspaceRegion> {
    let layout = &plan.workspace;
    let mut regions = Vec::new();
    if layout.partial_bytes > 0 {
        let counters = plan.shared_tiles() as usize * size_of::<u32>();
        regions.push(WorkspaceRegion::new("counters", layout.counters, counters));
        regions.push(WorkspaceRegion::new("partials", layout.partials, layout.partial_bytes));
    }
    if let Some(x) = &layout.x {
        let bytes = x.x_of(x.rows);
        regions.push(WorkspaceRegion::new("x", bytes.start, bytes.len()));
        let factors = x.factors_of(x.rows);
        regions.extend(factors.map(|bytes| WorkspaceRegion::new("x_factors", bytes.start, bytes.len())));
    }
    if let Some(x) = &layout.quantized {
        let names = ["x_codes", "x_scales", "x_token_factors", "x_sums"];
        let all = names.iter().enumerate().map(|(plane, name)| (name, x.range(plane)));
        let present = all.filter(|(_, range)| !range.is_empty());
        regions.extend(present.map(|(name, range)| WorkspaceRegion::new(name, range.start, range.len())));
    }
    if let Some(x) = &layout.dequantized {
        let bytes = x.x_of(x.rows);
        regions.push(WorkspaceRegion::new("dequantized_x", bytes.start, bytes.len()));
    }
    let names = ["x_normed", "x_normed_scales", "x_normed_factors", "x_normed_sums"];
    if let Some(normed) = op.normed_regions_of(plan) {
        let all = names.iter().enumerate().map(|(plane, name)| (name, normed.range(plane)));
        let present = all.filter(|(_, range)| !range.is_empty());
        regions.extend(present.map(|(name, range)| WorkspaceRegion::new(name, range.start, range.len())));
    }
    regions
}

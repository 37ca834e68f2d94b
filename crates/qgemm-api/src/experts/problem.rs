//! Expert problem ([`ExpertProblem`]): assignment of rows to experts, and validation
//! into a [`CheckedExperts`].

use qgemm_formats::DType;
use qgemm_hal::{CheckedExperts, CheckedGemm, Combine, Dense, ExpertForm};
use qgemm_sched::Preferences;

use super::weights::{Experts, ExpertsShape};
use crate::error::Error;
use crate::gemm::Problem;
use crate::operand::check_dimension;

/// Grouped product of rows with the weights of their experts, for
/// [`Context::plan_experts`](crate::Context::plan_experts).
///
/// An index in device memory assigns the rows at every run:
///
/// - [contiguous](ExpertProblem::contiguous): rows sorted by expert; the index is
///   `E + 1` offsets, `u32`.
/// - [masked](ExpertProblem::masked): equal room per expert; the
///   index is `E` counts, `u32`.
/// - [indexed](ExpertProblem::indexed): `top_k` slots per token; the index is one
///   expert id per slot, `i32`.
///
/// Groups may have any size, even 0. A row of D is computed as by a [`Problem`] with
/// its expert's weight. [`ExpertProblem::each`] sets the rest of that problem:
/// types, bias (of all experts, concatenated), activation, strides.
///
/// An invalid index is harmless: its rows are skipped, and no memory outside is
/// touched. [`ExpertPlan::check_status`](crate::ExpertPlan::check_status) names
/// the first invalid entry.
///
/// ```
/// use qgemm_api::{Context, ExpertArgs, ExpertProblem, HostExperts, quantize};
///
/// // The first row goes to expert 0, the next two to expert 1.
/// let ctx = Context::open("cpu")?;
/// let expert = |value: f32| quantize(&[value; 32 * 64], 32, 64, "q8_0".parse()?).map(|(weight, _)| weight);
/// let experts = ctx.load_experts(&HostExperts::new(&[expert(0.5)?, expert(0.25)?])?)?;
/// let plan = ctx.plan_experts(&ExpertProblem::contiguous(&experts, 3))?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let (x, offsets) = (ctx.upload(&[1.0f32; 3 * 64])?, ctx.upload(&[0u32, 1, 3])?);
/// let (mut d, mut status) = (ctx.allocate(3 * 32 * 4)?, ctx.allocate(16)?);
/// let args = ExpertArgs::new(&x, &experts, &offsets, &mut d).status(&mut status).workspace(&mut workspace);
/// plan.run(&ctx.default_stream(), args)?;
/// plan.check_status(&ctx, &status)?;
/// assert!((ctx.download::<f32>(&d)?[32] - 16.0).abs() < 0.1);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ExpertProblem {
    shape: ExpertsShape,
    each: Problem,
    form: ExpertForm,
    combined: bool,
    checks_index: bool,
    lists: bool,
    index_ready: bool,
    /// Experts that rows are routed to, where these are some of them.
    routed_to: Option<usize>,
}

impl ExpertProblem {
    /// Contiguous form: at most `rows` rows, sorted by expert. Rows of D outside
    /// all groups are not written.
    pub fn contiguous(experts: &Experts, rows: usize) -> Self {
        Self::new(experts, rows, ExpertForm::Contiguous)
    }

    /// Masked form: `capacity` rows per expert, of which the first ones are used.
    /// The others are neither computed nor written.
    pub fn masked(experts: &Experts, capacity: usize) -> Self {
        Self::new(experts, experts.experts().saturating_mul(capacity), ExpertForm::Masked { capacity })
    }

    /// Indexed form: `tokens` rows of X with `top_k` experts each. D has one row
    /// per slot, in token order.
    pub fn indexed(experts: &Experts, tokens: usize, top_k: usize) -> Self {
        Self::new(experts, tokens.saturating_mul(top_k), ExpertForm::Indexed { top_k, x_per_slot: false })
    }

    fn new(experts: &Experts, rows: usize, form: ExpertForm) -> Self {
        Self::of_shape(*experts.shape(), rows, form)
    }

    pub(crate) fn of_shape(shape: ExpertsShape, rows: usize, form: ExpertForm) -> Self {
        Self {
            shape,
            each: Problem::of_shape(shape.each, rows),
            form,
            combined: false,
            checks_index: true,
            lists: false,
            index_ready: false,
            routed_to: None,
        }
    }

    /// Sets the options of each row's [`Problem`]: `problem.each(|p|
    /// p.x_dtype(DType::F16).bias(DType::F32))`.
    ///
    /// [`Problem::token_scale`] is a factor per row of D. X cannot be transposed.
    pub fn each(mut self, state: impl FnOnce(Problem) -> Problem) -> Self {
        self.each = state(self.each);
        self
    }

    /// X has one row per slot, in token order. Only for [`ExpertProblem::indexed`].
    pub fn x_per_slot(mut self) -> Self {
        if let ExpertForm::Indexed { x_per_slot, .. } = &mut self.form {
            *x_per_slot = true;
        }
        self
    }

    /// Combines slots: D has one row per token, the sum of its slots
    /// times their router weights.
    ///
    /// Slots are summed in order in f32; an optional residual is added last. Only for
    /// [`ExpertProblem::indexed`].
    pub fn combined(mut self) -> Self {
        self.combined = true;
        self
    }

    /// Takes the slot list of each expert from a [`Routing`](crate::Routing):
    /// see [`ExpertArgs::lists`](crate::ExpertArgs::lists).
    ///
    /// It saves a launch on GPUs when slots are grouped by expert. Only for
    /// [`ExpertProblem::indexed`].
    pub fn listed(mut self) -> Self {
        self.lists = true;
        self
    }

    /// Promises that the index and its lists are ready before a run is submitted (or its
    /// captured graph is launched).
    ///
    /// On Hopper and newer, kernels of single slots and of lists can then prefetch weights
    /// before preceding work in the stream has finished.
    pub fn index_ready(mut self) -> Self {
        self.index_ready = true;
        self
    }

    /// Skips the check of the index, e.g. because another run or a routing did it.
    /// Invalid rows are still skipped; the status is not written.
    pub fn unchecked(mut self) -> Self {
        self.checks_index = false;
        self
    }

    /// Expects slots among `experts` experts, of which these are some, as in expert
    /// parallelism ([`Routing::local`](crate::Routing::local)). It changes only the
    /// expected time, by which kernels are chosen.
    pub fn routed_to(mut self, experts: usize) -> Self {
        self.routed_to = Some(experts);
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedExperts, Error> {
        let &Self { ref each, form, combined, lists, .. } = self;
        let refuse = |what, why| Err(Error::NotForExperts { what, why });
        if each.is_transposed() {
            return refuse("a transposed X", "rows are given to experts; convert X first (Context::plan_conversion)");
        }
        if let ExpertForm::Indexed { top_k, .. } = form {
            check_dimension("slots of a token", top_k)?;
            if top_k == 0 {
                return refuse("top_k = 0", "each token has at least one slot");
            }
        }
        if lists && !matches!(form, ExpertForm::Indexed { .. }) {
            return refuse("lists", "only the indexed form has slots to list");
        }
        let mut each = each.check()?;
        if each.norm.is_some() && each.x.planes.is_some() {
            return refuse("a norm that writes codes", "normalize X first (Context::plan_norm, Norm::d_format)");
        }
        if each.residual_in_d {
            return refuse("a residual in D", "give the residual as an operand of its own");
        }
        let combine = match (combined, form) {
            (false, _) => None,
            (true, ExpertForm::Indexed { .. }) => {
                if each.c.is_some() {
                    return refuse("C with combined slots", "add a residual to the sum");
                }
                let combine = Combine { d: each.d, residual: each.residual };
                each = CheckedGemm { d: Dense::rows_of(DType::F32, each.out_features), residual: None, ..each };
                Some(combine)
            }
            (true, _) => return refuse("combining slots", "only the indexed form knows a row's token"),
        };
        let ExpertsShape { experts, row_pitch, .. } = self.shape;
        let (checks_index, index_ready) = (self.checks_index, self.index_ready);
        let routed_to = self.routed_to.unwrap_or(experts).max(experts);
        check_dimension("experts that rows are routed to", routed_to)?;
        let op =
            CheckedExperts { each, experts, routed_to, row_pitch, form, combine, checks_index, lists, index_ready };
        if lists && op.list_parts().is_none() {
            return refuse("lists", "they are longer than memory has addresses");
        }
        Ok(op)
    }

    pub(crate) fn preferences(&self) -> &Preferences {
        self.each.preferences()
    }

    /// Form of the index. Combined slots are indexed.
    pub(crate) fn form(&self) -> ExpertForm {
        self.form
    }

    /// Product of each row.
    pub(crate) fn each_problem(&self) -> &Problem {
        &self.each
    }

    pub(crate) fn shape(&self) -> &ExpertsShape {
        &self.shape
    }
}

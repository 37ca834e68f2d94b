//! [`ExpertProblem`]: which rows are multiplied with which experts, and its validation into a [`CheckedExperts`].

use qgemm_formats::DType;
use qgemm_hal::{CheckedExperts, CheckedGemm, Combine, Dense, ExpertForm};
use qgemm_sched::Preferences;

use super::weights::{Experts, ExpertsShape};
use crate::error::Error;
use crate::gemm::Problem;
use crate::operand::check_dimension;

/// Products of rows with the weights of the experts that they are given to, described for
/// [`Context::plan_experts`](crate::Context::plan_experts). Which rows are whose, an index in device memory says at every run:
///
/// - [contiguous](ExpertProblem::contiguous): rows are sorted by expert; the index has `E + 1` offsets, `u32`.
/// - [masked](ExpertProblem::masked): each expert has room for as many rows; the index has `E` counts, `u32`.
/// - [indexed](ExpertProblem::indexed): each token has `top_k` slots; the index has the id of each slot's expert, `i32`.
///
/// Groups may have any size, none among them. Each row of D is computed as by a [`Problem`] with the weight of its expert; what else
/// that has, [`ExpertProblem::each`] states: types, bias (those of all experts, one after the other), activation, strides.
///
/// An index that is wrong does no harm: rows that it concerns are left out, memory outside is not touched, and
/// [`ExpertPlan::check_status`](crate::ExpertPlan::check_status) names the first of them.
#[derive(Clone, Debug)]
pub struct ExpertProblem {
    shape: ExpertsShape,
    each: Problem,
    form: ExpertForm,
    combined: bool,
    checks_index: bool,
    lists: bool,
    settled_index: bool,
}

impl ExpertProblem {
    /// At most `rows` rows, sorted by expert. Rows of D that no expert has stay as they are.
    pub fn contiguous(experts: &Experts, rows: usize) -> Self {
        Self::new(experts, rows, ExpertForm::Contiguous)
    }

    /// `capacity` rows for each expert, of which it uses the first ones. The others are neither multiplied nor written.
    pub fn masked(experts: &Experts, capacity: usize) -> Self {
        Self::new(experts, experts.experts().saturating_mul(capacity), ExpertForm::Masked { capacity })
    }

    /// `tokens` rows of X, each multiplied with `top_k` experts. D has a row for each slot, those of a token one after the
    /// other.
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
            settled_index: false,
        }
    }

    /// States what a [`Problem`] has beside weight and tokens: `problem.each(|p| p.x_dtype(DType::F16).bias(DType::F32))`.
    /// [`Problem::token_scale`] is a factor for each row of D. X cannot be transposed.
    pub fn each(mut self, state: impl FnOnce(Problem) -> Problem) -> Self {
        self.each = state(self.each);
        self
    }

    /// X has a row for each slot, those of a token one after the other. Only of [`ExpertProblem::indexed`].
    pub fn x_per_slot(mut self) -> Self {
        if let ExpertForm::Indexed { x_per_slot, .. } = &mut self.form {
            *x_per_slot = true;
        }
        self
    }

    /// D has a row for each token: the sum of its slots, each times its router weight, in their order and in f32; then the
    /// residual, if there is one, is added. Only of [`ExpertProblem::indexed`].
    pub fn combined(mut self) -> Self {
        self.combined = true;
        self
    }

    /// A run is also given the slots of each expert, as a [`Routing`](crate::Routing) lists them: see
    /// [`ExpertArgs::lists`](crate::ExpertArgs::lists). That spares GPUs a launch where slots are multiplied expert by expert. Only of
    /// [`ExpertProblem::indexed`].
    pub fn listed(mut self) -> Self {
        self.lists = true;
        self
    }

    /// The index, with its lists, is there before a run is submitted, or the graph is launched that it was captured in. Where slots are
    /// multiplied each by itself, or many by lists, kernels on Hopper and newer then ask for weights before the work ahead of them in the
    /// stream is done.
    pub fn settled_index(mut self) -> Self {
        self.settled_index = true;
        self
    }

    /// Does not look for what is wrong with the index: another run with the same index does, or a routing made it. Rows that it concerns are left out all the same; the status stays as it is.
    pub fn unchecked(mut self) -> Self {
        self.checks_index = false;
        self
    }

    /// Validates everything that does not depend on the buffers of a run.
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
        let (checks_index, settled_index) = (self.checks_index, self.settled_index);
        let op = CheckedExperts { each, experts, row_pitch, form, combine, checks_index, lists, settled_index };
        if lists && op.list_parts().is_none() {
            return refuse("lists", "they are longer than memory has addresses");
        }
        Ok(op)
    }

    pub(crate) fn preferences(&self) -> &Preferences {
        self.each.preferences()
    }

    /// Which rows are whose; with slots added up, the form is indexed.
    pub(crate) fn form(&self) -> ExpertForm {
        self.form
    }

    /// The product of each row.
    pub(crate) fn each_problem(&self) -> &Problem {
        &self.each
    }

    pub(crate) fn shape(&self) -> &ExpertsShape {
        &self.shape
    }
}

//! Linear layer ([`Linear`]) that plans per number of tokens.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use qgemm_hal::{BufferMut, Stream};

use super::plan::{Args, Plan};
use super::problem::Problem;
use super::x::XRef;
use crate::context::Context;
use crate::error::Error;
use crate::plans_by_tokens::{Found, PlansByTokens};
use crate::weight::Weight;

/// Linear layer for any number of tokens: a weight with its epilogue, planned once per
/// M. Made by [`Context::layer`].
///
/// ```
/// use qgemm_api::{Activation, Context, DType, quantize};
///
/// let ctx = Context::open("cpu")?;
/// let weight = ctx.load(&quantize(&[0.25; 64 * 128], 64, 128, "q8_0".parse()?)?.0)?;
/// let up = ctx.layer(&weight, |problem| problem.bias(DType::F32).activation(Activation::Relu))?;
///
/// // Before the first request: plans are made, kernels ready, and one workspace serves all of them.
/// let mut workspace = ctx.workspace(up.prepare(1..=32)?)?;
///
/// let (bias, stream) = (ctx.upload(&[3.0f32; 64])?, ctx.default_stream());
/// for m in [1, 7, 32] {
///     let x = ctx.upload(&vec![1.0f32; m * 128])?;
///     let mut d = ctx.allocate(m * 64 * 4)?;
///     up.run(&stream, m, up.args(&x, &mut d).bias(&bias).workspace(&mut workspace))?;
///     assert!(ctx.download::<f32>(&d)?.iter().all(|v| (v - 35.0).abs() < 0.1));
/// }
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Plans
/// Finding an existing plan takes a few loads and no lock: always for up to 256 tokens,
/// and for the first two thousand or so larger M. Further M go through the context's
/// cache, which has a lock and evicts the least recently used. Layers of one context
/// with equal problems share plans, even with different weights.
#[derive(Clone)]
pub struct Linear {
    ctx: Context,
    weight: Weight,
    problem: Problem,
    plans: Arc<PlansByTokens<Plan>>,
}

impl Linear {
    pub(crate) fn new(ctx: &Context, weight: &Weight, problem: Problem) -> Result<Self, Error> {
        let (expected, got) = (problem.weight(), weight.shape());
        if expected != got {
            return Err(Error::WrongWeight { expected: expected.to_string(), got: got.to_string() });
        }
        // Most errors do not depend on M.
        problem.with_m(1).check()?;
        let plans = ctx.plan_caches().layers.of(&problem);
        Ok(Self { ctx: ctx.clone(), weight: weight.clone(), problem, plans })
    }

    /// Weight of the layer.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// Plans for these numbers of tokens and makes the kernels ready, which may compile
    /// them. Returns the workspace bytes for all of them.
    ///
    /// # Errors
    /// As [`Context::plan`].
    pub fn prepare(&self, tokens: impl IntoIterator<Item = usize>) -> Result<usize, Error> {
        tokens.into_iter().try_fold(0, |bytes, m| Ok(bytes.max(self.plan(m)?.workspace_bytes())))
    }

    /// Plan for `m` tokens, made on first use.
    ///
    /// # Errors
    /// As [`Context::plan`].
    pub fn plan(&self, m: usize) -> Result<impl Deref<Target = Plan> + '_, Error> {
        match self.plans.get(m) {
            Some(plan) => Ok(Found::Kept(plan)),
            None => Ok(self.plans.keep(m, self.ctx.plan(&self.problem.with_m(m))?)),
        }
    }

    /// Required operands of a run. Optional ones are added as in [`Args::new`].
    pub fn args<'a>(&'a self, x: impl Into<XRef<'a>>, d: impl Into<BufferMut<'a>>) -> Args<'a> {
        Args::new(x, &self.weight, d)
    }

    /// Submits the product of `m` tokens to `stream`.
    ///
    /// After [`Linear::prepare`] of this `m` it costs the same as [`Plan::run`] and may be
    /// captured in a CUDA graph. A new `m` is planned first.
    ///
    /// # Errors
    /// As [`Context::plan`] and [`Plan::run`].
    pub fn run(&self, stream: &Stream, m: usize, args: Args<'_>) -> Result<(), Error> {
        self.plan(m)?.run(stream, args)
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Linear").field("weight", &self.weight).field("problem", &self.problem).finish_non_exhaustive()
    }
}

/// Plans of all layers of a context, by problem.
#[derive(Default)]
pub(crate) struct LayerPlans {
    all: Mutex<Vec<(Problem, Weak<PlansByTokens<Plan>>)>>,
}

impl LayerPlans {
    /// Plans of `problem` for every M.
    fn of(&self, problem: &Problem) -> Arc<PlansByTokens<Plan>> {
        let key = problem.with_m(0);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, plans)| plans.strong_count() > 0);
        if let Some(known) = all.iter().find(|(other, _)| other.is_same(&key)).and_then(|(_, plans)| plans.upgrade()) {
            return known;
        }
        let plans = Arc::new(PlansByTokens::new());
        all.push((key, Arc::downgrade(&plans)));
        plans
    }
}

impl fmt::Debug for LayerPlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerPlans").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qgemm_formats::DType;

    use crate::plans_by_tokens::SHARED_SLOTS;

    fn layer() -> Linear {
        let ctx = Context::open("noop").expect("always there");
        let weight = ctx.load_dense(&[0; 4 * 64], DType::F32, 2, 32, Default::default()).expect("memory");
        ctx.layer(&weight, |problem| problem.x_dtype(DType::F16)).expect("valid")
    }

    #[test]
    fn a_plan_is_made_once_and_found_without_a_lock() {
        let layer = layer();
        for m in [0, 1, 256, 257, 4096, 1 << 20] {
            assert!(layer.plans.get(m).is_none(), "{m}");
            let first: *const Plan = &*layer.plan(m).expect("valid");
            assert!(layer.plans.get(m).is_some_and(|plan| std::ptr::eq(plan, first) && plan.op().m == m), "{m}");
            assert!(std::ptr::eq(&*layer.plan(m).expect("valid"), first), "{m}");
        }
    }

    #[test]
    fn places_are_bounded_and_what_finds_none_is_planned_all_the_same() {
        let layer = layer();
        let far = 100_000..100_000 + 2 * SHARED_SLOTS;
        layer.prepare(far.clone()).expect("valid");
        let kept = far.clone().filter(|&m| layer.plans.get(m).is_some()).count();
        assert!((SHARED_SLOTS / 2..=SHARED_SLOTS).contains(&kept), "{kept}");
        let beyond = far.clone().find(|&m| layer.plans.get(m).is_none()).expect("more than there are places");
        assert_eq!(layer.plan(beyond).expect("valid").op().m, beyond);
        // Decode batch sizes have fixed slots.
        assert!(layer.plan(7).is_ok() && layer.plans.get(7).is_some());
    }

    #[test]
    fn equal_problems_share_their_plans_and_others_do_not() {
        let layer = layer();
        let (ctx, weight) = (&layer.ctx, &layer.weight);
        let of = |describe: fn(Problem) -> Problem| ctx.layer(weight, describe).expect("valid").plans;
        assert!(Arc::ptr_eq(&of(|p| p.x_dtype(DType::F16)), &layer.plans));
        assert!(!Arc::ptr_eq(&of(|p| p.x_dtype(DType::F16).alpha(2.0)), &layer.plans));
        assert!(!Arc::ptr_eq(&of(|p| p.alpha(0.0)), &of(|p| p.alpha(-0.0))));
        assert!(!Arc::ptr_eq(&of(|p| p.x_transposed()), &of(|p| p.x_transposed().x_row_stride(1))));
    }

    #[test]
    fn what_is_wrong_for_every_m_is_found_at_once() {
        let layer = layer();
        let wrong = layer.ctx.layer(&layer.weight, |p| p.d_row_stride(1));
        assert!(matches!(wrong, Err(Error::StrideTooSmall { operand: "D", .. })), "{wrong:?}");
        let other = layer.ctx.load_dense(&[0; 4 * 32], DType::F32, 1, 32, Default::default()).expect("memory");
        let wrong = layer.ctx.layer(&layer.weight, |_| Problem::new(&other, 0));
        assert!(matches!(wrong, Err(Error::WrongWeight { .. })), "{wrong:?}");
    }
}

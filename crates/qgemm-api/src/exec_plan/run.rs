//! Execution of a loaded plan's operations between products.

use qgemm_hal::{Buffer, BufferRef, Stream};

use super::arena::PlanArena;
use super::load::LoadedPlan;
use crate::attention::AttentionArgs;
use crate::error::Error;
use crate::kv_append::KvAppendArgs;
use crate::norm::NormArgs;
use crate::optimizer::OptimizerArgs;

impl LoadedPlan {
    /// Submits one `norm` to `stream`, in `arena`. Gamma and beta are the model's, by
    /// the plan's [`norm`](super::PlannedOp::norm).
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or
    /// is no `norm`. As [`NormPlan::run`](crate::NormPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_norm(
        &self,
        stream: &Stream,
        op_id: &str,
        arena: &mut PlanArena,
        gamma: &Buffer,
        beta: Option<&Buffer>,
    ) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "norm")?;
        let plan = self.ctx.plan_norm(&op.as_norm()?)?;
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        // In place, X has an empty range.
        let is_in_place = op.x == op.d;
        let x = if is_in_place { 0..0 } else { arena.range(&op.x)? };
        let ([x], [d]) = arena.parts([x], [arena.range(&op.d)?])?;
        let mut args = NormArgs::in_place(d).gamma(gamma);
        args.x = (!is_in_place).then_some(x);
        args.beta = beta.map(BufferRef::from);
        plan.run(stream, args)?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `kv_append` to `stream`, in `arena`: rotates queries in place, and
    /// writes keys and values to the cache.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no
    /// `kv_append`. As [`KvAppendPlan::run`](crate::KvAppendPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_kv_append(&self, stream: &Stream, op_id: &str, arena: &mut PlanArena) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "kv_append")?;
        let (plan, heads) = (self.ctx.plan_kv_append(&op.as_kv_append()?)?, op.of_heads()?);
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let given = |name: &Option<String>| name.as_deref().map_or(Ok(0..0), |name| arena.range(name));
        let read = [given(&heads.new_k)?, given(&heads.new_v)?, given(&heads.lengths)?];
        let write = [arena.range(&op.x)?, arena.range(&heads.k)?, arena.range(&heads.v)?];
        let ([new_k, new_v, lengths], [q, k, v]) = arena.parts(read, write)?;
        let mut args = KvAppendArgs::new(new_k, new_v, k, v).q(q);
        args.kv_lengths = heads.lengths.is_some().then_some(lengths);
        plan.run(stream, args)?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `attention` to `stream`, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no
    /// `attention`. As [`AttentionPlan::run`](crate::AttentionPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_attention(&self, stream: &Stream, op_id: &str, arena: &mut PlanArena) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "attention")?;
        let (plan, heads) = (self.ctx.plan_attention(&op.as_attention()?)?, op.of_heads()?);
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let lengths = heads.lengths.as_deref().map_or(Ok(0..0), |name| arena.range(name))?;
        let read = [arena.range(&op.x)?, arena.range(&heads.k)?, arena.range(&heads.v)?, lengths];
        let write = [arena.range(&op.d)?, arena.workspace(plan.workspace_bytes())?];
        let ([q, k, v, lengths], [d, workspace]) = arena.parts(read, write)?;
        let mut args = AttentionArgs::new(q, k, v, d);
        args.kv_lengths = heads.lengths.is_some().then_some(lengths);
        plan.run_within(stream, args, Some(workspace))?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `optimizer` to `stream`, in `arena`. The caller writes the numbers
    /// of [`OptimizerPlan::step`](crate::OptimizerPlan::step) to the step's region first.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no
    /// `optimizer`. As [`OptimizerPlan::run`](crate::OptimizerPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_optimizer(&self, stream: &Stream, op_id: &str, arena: &mut PlanArena) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "optimizer")?;
        let (plan, of) = (self.ctx.plan_optimizer(&op.as_optimizer()?)?, op.of_optimizer()?);
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let read = [arena.range(&op.x)?, arena.range(&of.step)?];
        let write = [arena.range(&op.d)?, arena.range(&of.moment1)?, arena.range(&of.moment2)?];
        let ([gradient, step], [weights, moment1, moment2]) = arena.parts(read, write)?;
        plan.run(stream, OptimizerArgs::new(weights, gradient, step).moment1(moment1).moment2(moment2))?;
        arena.check(device, stream, op_id)
    }
}

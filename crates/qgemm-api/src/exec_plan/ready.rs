//! Ready kernels of a loaded plan's operations.

use std::sync::OnceLock;

use qgemm_hal::Collective;

use super::check::OpChecks;
use super::file::PlannedOp;
use crate::attention::AttentionPlan;
use crate::context::Context;
use crate::error::Error;
use crate::experts::ExpertPlan;
use crate::gather_rows::GatherRowsPlan;
use crate::gemm::{Candidate, Plan};
use crate::gradient::GradientPlan;
use crate::kv_append::KvAppendPlan;
use crate::linear_attention::LinearAttentionPlan;
use crate::matmul::MatmulPlan;
use crate::norm::NormPlan;
use crate::optimizer::OptimizerPlan;
use crate::routing::RoutingPlan;
use crate::sampling::SamplingPlan;
use crate::short_conv::ShortConvPlan;

/// Kernels of an operation, once they are ready. Alike operations share them.
#[derive(Debug)]
pub(super) struct Kernels {
    /// Chosen kernel of a product.
    pub candidate: Option<Candidate>,
    ready: OnceLock<Ready>,
}

/// Plan of an operation.
#[derive(Debug)]
pub(super) enum Ready {
    Gemm(Plan),
    Experts(ExpertPlan),
    Gradient(GradientPlan),
    Matmul(MatmulPlan),
    Routing(RoutingPlan),
    Norm(NormPlan),
    KvAppend(KvAppendPlan),
    Attention(AttentionPlan),
    ShortConv(ShortConvPlan),
    LinearAttention(LinearAttentionPlan),
    Optimizer(OptimizerPlan),
    GatherRows(GatherRowsPlan),
    Sampling(SamplingPlan),
    Collective(Collective),
}

impl Kernels {
    pub fn new(candidate: Option<Candidate>) -> Self {
        Self { candidate, ready: OnceLock::new() }
    }

    /// Whether the kernels are ready.
    pub fn is_ready(&self) -> bool {
        self.ready.get().is_some()
    }

    /// The plan of `op`. The first call makes its kernels ready.
    ///
    /// # Errors
    /// When a kernel cannot be made ready.
    pub fn ready(&self, ctx: &Context, op: &PlannedOp) -> Result<&Ready, Error> {
        if let Some(ready) = self.ready.get() {
            return Ok(ready);
        }
        let ready = self.plan(ctx, op)?;
        Ok(self.ready.get_or_init(|| ready))
    }

    fn plan(&self, ctx: &Context, op: &PlannedOp) -> Result<Ready, Error> {
        if let Some(candidate) = &self.candidate {
            return Ok(Ready::Gemm(ctx.plan_candidate(candidate)?));
        }
        let checks = OpChecks { ctx, place: 0, at: op.op_id.clone(), op };
        match (op.operation.as_str(), &op.weight) {
            ("experts", Some(weight)) => Ok(Ready::Experts(ctx.plan_experts(&checks.experts_of(weight)?.0)?)),
            ("gradient", Some(weight)) => {
                let (through, _) = checks.through(weight)?;
                Ok(Ready::Gradient(ctx.plan_gradient_by(&through, &op.as_gradient()?)?))
            }
            ("gather_rows", Some(weight)) => {
                Ok(Ready::GatherRows(ctx.plan_gather_rows(&op.as_gather_rows(&checks.weight(weight)?)?)?))
            }
            ("matmul", _) => Ok(Ready::Matmul(ctx.plan_matmul(&op.as_matmul()?)?)),
            ("routing", _) => Ok(Ready::Routing(ctx.plan_routing(&op.as_routing()?)?)),
            ("norm", _) => Ok(Ready::Norm(ctx.plan_norm(&op.as_norm()?)?)),
            ("kv_append", _) => Ok(Ready::KvAppend(ctx.plan_kv_append(&op.as_kv_append()?)?)),
            ("attention", _) => Ok(Ready::Attention(ctx.plan_attention(&op.as_attention()?)?)),
            ("short_conv", _) => Ok(Ready::ShortConv(ctx.plan_short_conv(&op.as_short_conv()?)?)),
            ("linear_attention", _) => {
                Ok(Ready::LinearAttention(ctx.plan_linear_attention(&op.as_linear_attention()?)?))
            }
            ("sampling", _) => Ok(Ready::Sampling(ctx.plan_sampling(&op.as_sampling())?)),
            ("all_reduce" | "all_gather", _) => Ok(Ready::Collective(op.as_collective()?)),
            ("optimizer", _) => Ok(Ready::Optimizer(ctx.plan_optimizer(&op.as_optimizer()?)?)),
            _ => Err(Error::NotInPlan { what: "kernel", name: op.op_id.clone() }),
        }
    }
}

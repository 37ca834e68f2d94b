//! Problems from plan-file operations: gradients, routing, matmuls, expert rows.

use qgemm_formats::DType;
use qgemm_hal::Scoring;

use super::backward::weight_gradient;
use super::file::{PlannedOp, PlannedWeight};
use super::mismatch::wrong;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::gather_rows::GatherRows;
use crate::gradient::Gradient;
use crate::matmul::Matmul;
use crate::record::Sizes;
use crate::routing::Routing;
use crate::sampling::Sampling;

impl PlannedOp {
    /// Problem of a `gradient`.
    pub(super) fn as_gradient(&self) -> Result<Gradient, Error> {
        let gradient = Gradient::new(self.shape.m, self.x_dtype.parse()?, self.d_dtype.parse()?);
        Ok(if self.residual.is_some() { gradient.accumulate(1.0) } else { gradient })
    }

    /// Problem of a `gather_rows` from a table.
    pub(super) fn as_gather_rows(&self, table: &DescribedWeight) -> Result<GatherRows, Error> {
        let gather = GatherRows::of_described(table, self.shape.m).d_dtype(self.d_dtype.parse()?);
        Ok(self.scale.into_iter().fold(gather, GatherRows::scale))
    }

    /// Problem of a `sampling`.
    pub(super) fn as_sampling(&self) -> Sampling {
        Sampling::new(self.shape.m, self.shape.n)
    }

    /// Problem of a `routing`.
    pub(super) fn as_routing(&self) -> Result<Routing, Error> {
        let routing = Routing::from_logits(self.shape.m, self.shape.n, self.top_k.unwrap_or(0), DType::F32);
        let routing = match &self.scoring {
            None => routing,
            Some(stated) => {
                let known = Scoring::ALL.into_iter().find(|known| known.name() == stated);
                routing.scoring(
                    known.ok_or_else(|| wrong("scoring", &Scoring::ALL.map(Scoring::name).join(", "), stated))?,
                )
            }
        };
        let routing = match &self.local_experts {
            Some(local) => routing.local(local.experts()?),
            None => routing,
        };
        Ok(if self.renormalized == Some(true) { routing.renormalized() } else { routing })
    }

    /// Problem of a `matmul`.
    pub(super) fn as_matmul(&self) -> Result<Matmul, Error> {
        let Sizes { m, n, k } = self.shape;
        let b = self.b_dtype.as_deref();
        let b = b.ok_or_else(|| Error::NotInPlan { what: "type of B of", name: self.op_id.clone() })?;
        Ok(weight_gradient([m, n, k], self.products, self.x_dtype.parse()?, b.parse()?))
    }

    /// Tokens of an experts operation, and slots per token.
    pub(super) fn slots(&self) -> (usize, usize) {
        let top_k = self.top_k.unwrap_or(0);
        (self.shape.m.checked_div(top_k).unwrap_or(0), top_k)
    }

    /// Whether two operations are equal except for names and regions.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        let (a, b) = (self, other);
        let weight = |w: &Option<PlannedWeight>| {
            w.as_ref().map(|w| PlannedWeight {
                region: String::new(),
                tensors: Vec::new(),
                rows: Vec::new(),
                shards: Vec::new(),
                ..w.clone()
            })
        };
        let types = |op: &PlannedOp| {
            [&op.x_dtype, &op.x_precision, &op.d_dtype, &op.activation]
                .map(String::clone)
                .into_iter()
                .chain(op.bias_dtype.clone())
                .collect::<Vec<_>>()
        };
        let segments = |op: &PlannedOp| op.segments.iter().map(|s| (s.first, s.features)).collect::<Vec<_>>();
        let same_options = |a: &Option<String>, b: &Option<String>| a.is_some() == b.is_some();
        (&a.operation, &a.kernel_id, &a.source_hash, a.shape) == (&b.operation, &b.kernel_id, &b.source_hash, b.shape)
            && (a.batch_invariant, a.renormalized, &a.scoring) == (b.batch_invariant, b.renormalized, &b.scoring)
            && types(a) == types(b)
            && same_options(&a.residual, &b.residual)
            && same_options(&a.offsets, &b.offsets)
            && same_options(&a.status, &b.status)
            && (&a.local_experts, a.routed_to) == (&b.local_experts, b.routed_to)
            && (a.products, a.scale, &a.columns) == (b.products, b.scale, &b.columns)
            && a.b_dtype == b.b_dtype
            && same_options(&a.router_weights, &b.router_weights)
            && (a.top_k, &a.dispatch, &a.reduction) == (b.top_k, &b.dispatch, &b.reduction)
            && a.workspace_bytes == b.workspace_bytes
            && weight(&a.weight) == weight(&b.weight)
            && segments(a) == segments(b)
            && a.numbers_between() == b.numbers_between()
            && a.recurrent_numbers() == b.recurrent_numbers()
            && a.rotation == b.rotation
    }
}

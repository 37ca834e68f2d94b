//! What follows attention in a layer: products alone, or with experts that a router chooses.

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};

use super::architecture::{FeedForward, Matrix};
use super::build::{Buffer, Builder, Product, Routed, op, too_large};
use super::file::{PlannedOp, RegionKind};
use crate::error::Error;
use crate::record::Sizes;
use crate::routing::Routing;

/// Bytes that a routing's status has.
const ROUTING_STATUS_BYTES: usize = 16;

impl Builder<'_> {
    /// The part behind attention; `x` is its input, `residual` what its result is added to.
    pub(super) fn feed_forward(
        &mut self,
        i: usize,
        part: &FeedForward,
        x: Buffer,
        residual: Buffer,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let activation = self.network.activation;
        let out = |builder: &Self, columns| match builder.network.pre_norm {
            true => builder.activation(&format!("hidden.{}", i + 1), columns),
            false => builder.activation(&id("ffn_residual"), columns),
        };
        match part {
            FeedForward::Dense { gate, up, down } => {
                let inner = self.inner(i, gate.as_ref(), up, x, activation, None)?;
                let d = out(self, down.n);
                let product = Product::new(id("ffn_down"), down, inner, d.clone());
                self.product(Product { residual: Some(residual), ..product })?;
                Ok(d)
            }
            FeedForward::Experts { .. } if self.options.train => {
                Err(Error::NoTrainingPlan { why: "there are no gradients through the choice of experts" })
            }
            FeedForward::Experts { router, gate, up, down, experts, top_k } => {
                let (experts, top_k) = (*experts, *top_k);
                let logits = Buffer {
                    dtype: DType::F32,
                    kind: RegionKind::Temporary,
                    ..self.activation(&id("router_logits"), router.n)
                };
                self.product(Product::new(id("ffn_router"), router, x.clone(), logits.clone()))?;
                let (ids, weights) = (id("router_ids"), id("router_weights"));
                self.routing(i, logits, experts, top_k, [&ids, &weights])?;
                let routed = |weights| Routed { experts, top_k, ids: &ids, weights };
                let inner = self.inner(i, Some(gate), up, x, activation, Some(&|| routed(None)))?;
                let d = out(self, down.n);
                let product = Product::new(id("ffn_down"), down, inner, d.clone());
                let routed = Some(routed(Some(&weights)));
                self.product(Product { residual: Some(residual), routed, ..product })?;
                Ok(d)
            }
        }
    }

    /// What the feed-forward part has between its products.
    fn inner<'p>(
        &mut self,
        i: usize,
        gate: Option<&'p Matrix>,
        up: &'p Matrix,
        x: Buffer,
        activation: Activation,
        routed: Option<&dyn Fn() -> Routed<'p>>,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let routed = || routed.map(|routed| routed());
        let slots = routed().map_or(1, |routed| routed.top_k);
        let rows = self.options.batch.checked_mul(slots).ok_or_else(too_large)?;
        let train = self.options.train;
        let temporary = |builder: &Self, role: &str| Buffer {
            kind: if train { RegionKind::Activation } else { RegionKind::Temporary },
            rows,
            ..builder.activation(&id(role), up.n)
        };
        let d = temporary(self, "ffn");
        // The backward phase wants what the activation was computed from.
        let fused = if train { Activation::Identity } else { activation };
        match gate {
            None if train => {
                let upped = temporary(self, "ffn_upped");
                self.product(Product::new(id("ffn_up"), up, x, upped.clone()))?;
                return self.caller(&id("ffn"), activation.name(), &[upped], |_| d);
            }
            None => {
                let product = Product::new(id("ffn_up"), up, x, d.clone());
                self.product(Product { activation, routed: routed(), ..product })?;
            }
            Some(gate) if gate.is_like(up) && !train => {
                let product = Product::new(id("ffn_gate_up"), gate, x, d.clone());
                self.product(Product { activation, up: Some(up), routed: routed(), ..product })?;
            }
            // Weights of two formats are no pair, and no gradient goes through one: two products, which the caller multiplies.
            Some(gate) => {
                let (gated, upped) = (temporary(self, "ffn_gated"), temporary(self, "ffn_upped"));
                let product = Product::new(id("ffn_gate"), gate, x.clone(), gated.clone());
                self.product(Product { activation: fused, routed: routed(), ..product })?;
                let product = Product::new(id("ffn_up"), up, x, upped.clone());
                self.product(Product { routed: routed(), ..product })?;
                let step = if train { format!("{} and multiply", activation.name()) } else { "multiply".into() };
                return self.caller(&id("ffn"), &step, &[gated, upped], |_| d);
            }
        }
        Ok(d)
    }

    fn routing(
        &mut self,
        i: usize,
        logits: Buffer,
        experts: usize,
        top_k: usize,
        [ids, weights]: [&str; 2],
    ) -> Result<(), Error> {
        let batch = self.options.batch;
        let routing = Routing::from_logits(batch, experts, top_k, DType::F32).renormalized();
        let record = self.ctx.explain_routing(&routing)?;
        self.out.uses(&logits.name, logits.kind, logits.bytes()?);
        let d = Buffer {
            name: ids.to_owned(),
            kind: RegionKind::Temporary,
            rows: batch,
            columns: top_k,
            dtype: DType::F32,
        };
        self.out.uses(weights, RegionKind::Temporary, d.bytes()?);
        let status = format!("blk.{i}.router_status");
        self.out.uses(&status, RegionKind::Temporary, ROUTING_STATUS_BYTES);
        let op = PlannedOp {
            shape: Sizes { m: batch, n: experts, k: top_k },
            d_dtype: "i32".into(),
            ids: Some(ids.to_owned()),
            router_weights: Some(weights.to_owned()),
            status: Some(status),
            top_k: Some(top_k),
            ..op(format!("blk.{i}.routing"), [&logits, &d], (Activation::Identity, XPrecision::Exact), &record)?
        };
        self.out.writers.insert(weights.to_owned(), op.op_id.clone());
        self.push(op, &d, &[logits.name])
    }
}

//! Feed-forward part of a layer: dense, or experts with a router.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::{Activation, Scoring, XPrecision};

use super::build::{Buffer, Builder};
use super::file::{PlannedOp, RegionKind};
use super::product::{Index, Product, Routed, op};
use super::ranks::PlannedShard;
use super::sizes::too_large;
use crate::architecture::{ExpertTensors, FeedForward, Matrix, NormTensors, SharedExpert};
use crate::error::Error;
use crate::record::Sizes;
use crate::routing::Routing;

/// Bytes of the status of a routing.
const ROUTING_STATUS_BYTES: usize = 16;

impl Builder<'_> {
    /// Adds the feed-forward part of `x`, whose result is added
    /// to the residual. `norm` stands before it.
    pub(super) fn feed_forward(
        &mut self,
        i: usize,
        part: &FeedForward,
        norm: Option<&NormTensors>,
        x: Buffer,
        residual: Option<Buffer>,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let activation = self.network.activation;
        let is_sum = residual.is_some();
        let out = |builder: &Self, columns| match (builder.network.pre_norm, is_sum) {
            (true, true) => builder.hidden(&format!("hidden.{}", i + 1), columns),
            (true, false) => builder.hidden(&id("ffn_output"), columns),
            (false, _) => builder.activation(&id("ffn_residual"), columns),
        };
        if let (FeedForward::Dense { gate: Some(gate), up, down }, Some(norm), false) = (part, norm, self.options.train)
        {
            let (gate, up) = &paired(gate, up)?;
            let inner = self.between(&id("ffn"), 1, up.n)?;
            let product = Product::new(id("ffn_gate_up"), gate, x, inner.clone());
            self.product(Product { activation, up: Some(up), norm: Some(norm), ..product })?;
            let d = out(self, down.n);
            let product = Product::new(id("ffn_down"), down, inner, d.clone());
            self.product(Product { residual, ..product })?;
            return Ok(d);
        }
        let x = match norm {
            Some(norm) => {
                let d = self.activation(&id("ffn_norm"), x.columns);
                self.norm(id("ffn_norm"), norm, &x, d)?
            }
            None => x,
        };
        match part {
            FeedForward::Dense { gate, up, down } => {
                let inner = match gate {
                    Some(gate) if !self.options.train => {
                        let (gate, up) = &paired(gate, up)?;
                        self.inner(i, "ffn", Some(gate), up, x, activation, None)?
                    }
                    gate => self.inner(i, "ffn", gate.as_ref(), up, x, activation, None)?,
                };
                let d = out(self, down.n);
                let product = Product::new(id("ffn_down"), down, inner, d.clone());
                self.product(Product { residual, ..product })?;
                Ok(d)
            }
            FeedForward::Experts(tensors) => {
                let ExpertTensors { router, gate, up, down, experts, top_k, renormalized, shared, local } = tensors;
                let top_k = *top_k;
                let logits = Buffer { dtype: DType::F32, ..self.between(&id("router_logits"), 1, router.n)? };
                // The choice of experts does not follow from further rounding.
                let x_precision = (!self.options.train).then_some(XPrecision::Exact);
                let product = Product::new(id("ffn_router"), router, x.clone(), logits.clone());
                self.product(Product { x_precision, ..product })?;
                let slots = |builder: &Self, role: &str| {
                    Ok::<_, Error>(Buffer { dtype: DType::F32, ..builder.between(&id(role), 1, top_k)? })
                };
                let (ids, weights) = (slots(self, "router_ids")?, slots(self, "router_weights")?);
                let of_softmax = (id("routing"), Scoring::Softmax, *renormalized);
                self.routing(of_softmax, &logits, (*experts, local), [&ids, &weights])?;
                let residual = match shared {
                    Some(shared) => Some(self.shared_expert(i, shared, &x, residual)?),
                    None => residual,
                };
                let d = out(self, down.n);
                if !self.options.train {
                    let (own, is_checked) = (local.len(), local.len() == *experts);
                    let of = |index| Routed { experts: own, top_k, index, is_checked, routed_to: *experts };
                    let routed = |weights| of(Index::Ids(&ids.name, weights));
                    let inner = self.inner(i, "ffn", Some(gate), up, x, activation, Some(&|| routed(None)))?;
                    let product = Product::new(id("ffn_down"), down, inner, d.clone());
                    let routed = Some(routed(Some(&weights.name)));
                    self.product(Product { residual, routed, ..product })?;
                    return Ok(d);
                }
                // Gradients need rows sorted by expert. The permutation between them and the
                // tokens has no backward pass here.
                self.tape("routing", std::slice::from_ref(&logits), &[ids.clone(), weights.clone()], &weights);
                let order = slots(self, "ffn_order")?;
                let offsets = Buffer { rows: 1, ..slots(self, "ffn_offsets")? };
                let experts = *experts;
                let offsets = Buffer { columns: experts + 1, ..offsets };
                let sorted = self.between(&id("ffn_sorted"), top_k, x.columns)?;
                let made = [sorted.clone(), offsets.clone(), order.clone()];
                self.step("sort rows by expert", &sorted.name, &[x.clone(), ids], &made)?;
                self.tape("sort rows by expert", &[x], std::slice::from_ref(&order), &sorted);
                let index = Index::Offsets(&offsets.name);
                let routed = || Routed { experts, top_k, index, is_checked: true, routed_to: experts };
                let inner = self.inner(i, "ffn", Some(gate), up, sorted, activation, Some(&routed))?;
                let each = self.between(&id("ffn_slots"), top_k, down.n)?;
                let product = Product::new(id("ffn_down"), down, inner, each.clone());
                self.product(Product { routed: Some(routed()), ..product })?;
                let added: Vec<Buffer> = [each, weights].into_iter().chain(residual).collect();
                let mut read = added.clone();
                read.push(order.clone());
                self.step("sum of slots", &d.name, &read, std::slice::from_ref(&d))?;
                self.tape("sum of slots", &added, &[order], &d);
                Ok(d)
            }
        }
    }

    /// Adds the shared expert's result for `x` to the residual.
    ///
    /// It is a layer of one expert, whose weight is the
    /// sigmoid of a product.
    fn shared_expert(
        &mut self,
        i: usize,
        tensors: &SharedExpert,
        x: &Buffer,
        residual: Option<Buffer>,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let SharedExpert { weight, gate, up, down } = tensors;
        let in_words = |builder: &Self, role: &str| {
            Ok::<_, Error>(Buffer { dtype: DType::F32, ..builder.between(&id(role), 1, 1)? })
        };
        let logits = in_words(self, "shared_logits")?;
        let product = Product::new(id("ffn_shared_router"), weight, x.clone(), logits.clone());
        self.product(Product { x_precision: Some(XPrecision::Exact), ..product })?;
        let (ids, weights) = (in_words(self, "shared_ids")?, in_words(self, "shared_weights")?);
        self.routing((id("shared_routing"), Scoring::Sigmoid, false), &logits, (1, &(0..1)), [&ids, &weights])?;
        let of = |index| Routed { experts: 1, top_k: 1, index, is_checked: true, routed_to: 1 };
        let routed = |weights| of(Index::Ids(&ids.name, weights));
        let activation = self.network.activation;
        let inner = self.inner(i, "ffn_shared", Some(gate), up, x.clone(), activation, Some(&|| routed(None)))?;
        let d = self.hidden(&id("shared_residual"), down.n);
        let product = Product::new(id("ffn_shared_down"), down, inner, d.clone());
        self.product(Product { residual, routed: Some(routed(Some(&weights.name))), ..product })?;
        Ok(d)
    }

    /// Intermediate matrix with `slots` rows per token. The
    /// backward phase reads it, too.
    fn between(&self, name: &str, slots: usize, columns: usize) -> Result<Buffer, Error> {
        let rows = self.options.batch.checked_mul(slots).ok_or_else(too_large)?;
        let kind = if self.options.train { RegionKind::Activation } else { RegionKind::Temporary };
        Ok(Buffer { kind, rows, ..self.activation(name, columns) })
    }

    /// Adds the products before `down`, with names
    /// that begin with `prefix`.
    #[expect(clippy::too_many_arguments, reason = "operands of two products")]
    fn inner<'p>(
        &mut self,
        i: usize,
        prefix: &str,
        gate: Option<&'p Matrix>,
        up: &'p Matrix,
        x: Buffer,
        activation: Activation,
        routed: Option<&dyn Fn() -> Routed<'p>>,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{prefix}{role}");
        let routed = || routed.map(|routed| routed());
        let slots = routed().map_or(1, |routed| routed.top_k);
        let train = self.options.train;
        let temporary = |builder: &Self, role: &str| builder.between(&id(role), slots, up.n);
        let d = temporary(self, "")?;
        // The backward phase needs the pre-activation.
        let fused = if train { Activation::Identity } else { activation };
        match gate {
            None if train => {
                let upped = temporary(self, "_upped")?;
                self.product(Product::new(id("_up"), up, x, upped.clone()))?;
                return self.caller(&id(""), activation.name(), &[upped], |_| d);
            }
            None => {
                let product = Product::new(id("_up"), up, x, d.clone());
                self.product(Product { activation, routed: routed(), ..product })?;
            }
            Some(gate) if gate.is_like(up) && !train => {
                let product = Product::new(id("_gate_up"), gate, x, d.clone());
                self.product(Product { activation, up: Some(up), routed: routed(), ..product })?;
            }
            // Experts of two formats are no gated pair, and a pair has no gradient.
            // Two products instead, which the caller multiplies.
            Some(gate) => {
                let (gated, upped) = (temporary(self, "_gated")?, temporary(self, "_upped")?);
                let product = Product::new(id("_gate"), gate, x.clone(), gated.clone());
                self.product(Product { activation: fused, routed: routed(), ..product })?;
                let product = Product::new(id("_up"), up, x, upped.clone());
                self.product(Product { routed: routed(), ..product })?;
                let step = if train { format!("{} and multiply", activation.name()) } else { "multiply".into() };
                return self.caller(&id(""), &step, &[gated, upped], |_| d);
            }
        }
        Ok(d)
    }

    fn routing(
        &mut self,
        (op_id, scoring, renormalized): (String, Scoring, bool),
        logits: &Buffer,
        (experts, local): (usize, &Range<usize>),
        [ids, weights]: [&Buffer; 2],
    ) -> Result<(), Error> {
        let (batch, top_k) = (self.options.batch, ids.columns);
        let routing = Routing::from_logits(batch, experts, top_k, DType::F32).scoring(scoring);
        let routing = if renormalized { routing.renormalized() } else { routing };
        let is_part = local.len() < experts;
        let routing = if is_part { routing.local(local.clone()) } else { routing };
        let record = self.ctx.explain_routing(&routing)?;
        self.out.uses(&logits.name, logits.kind, logits.bytes()?);
        self.out.uses(&weights.name, weights.kind, weights.bytes()?);
        let status = format!("{op_id}.status");
        self.out.uses(&status, RegionKind::Temporary, ROUTING_STATUS_BYTES);
        let op = PlannedOp {
            shape: Sizes { m: batch, n: experts, k: top_k },
            d_dtype: "i32".into(),
            ids: Some(ids.name.clone()),
            router_weights: Some(weights.name.clone()),
            status: Some(status),
            top_k: Some(top_k),
            renormalized: Some(renormalized),
            local_experts: is_part.then(|| PlannedShard::of_experts(local)),
            scoring: (scoring != Scoring::Softmax).then(|| scoring.name().to_owned()),
            ..op(op_id, [logits, ids], (Activation::Identity, XPrecision::Exact), &record)?
        };
        self.out.writers.insert(weights.name.clone(), op.op_id.clone());
        self.push(op, ids, std::slice::from_ref(&logits.name))
    }
}

/// Gate and up as a gated pair. Weights that differ in format both become f16.
fn paired(gate: &Matrix, up: &Matrix) -> Result<(Matrix, Matrix), Error> {
    match gate.is_like(up) {
        true => Ok((gate.clone(), up.clone())),
        false => Ok((gate.in_f16()?, up.in_f16()?)),
    }
}

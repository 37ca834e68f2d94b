//! Planned products: record, weight and operands.

use std::collections::HashMap;

use qgemm_hal::{Activation, XPrecision};

use super::architecture::Matrix;
use super::backward::Taped;
use super::build::{Buffer, Builder, too_large};
use super::file::{Phase, PlannedOp, PlannedWeight, RegionKind};
use super::operands::WORD;
use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::record::{PlanRecord, Sizes};

/// Bytes of the status of a product with experts.
const EXPERTS_STATUS_BYTES: usize = 8;

/// Product to plan.
pub(super) struct Product<'p> {
    pub op_id: String,
    pub matrix: &'p Matrix,
    /// Up weight of a gated pair; the gate is `matrix`.
    pub up: Option<&'p Matrix>,
    pub x: Buffer,
    pub d: Buffer,
    pub residual: Option<Buffer>,
    pub activation: Activation,
    pub routed: Option<Routed<'p>>,
}

/// Assignment of rows to experts.
pub(super) struct Routed<'p> {
    pub experts: usize,
    pub top_k: usize,
    pub index: Index<'p>,
}

/// Index of the rows.
#[derive(Clone, Copy)]
pub(super) enum Index<'p> {
    /// Expert id of each slot, and router weights if slots are summed.
    Ids(&'p str, Option<&'p str>),
    /// Offsets of rows sorted by expert.
    Offsets(&'p str),
}

impl<'p> Product<'p> {
    pub fn new(op_id: impl Into<String>, matrix: &'p Matrix, x: Buffer, d: Buffer) -> Self {
        let (activation, op_id) = (Activation::Identity, op_id.into());
        Self { op_id, matrix, up: None, x, d, residual: None, activation, routed: None }
    }
}

impl<'p> Index<'p> {
    fn ids(self) -> Option<&'p str> {
        if let Self::Ids(ids, _) = self { Some(ids) } else { None }
    }

    fn weights(self) -> Option<&'p str> {
        if let Self::Ids(_, weights) = self { weights } else { None }
    }

    fn offsets(self) -> Option<&'p str> {
        if let Self::Offsets(offsets) = self { Some(offsets) } else { None }
    }
}

impl Builder<'_> {
    /// Adds a product.
    pub fn product(&mut self, product: Product<'_>) -> Result<(), Error> {
        let Product { op_id, matrix, up, x, d, residual, activation, routed } = product;
        let described = describe(self.ctx, matrix, up.is_some())?;
        let bias = match (&matrix.bias, up, &routed) {
            (Some(bias), None, None) => Some(bias.clone()),
            // Biases of gated pairs and of experts would need concatenation first.
            (Some((name, _)), ..) => {
                return Err(Error::IncompleteModel { what: format!("{name}: no plan for biases of pairs or experts") });
            }
            (None, ..) => None,
        };
        let state = |problem: crate::Problem| {
            let problem = problem.x_dtype(x.dtype).d_dtype(d.dtype).x_precision(self.options.x_precision);
            let problem = problem.activation(activation);
            let problem = bias.iter().fold(problem, |problem, (_, dtype)| problem.bias(*dtype));
            residual.iter().fold(problem, |problem, residual| problem.residual(residual.dtype))
        };
        let batch = self.options.batch;
        let ctx = self.ctx;
        let (record, bytes) = match &routed {
            None => {
                let problem = state(described.problem(batch));
                (known(&mut self.planned, format!("{problem:?}"), || ctx.explain(&problem))?, described.bytes())
            }
            Some(Routed { experts, top_k, index }) => {
                let experts = described.experts(*experts)?;
                let problem = match index {
                    Index::Ids(_, None) => experts.indexed(batch, *top_k).each(state),
                    Index::Ids(_, Some(_)) => experts.indexed(batch, *top_k).each(state).x_per_slot().combined(),
                    Index::Offsets(_) => experts.contiguous(x.rows).each(state),
                };
                (known(&mut self.planned, format!("{problem:?}"), || ctx.explain_experts(&problem))?, experts.bytes())
            }
        };
        let weight = PlannedWeight {
            region: format!("{op_id}.weight"),
            tensors: [Some(matrix), up].into_iter().flatten().map(|matrix| matrix.tensor.clone()).collect(),
            format: matrix.format.name.to_owned(),
            layout: format!("{:?}", described.shape().class),
            gated: up.is_some(),
            row_scale: matrix.row_scale,
            k_order: matrix.k_order,
            experts: routed.as_ref().map(|routed| routed.experts),
            row_bytes: matrix.format.row_bytes(matrix.k),
            bytes,
        };
        self.out.uses(&weight.region, RegionKind::Weight, bytes);
        for buffer in [Some(&x), residual.as_ref()].into_iter().flatten() {
            self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
        }
        let bias_region = match &bias {
            None => None,
            Some((name, dtype)) => {
                self.out.uses(name, RegionKind::Weight, matrix.n * dtype.bytes());
                Some(name.clone())
            }
        };
        let status = routed.as_ref().map(|_| format!("{op_id}.status"));
        if let (Some(routed), Some(status)) = (&routed, &status) {
            let slots = batch.checked_mul(routed.top_k * WORD).ok_or_else(too_large)?;
            let words = if routed.index.offsets().is_some() { (routed.experts + 1) * WORD } else { slots };
            let (Index::Ids(index, _) | Index::Offsets(index)) = routed.index;
            self.out.uses(index, RegionKind::Temporary, words);
            routed.index.weights().iter().for_each(|name| self.out.uses(name, RegionKind::Temporary, slots));
            self.out.uses(status, RegionKind::Temporary, EXPERTS_STATUS_BYTES);
        }
        let op = PlannedOp {
            weight: Some(weight),
            bias: bias_region,
            bias_dtype: bias.map(|(_, dtype)| dtype.name().to_owned()),
            residual: residual.as_ref().map(|buffer| buffer.name.clone()),
            ids: routed.as_ref().and_then(|routed| routed.index.ids()).map(str::to_owned),
            offsets: routed.as_ref().and_then(|routed| routed.index.offsets()).map(str::to_owned),
            router_weights: routed.as_ref().and_then(|routed| routed.index.weights()).map(str::to_owned),
            status,
            top_k: routed.as_ref().filter(|routed| routed.index.ids().is_some()).map(|routed| routed.top_k),
            ..op(op_id, [&x, &d], (activation, self.options.x_precision), &record)?
        };
        let index = [op.ids.as_ref(), op.offsets.as_ref(), op.router_weights.as_ref()];
        let reads = [Some(&x.name), residual.as_ref().map(|r| &r.name)].into_iter().chain(index);
        let reads: Vec<String> = reads.flatten().cloned().collect();
        if let (true, Some(weight)) = (self.options.train, &op.weight) {
            let (op_id, weight, d) = (op.op_id.clone(), Box::new(weight.clone()), d.clone());
            let offsets = op.offsets.clone();
            self.tape.push(Taped::Product { op_id, matrix: matrix.clone(), weight, offsets, x, d, residual });
        }
        self.push(op, &d, &reads)
    }
}

impl Matrix {
    /// Whether two weights can form a gated pair.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.format, m.n, m.k, m.k_order, m.bias.is_some());
        shape(self) == shape(other) && !self.k_order
    }
}

/// Weight description for planning.
pub(super) fn describe(ctx: &Context, matrix: &Matrix, is_pair: bool) -> Result<DescribedWeight, Error> {
    let described = ctx.describe_weight(matrix.format, matrix.n, matrix.k)?;
    let described = if matrix.row_scale { described.row_scaled() } else { described };
    let described = if matrix.k_order { described.permuted() } else { described };
    if is_pair { described.gated() } else { Ok(described) }
}

/// Record of a problem, cached by equal problems.
pub(super) fn known(
    planned: &mut HashMap<String, PlanRecord>,
    key: String,
    make: impl FnOnce() -> Result<PlanRecord, Error>,
) -> Result<PlanRecord, Error> {
    if let Some(record) = planned.get(&key) {
        return Ok(record.clone());
    }
    let record = make()?;
    planned.insert(key, record.clone());
    Ok(record)
}

/// Fields of every operation.
pub(super) fn op(
    op_id: String,
    [x, d]: [&Buffer; 2],
    (activation, x_precision): (Activation, XPrecision),
    record: &PlanRecord,
) -> Result<PlannedOp, Error> {
    let (Some(chosen), Some(kernel_id), Some(source_hash)) =
        (record.chosen(), record.kernel_id.clone(), record.source_hash.clone())
    else {
        let refusals = record.refused.iter().map(|r| format!("{} {}", r.family, r.why)).collect::<Vec<_>>().join("; ");
        return Err(Error::IncompleteModel {
            what: format!("{op_id}: no kernel serves {}: {refusals}", record.problem),
        });
    };
    Ok(PlannedOp {
        op_id,
        phase: Phase::Forward,
        operation: record.operation.clone(),
        kernel_id,
        source_hash,
        shape: record.shape.unwrap_or(Sizes { m: d.rows, n: d.columns, k: x.columns }),
        weight: None,
        x: x.name.clone(),
        x_dtype: x.dtype.name().to_owned(),
        x_precision: x_precision.name().to_owned(),
        b: None,
        b_dtype: None,
        d: d.name.clone(),
        d_dtype: d.dtype.name().to_owned(),
        bias: None,
        bias_dtype: None,
        residual: None,
        ids: None,
        offsets: None,
        products: None,
        router_weights: None,
        status: None,
        activation: activation.name().to_owned(),
        norm: None,
        heads: None,
        optimizer: None,
        top_k: None,
        dispatch: record.dispatch.clone(),
        reduction: record.reduction.clone(),
        prologue: record.prologue.clone(),
        workspace_bytes: record.workspace_bytes,
        workspace: record.workspace.clone(),
        estimate_seconds: chosen.measured_seconds.unwrap_or(chosen.seconds),
        bound: chosen.bound,
        candidates: record.candidates.len(),
        rejected: record.refused.clone(),
    })
}

//! Planned products: record, weight and operands.

use std::collections::HashMap;

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};
use qgemm_sched::Bound;

use super::backward::Taped;
use super::build::{Buffer, Builder};
use super::file::{Phase, PlannedOp, PlannedRows, PlannedWeight, RegionKind};
use super::operands::PlannedSegment;
use super::sizes::{WORD, too_large};
use super::stated::{Stated, with_segments};
use crate::architecture::{Matrix, NormTensors, Rows};
use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::gemm::Problem;
use crate::record::{PlanRecord, Sizes};

/// Bytes of the status of a product with experts.
const EXPERTS_STATUS_BYTES: usize = 8;

/// Product to plan.
pub(super) struct Product<'p> {
    pub op_id: String,
    pub matrix: &'p Matrix,
    /// Up weight of a gated pair; the gate is `matrix`.
    pub up: Option<&'p Matrix>,
    /// Weights below `matrix`, each with an output of its own.
    pub segments: Vec<(&'p Matrix, Buffer)>,
    /// Norm of X, in a prologue.
    pub norm: Option<&'p NormTensors>,
    pub x: Buffer,
    pub d: Buffer,
    pub residual: Option<Buffer>,
    pub activation: Activation,
    /// Rounding of X, where it is not the plan's.
    pub x_precision: Option<XPrecision>,
    pub routed: Option<Routed<'p>>,
}

/// Assignment of rows to experts.
pub(super) struct Routed<'p> {
    pub experts: usize,
    pub top_k: usize,
    pub index: Index<'p>,
    /// Whether every id is to be that of an expert.
    pub is_checked: bool,
    /// Experts that rows are routed to.
    pub routed_to: usize,
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
        let (activation, op_id, segments) = (Activation::Identity, op_id.into(), Vec::new());
        let (up, norm, residual, x_precision, routed) = (None, None, None, None, None);
        Self { op_id, matrix, up, segments, norm, x, d, residual, activation, x_precision, routed }
    }

    /// The weight of all segments.
    fn stacked(&self) -> Matrix {
        let n = self.segments.iter().map(|(matrix, _)| matrix.n).fold(self.matrix.n, usize::saturating_add);
        let row_scale = self.matrix.row_scale || self.segments.iter().any(|(matrix, _)| matrix.row_scale);
        Matrix { n, row_scale, ..self.matrix.clone() }
    }

    /// Region and type of the bias.
    fn bias(&self) -> Option<(String, DType)> {
        let (name, dtype) = self.matrix.bias.as_ref()?;
        let is_one = self.up.is_none() && self.segments.is_empty();
        Some((if is_one { name.clone() } else { format!("{}.bias", self.op_id) }, *dtype))
    }

    /// Further outputs, as the plan file has them.
    fn planned_segments(&self) -> Vec<PlannedSegment> {
        let mut first = self.matrix.n;
        let planned = |(matrix, d): &(&Matrix, Buffer)| {
            first += matrix.n;
            PlannedSegment { first: first - matrix.n, features: matrix.n, d: d.name.clone() }
        };
        self.segments.iter().map(planned).collect()
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
        let (record, weight) = self.planned_product(&product)?;
        self.out.uses(&weight.region, RegionKind::Weight, weight.bytes);
        let bias = product.bias();
        let norm = product.norm.map(|norm| self.prologue(norm));
        let segments = product.planned_segments();
        let x_precision = product.x_precision.unwrap_or(self.options.x_precision);
        let Product { op_id, matrix, up, segments: outputs, x, d, residual, activation, routed, .. } = product;
        for buffer in [Some(&x), residual.as_ref()].into_iter().flatten().chain(outputs.iter().map(|(_, d)| d)) {
            self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
        }
        if let Some((name, dtype)) = &bias {
            let others = outputs.iter().map(|(matrix, _)| matrix.n).chain(up.map(|up| up.n));
            let n = others.fold(matrix.n, usize::saturating_add);
            let rows = routed.as_ref().map_or(1, |routed| routed.experts);
            self.out.uses(name, RegionKind::Weight, n.saturating_mul(rows).saturating_mul(dtype.bytes()));
        }
        norm.iter().for_each(|norm| self.uses_norm(norm, x.columns));
        let status = match &routed {
            Some(routed) => self.uses_routed(&op_id, routed)?,
            None => None,
        };
        let op = PlannedOp {
            weight: Some(weight),
            bias: bias.as_ref().map(|(name, _)| name.clone()),
            bias_dtype: bias.map(|(_, dtype)| dtype.name().to_owned()),
            norm,
            segments,
            residual: residual.as_ref().map(|buffer| buffer.name.clone()),
            ids: routed.as_ref().and_then(|routed| routed.index.ids()).map(str::to_owned),
            offsets: routed.as_ref().and_then(|routed| routed.index.offsets()).map(str::to_owned),
            router_weights: routed.as_ref().and_then(|routed| routed.index.weights()).map(str::to_owned),
            status,
            batch_invariant: self.options.batch_invariant,
            top_k: routed.as_ref().filter(|routed| routed.index.ids().is_some()).map(|routed| routed.top_k),
            routed_to: routed
                .as_ref()
                .map(|of| of.routed_to)
                .filter(|all| routed.as_ref().is_some_and(|of| of.experts < *all)),
            ..op(op_id.clone(), [&x, &d], (activation, x_precision), &record)?
        };
        let index = [op.ids.as_ref(), op.offsets.as_ref(), op.router_weights.as_ref()];
        let reads = [Some(&x.name), residual.as_ref().map(|r| &r.name)].into_iter().chain(index);
        let reads: Vec<String> = reads.flatten().cloned().collect();
        if let (true, Some(weight)) = (self.options.train, &op.weight) {
            let (op_id, weight, d) = (op.op_id.clone(), Box::new(weight.clone()), d.clone());
            let offsets = op.offsets.clone();
            self.tape.push(Taped::Product { op_id, matrix: matrix.clone(), weight, offsets, x, d, residual });
        }
        self.push(op, &d, &reads)?;
        for (_, output) in outputs {
            self.out.writers.insert(output.name, op_id.clone());
        }
        Ok(())
    }

    /// Whether a kernel serves the product.
    pub(super) fn is_served(&mut self, product: &Product<'_>) -> Result<bool, Error> {
        Ok(self.planned_product(product)?.0.chosen().is_some())
    }

    /// Record and weight of a product.
    fn planned_product(&mut self, product: &Product<'_>) -> Result<(PlanRecord, PlannedWeight), Error> {
        let matrix = product.stacked();
        let described = describe(self.ctx, &matrix, product.up.is_some())?;
        let stated = Stated {
            x: product.x.dtype,
            d: product.d.dtype,
            x_precision: product.x_precision.unwrap_or(self.options.x_precision),
            batch_invariant: self.options.batch_invariant,
            activation: product.activation,
            bias: product.bias().map(|(_, dtype)| dtype),
            residual: product.residual.as_ref().map(|residual| residual.dtype),
            norm: product.norm.map(|norm| self.prologue(norm).in_prologue(product.x.dtype)).transpose()?,
        };
        let state = |problem: Problem| stated.of(problem);
        let (batch, ctx, planned) = (self.options.batch, self.ctx, &mut self.planned);
        let (record, bytes) = match &product.routed {
            None => {
                let rows = product.x.rows;
                let problem =
                    with_segments(state(described.problem(rows)), &product.planned_segments(), [rows, matrix.n])?;
                (known(planned, format!("{problem:?}"), || ctx.explain_choice(&problem))?, described.bytes())
            }
            Some(Routed { experts, top_k, index, is_checked, routed_to }) => {
                let experts = described.experts(*experts)?;
                let problem = match index {
                    Index::Ids(_, None) => experts.indexed(batch, *top_k).each(state),
                    Index::Ids(_, Some(_)) => experts.indexed(batch, *top_k).each(state).x_per_slot().combined(),
                    Index::Offsets(_) => experts.contiguous(product.x.rows).each(state),
                };
                let problem = if *is_checked { problem } else { problem.unchecked() }.routed_to(*routed_to);
                (known(planned, format!("{problem:?}"), || ctx.explain_experts(&problem))?, experts.bytes())
            }
        };
        // Alternating rows of gate and up are one tensor.
        let up = product.up.filter(|up| up.tensor != product.matrix.tensor);
        let tensors = [Some(product.matrix), up].into_iter().flatten();
        let tensors = tensors.chain(product.segments.iter().map(|(matrix, _)| *matrix));
        let sources: Vec<_> = tensors.flat_map(Matrix::sources).collect();
        let shards = self.part.shards(&sources);
        let (tensors, rows): (Vec<_>, Vec<_>) = sources.into_iter().unzip();
        let are_whole = rows.iter().all(Option::is_none);
        let weight = PlannedWeight {
            region: format!("{}.weight", product.op_id),
            shards,
            tensors,
            rows: if are_whole { Vec::new() } else { rows },
            gated: product.up.is_some(),
            experts: product.routed.as_ref().map(|routed| routed.experts),
            ..planned_weight(&matrix, &described, bytes)
        };
        Ok((record, weight))
    }

    /// Records that the next operation reads its rows' experts, and writes a status if
    /// it checks them.
    fn uses_routed(&mut self, op_id: &str, routed: &Routed<'_>) -> Result<Option<String>, Error> {
        let slots = self.options.batch.checked_mul(routed.top_k * WORD).ok_or_else(too_large)?;
        let words = if routed.index.offsets().is_some() { (routed.experts + 1) * WORD } else { slots };
        let (Index::Ids(index, _) | Index::Offsets(index)) = routed.index;
        self.out.uses(index, RegionKind::Temporary, words);
        routed.index.weights().iter().for_each(|name| self.out.uses(name, RegionKind::Temporary, slots));
        let status = routed.is_checked.then(|| format!("{op_id}.status"));
        status.iter().for_each(|status| self.out.uses(status, RegionKind::Temporary, EXPERTS_STATUS_BYTES));
        Ok(status)
    }
}

/// Record of a weight, with the matrix as its only tensor.
pub(super) fn planned_weight(matrix: &Matrix, described: &DescribedWeight, bytes: usize) -> PlannedWeight {
    PlannedWeight {
        region: String::new(),
        tensors: vec![matrix.tensor.clone()],
        rows: Vec::new(),
        shards: Vec::new(),
        format: matrix.format.name.to_owned(),
        layout: format!("{:?}", described.shape().class),
        gated: false,
        row_scale: matrix.row_scale,
        k_order: matrix.k_order,
        experts: None,
        row_bytes: matrix.format.row_bytes(matrix.k),
        bytes,
    }
}

impl Matrix {
    /// Tensors, and the rows of each that are taken one after the other.
    pub(super) fn sources(&self) -> Vec<(String, Option<PlannedRows>)> {
        let of = |&Rows { first, count, every }: &Rows| PlannedRows { first, count, every };
        match &self.rows[..] {
            [] => vec![(self.tensor.clone(), None)],
            rows => rows.iter().map(|rows| (self.tensor.clone(), Some(of(rows)))).collect(),
        }
    }

    /// Whether two weights can be segments of one product.
    pub(super) fn stacks_on(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.format, m.k, m.k_order, m.bias.as_ref().map(|(_, dtype)| *dtype));
        shape(self) == shape(other) && !self.k_order
    }

    /// The weight in f16.
    pub(super) fn in_f16(&self) -> Result<Self, Error> {
        let format = DType::F16.name().parse()?;
        Ok(Self { format, row_scale: false, k_order: false, ..self.clone() })
    }

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
        operation: record.operation.clone(),
        kernel_id,
        source_hash,
        shape: record.shape.unwrap_or(Sizes { m: d.rows, n: d.columns, k: x.columns }),
        x: x.name.clone(),
        x_dtype: x.dtype.name().to_owned(),
        x_precision: x_precision.name().to_owned(),
        d: d.name.clone(),
        d_dtype: d.dtype.name().to_owned(),
        activation: activation.to_string(),
        dispatch: record.dispatch.clone(),
        reduction: record.reduction.clone(),
        prologue: record.prologue.clone(),
        workspace_bytes: record.workspace_bytes,
        workspace: record.workspace.clone(),
        estimate_seconds: chosen.measured_seconds.unwrap_or(chosen.seconds),
        bound: chosen.bound,
        candidates: record.candidates.len(),
        rejected: record.refused.clone(),
        ..PlannedOp::empty()
    })
}

impl PlannedOp {
    /// An operation without operands.
    pub(super) fn empty() -> Self {
        let nothing = String::new;
        Self {
            op_id: nothing(),
            phase: Phase::Forward,
            operation: nothing(),
            kernel_id: nothing(),
            source_hash: nothing(),
            shape: Sizes { m: 0, n: 0, k: 0 },
            weight: None,
            x: nothing(),
            x_dtype: nothing(),
            x_precision: nothing(),
            batch_invariant: false,
            b: None,
            b_dtype: None,
            d: nothing(),
            d_dtype: nothing(),
            bias: None,
            bias_dtype: None,
            residual: None,
            ids: None,
            offsets: None,
            scale: None,
            products: None,
            columns: None,
            algorithm: None,
            router_weights: None,
            parameters: None,
            status: None,
            activation: nothing(),
            norm: None,
            segments: Vec::new(),
            heads: None,
            rotation: None,
            conv: None,
            linear: None,
            optimizer: None,
            top_k: None,
            routed_to: None,
            renormalized: None,
            scoring: None,
            local_experts: None,
            dispatch: None,
            reduction: None,
            prologue: None,
            workspace_bytes: 0,
            workspace: Vec::new(),
            estimate_seconds: 0.0,
            bound: Bound::Launch,
            candidates: 0,
            rejected: Vec::new(),
        }
    }
}

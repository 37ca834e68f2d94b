//! Backward phase of a plan: gradients of activations and weights, in reverse
//! order of the forward phase.

use std::collections::HashSet;

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};

use super::build::{Buffer, Builder};
use super::file::{Phase, PlannedOp, PlannedWeight, RegionKind};
use super::product::{describe, known, op};
use super::sizes::{WORD, too_large};
use crate::architecture::Matrix;
use crate::error::Error;
use crate::gradient::{Gradient, ThroughShape};
use crate::matmul::Matmul;
use crate::record::Sizes;

/// Forward operation with a gradient.
pub(super) enum Taped {
    /// Product with a weight.
    Product {
        op_id: String,
        matrix: Matrix,
        weight: Box<PlannedWeight>,
        /// Row offsets of experts.
        offsets: Option<String>,
        x: Buffer,
        d: Buffer,
        residual: Option<Buffer>,
    },
    /// Operation whose backward pass is the caller's.
    Caller {
        what: String,
        step: String,
        reads: Vec<Buffer>,
        /// Other inputs of the backward pass.
        kept: Vec<Buffer>,
        made: Buffer,
    },
}

/// Regions of a two-moment optimizer per tensor: master values and both moments.
const OPTIMIZER_STATE: [&str; 3] = ["master", "moment1", "moment2"];

/// Trained tensor.
struct Trained {
    name: String,
    rows: usize,
    columns: usize,
    /// Region that the forward phase reads.
    region: String,
}

impl Builder<'_> {
    /// Adds the backward phase of everything planned so far, and then the optimizer steps.
    pub(super) fn backward(&mut self) -> Result<(), Error> {
        let tape = std::mem::take(&mut self.tape);
        let Some(out) = tape.last().map(Taped::made).cloned() else { return Ok(()) };
        let mut has_gradient = HashSet::from([out.name.clone()]);
        let of_out = self.gradient_of(&out);
        self.step("loss", &out.name, std::slice::from_ref(&out), &[of_out, Self::step_numbers()])?;
        let mut trained = Vec::new();
        for taped in tape.iter().rev() {
            match taped {
                Taped::Caller { what, step, reads, kept, made } => {
                    let mut read = vec![self.gradient_of(made)];
                    read.extend(reads.iter().chain(kept).cloned());
                    let written: Vec<Buffer> = reads.iter().map(|buffer| self.gradient_of(buffer)).collect();
                    // The caller accumulates into an existing gradient.
                    read.extend(
                        reads
                            .iter()
                            .zip(&written)
                            .filter(|(b, _)| has_gradient.contains(&b.name))
                            .map(|(_, g)| g.clone()),
                    );
                    self.step(&format!("{step} backward"), what, &read, &written)?;
                    has_gradient.extend(reads.iter().map(|buffer| buffer.name.clone()));
                }
                Taped::Product { op_id, matrix, weight, offsets, x, d, residual } => {
                    let whose = weight.experts.zip(offsets.as_deref());
                    let dy = self.gradient_of(d);
                    if let Some(residual) = residual {
                        let dr = self.gradient_of(residual);
                        let adds = !has_gradient.insert(residual.name.clone());
                        let read: Vec<Buffer> =
                            [Some(&dy), adds.then_some(&dr)].into_iter().flatten().cloned().collect();
                        self.step("add", &dr.name, &read, std::slice::from_ref(&dr))?;
                    }
                    let adds = !has_gradient.insert(x.name.clone());
                    self.input_gradient(op_id, matrix, weight, whose, [&dy, x], adds)?;
                    trained.push(self.weight_gradient(op_id, matrix, &weight.region, whose, [&dy, x])?);
                    if let Some((bias, _)) = &matrix.bias {
                        let of_bias = Trained { name: bias.clone(), rows: 1, columns: matrix.n, region: bias.clone() };
                        self.step("sum of rows", bias, &[dy], &[of_bias.part("grad", RegionKind::Gradient)])?;
                        trained.push(of_bias);
                    }
                }
            }
        }
        for tensor in &trained {
            let state = OPTIMIZER_STATE.map(|part| tensor.part(part, RegionKind::OptimizerState));
            let gradient = tensor.part("grad", RegionKind::Gradient);
            self.optimizer(format!("{}.optimizer", tensor.name), &gradient, &state)?;
            // Rounds or quantizes the trained values to the weight of the next step.
            self.step("store", &tensor.name, &state[..1], &[])?;
            self.writes_too(&tensor.region);
        }
        Ok(())
    }

    /// Region of the gradient of a matrix.
    fn gradient_of(&self, buffer: &Buffer) -> Buffer {
        let (name, kind) = (format!("{}.grad", buffer.name), RegionKind::GradientActivation);
        Buffer { name, kind, dtype: self.options.x_dtype, ..buffer.clone() }
    }

    /// Input gradient `dX = dY · W`. It accumulates when another product reads the same X.
    fn input_gradient(
        &mut self,
        op_id: &str,
        matrix: &Matrix,
        weight: &PlannedWeight,
        whose: Option<(usize, &str)>,
        [dy, x]: [&Buffer; 2],
        adds: bool,
    ) -> Result<(), Error> {
        let (dx, described) = (self.gradient_of(x), describe(self.ctx, matrix, false)?);
        let gradient = Gradient::new(dy.rows, dy.dtype, dx.dtype);
        let gradient = if adds { gradient.accumulate(1.0) } else { gradient };
        let ctx = self.ctx;
        let through = match whose {
            Some((experts, _)) => (*described.experts(experts)?.shape()).into(),
            None => ThroughShape::from(*described.shape()),
        };
        let key = format!("{through:?} {gradient:?}");
        let record = known(&mut self.planned, key, || ctx.explain_gradient_by(&through, &gradient))?;
        self.out.uses(&dy.name, dy.kind, dy.bytes()?);
        self.out.uses(&weight.region, RegionKind::Weight, weight.bytes);
        let op = PlannedOp {
            phase: Phase::Backward,
            weight: Some(weight.clone()),
            residual: adds.then(|| dx.name.clone()),
            offsets: self.offsets(whose),
            ..op(format!("{op_id}.dx"), [dy, &dx], (Activation::Identity, XPrecision::Exact), &record)?
        };
        let mut reads = if adds { vec![dy.name.clone(), dx.name.clone()] } else { vec![dy.name.clone()] };
        reads.extend(op.offsets.clone());
        self.push(op, &dx, &reads)
    }

    /// Row offsets of experts, as an input of the next operation.
    fn offsets(&mut self, whose: Option<(usize, &str)>) -> Option<String> {
        let (experts, offsets) = whose?;
        self.out.uses(offsets, RegionKind::Activation, (experts + 1) * WORD);
        Some(offsets.to_owned())
    }

    /// Weight gradient `dW = dYᵀ · X` in f32, for experts over their own rows.
    fn weight_gradient(
        &mut self,
        op_id: &str,
        matrix: &Matrix,
        region: &str,
        whose: Option<(usize, &str)>,
        [dy, x]: [&Buffer; 2],
    ) -> Result<Trained, Error> {
        let products = whose.map(|(experts, _)| experts);
        let rows = matrix.n.checked_mul(products.unwrap_or(1)).ok_or_else(too_large)?;
        let tensor = Trained { name: matrix.tensor.clone(), rows, columns: matrix.k, region: region.to_owned() };
        let product = weight_gradient([matrix.n, matrix.k, dy.rows], products, dy.dtype, x.dtype);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{product:?}"), || ctx.explain_matmul(&product))?;
        [dy, x].into_iter().try_for_each(|buffer| {
            self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
            Ok::<_, Error>(())
        })?;
        let dw = tensor.part("grad", RegionKind::Gradient);
        let op = PlannedOp {
            phase: Phase::Backward,
            shape: Sizes { m: matrix.n, n: matrix.k, k: dy.rows },
            b: Some(x.name.clone()),
            b_dtype: Some(x.dtype.name().to_owned()),
            offsets: self.offsets(whose),
            products,
            ..op(format!("{op_id}.dw"), [dy, &dw], (Activation::Identity, XPrecision::Exact), &record)?
        };
        let reads: Vec<String> =
            [Some(&dy.name), Some(&x.name), op.offsets.as_ref()].into_iter().flatten().cloned().collect();
        self.push(op, &dw, &reads)?;
        Ok(tensor)
    }
}

/// Product of a weight gradient. A is dY `[tokens, n]`, B is X `[tokens, k]`.
/// Experts have one product each.
pub(super) fn weight_gradient(sizes: [usize; 3], products: Option<usize>, dy: DType, x: DType) -> Matmul {
    let matmul = Matmul::new(sizes, dy, x, DType::F32).a_transposed();
    products.map_or(matmul.clone(), |products| matmul.k_grouped(products))
}

impl Taped {
    fn made(&self) -> &Buffer {
        match self {
            Self::Product { d, .. } => d,
            Self::Caller { made, .. } => made,
        }
    }
}

impl Trained {
    /// Region of the tensor's shape, in f32.
    fn part(&self, part: &str, kind: RegionKind) -> Buffer {
        let name = format!("{}.{part}", self.name);
        Buffer { name, kind, rows: self.rows, columns: self.columns, dtype: DType::F32, kv: None }
    }
}

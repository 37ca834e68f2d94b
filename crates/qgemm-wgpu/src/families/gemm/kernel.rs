//! Compiled GEMM kernels with their parameters, shared by all families.

use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_C, FLAG_GATED, FLAG_K_ORDER, FLAG_RESIDUAL, FLAG_ROW_SCALE, FLAG_TOKEN_SCALE, FLAG_X_ALIGNED16,
    FLAG_X_FACTOR, GemmShape,
};
use qgemm_hal::{
    CheckedGemm, Dense, GemmOperand, Geometry, HalError, Kernel, LaunchPlan, LaunchStep, Operand, Operands, Stream,
    XRegion,
};

use super::launches::{Extents, Launch, Product};
use super::parts::{Phase, SUM_THREADS, sum_grid, sum_rows};
use super::{INTERFACE, Params};
use crate::event::WgpuStream;
use crate::families::dispatch::{Dispatch, MAX_GROUPS, stride, submit};
use crate::families::modes::{Modes, swiglu_of};
use crate::families::operands::Touched;
use crate::memory::VECTOR;
use crate::pipeline::Compiled;
use crate::shared::Shared;

/// A kernel for one operation. A launch allocates no device
/// memory, because parameters are immediates. wgpu allocates a
/// command buffer on the host, and the first launch with given
/// operands creates a bind group.
#[derive(Debug)]
pub(super) struct GemmKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    /// The operation as the kernel sees it, with a converted
    /// X if there is a prologue.
    op: CheckedGemm,
    /// Bytes of an element of X.
    x_width: usize,
    /// Whether accumulators are multiplied with token factors, which then use
    /// the binding of the column order.
    x_factor: bool,
    phase: Phase,
    parts: Vec<Part>,
}

/// One dispatch.
#[derive(Debug)]
struct Part {
    /// Parameters without the `*_base` fields, which
    /// depend on a launch's views.
    params: Params,
    extents: Extents,
    /// Offset of this part in each operand, in bytes.
    before: Extents,
    /// Output operand, its first feature, and the bytes of an element.
    output: (GemmOperand, u32, usize),
    grid: [u32; 3],
}

impl Part {
    /// Removes operands that a launch of `phase` does not touch,
    /// and adds the split-K sums.
    fn take_phase(&mut self, op: &CheckedGemm, phase: Phase) {
        let rows = sum_rows(op);
        let bytes = |splits: u32| op.m * rows * splits as usize * size_of::<f32>();
        match phase {
            Phase::Whole => {}
            Phase::Parts(splits) => {
                let Extents { x, w, k_order, .. } = self.extents;
                self.extents = Extents { x, w, k_order, d: bytes(splits), ..Extents::default() };
                self.params.d_row = rows as u32;
                self.output = (GemmOperand::D, 0, size_of::<f32>());
                self.grid[2] = splits;
            }
            Phase::Sum(splits) => {
                self.extents = Extents { x: bytes(splits), w: 0, k_order: 0, ..self.extents };
                self.grid = sum_grid(op);
            }
        }
    }
}

impl GemmKernel {
    /// The kernel for `launches` of `product`. With `x_factor`, accumulators
    /// are multiplied with token factors.
    pub fn new(
        compiled: Compiled,
        shared: Arc<Shared>,
        product: &Product<'_>,
        plan: &LaunchPlan,
        x_factor: bool,
        launches: &[Launch],
        phase: Phase,
    ) -> Self {
        let part = |launch: &Launch| {
            let mut part = Part {
                params: params(product, launch),
                extents: Extents::of(product, launch),
                before: Extents::before(product, launch),
                output: output(product.op, launch),
                grid: grid(plan, launch),
            };
            part.params.modes |= phase.packed();
            part.take_phase(product.op, phase);
            if x_factor {
                // Columns of a converted X are in order, so the
                // binding of the order is free.
                part.params.shape.flags |= FLAG_X_FACTOR;
                part.before.k_order = launch.m.start * 4;
                part.extents.k_order = launch.m.len() * 4;
            }
            part
        };
        let parts = launches.iter().map(part).collect();
        let x_width = match phase {
            Phase::Sum(_) => VECTOR as usize,
            Phase::Whole | Phase::Parts(_) => product.x.dtype.bytes(),
        };
        Self { compiled, shared, op: product.op.clone(), x_width, x_factor, phase, parts }
    }

    /// The split-K kernel as a step of a plan; it writes
    /// partial sums to `sums` in the workspace.
    pub fn step_of_parts(self, plan: &LaunchPlan, threads: u32, sums: Range<usize>) -> LaunchStep {
        use GemmOperand as O;
        let unused = [O::RowScale, O::C, O::Bias, O::TokenScale, O::Residual];
        let step = self.step(plan, threads, None);
        unused.into_iter().fold(step, LaunchStep::unbind).bind_part(O::D, O::Workspace, sums)
    }

    /// The reduction kernel as a step of a plan; the binding
    /// of X holds the partial sums.
    pub fn step_of_sums(self, plan: &LaunchPlan, sums: Range<usize>) -> LaunchStep {
        use GemmOperand as O;
        let step = self.step(plan, SUM_THREADS, None);
        [O::W, O::KOrder, O::XScales].into_iter().fold(step, LaunchStep::unbind).bind_part(O::X, O::Workspace, sums)
    }

    /// The kernel as a step of a plan, with all operands
    /// bound. `x` is the region of a converted X, if any.
    pub fn step(self, plan: &LaunchPlan, threads: u32, x: Option<XRegion>) -> LaunchStep {
        use GemmOperand as O;
        let geometry = Geometry {
            grid: self.parts.first().map_or([0; 3], |part| part.grid),
            threads,
            shared_bytes: plan.config.shared_bytes,
        };
        let op = &self.op;
        let (m, outputs) = (op.m, op.outputs().map(|(operand, ..)| operand).collect::<Vec<_>>());
        let own = [
            (O::X, x.is_none()),
            (O::W, true),
            (O::RowScale, op.row_scale),
            (O::KOrder, op.k_order),
            (O::XScales, op.x.planes.is_some()),
            (O::C, op.c.is_some()),
            (O::Bias, op.bias.is_some()),
            (O::TokenScale, op.token_scale),
            (O::Residual, op.residual.is_some() && !op.residual_in_d),
        ];
        let id = plan.config.kernel_id(op.format);
        let step = LaunchStep::new::<O>(id, geometry, Arc::new(self));
        let there = own.into_iter().filter_map(|(operand, there)| there.then_some(operand));
        let there = there.chain(outputs);
        let step = step.bind_all(there);
        let Some(x) = x else { return step };
        let step = step.bind_part(O::X, O::Workspace, x.x_of(m));
        match x.factors_of(m) {
            Some(factors) => step.bind_part(O::XFactor, O::Workspace, factors),
            None => step,
        }
    }

    /// Bindings and parameters of a part.
    fn dispatch<'a>(&'a self, part: &Part, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use GemmOperand as O;
        let Part { extents, before, grid, output: (of_d, first, d_width), .. } = part;
        let (shared, op, mut p) = (&self.shared, &self.op, part.params);
        let touched = |operand: O, of: fn(&Extents) -> usize, width| {
            let (first, view) = (of(before), operands.get(operand));
            Touched { what: operand.name(), view, bytes: first..first + of(extents), width }
        };
        // An absent operand may have any width.
        let width = |dtype: Option<DType>| dtype.unwrap_or(op.d.dtype).bytes();
        let dense = |dense: Option<Dense>| width(dense.map(|dense| dense.dtype));
        let third = match op.x.planes {
            Some(_) => O::XScales,
            None if self.x_factor => O::XFactor,
            None => O::KOrder,
        };
        let (x, w, row_scale, k_order, c, bias, token_scale, residual, d);
        (x, p.x_base) = touched(O::X, |e| e.x, self.x_width).bind_vectors(shared)?;
        (w, p.w_base) = match self.phase {
            // No weight is read.
            Phase::Sum(_) => touched(O::W, |e| e.w, VECTOR as usize).bind(shared)?,
            Phase::Whole | Phase::Parts(_) => touched(O::W, |e| e.w, VECTOR as usize).bind_vectors(shared)?,
        };
        (row_scale, p.row_scale_base) = touched(O::RowScale, |e| e.row_scale, 4).bind(shared)?;
        (k_order, p.k_order_base) = touched(third, |e| e.k_order, 4).bind(shared)?;
        (c, p.c_base) = touched(O::C, |e| e.c, dense(op.c)).bind(shared)?;
        if let Some(swiglu) = swiglu_of(op) {
            p.c_base = swiglu.limit.to_bits();
        }
        (bias, p.bias_base) = touched(O::Bias, |e| e.bias, width(op.bias)).bind(shared)?;
        (token_scale, p.token_scale_base) = touched(O::TokenScale, |e| e.token_scale, 4).bind(shared)?;
        // D may alias the residual: an invocation reads the
        // elements of D that it then writes.
        let held = if op.residual_in_d { O::D } else { O::Residual };
        (residual, p.residual_base) = touched(held, |e| e.residual, dense(op.residual)).bind(shared)?;
        (d, p.d_base) = touched(*of_d, |e| e.d, *d_width).bind_written(shared)?;
        // Kernels count features over all outputs, in wrapping arithmetic.
        p.d_base = p.d_base.wrapping_sub(*first);
        let bindings = vec![x, w, row_scale, k_order, c, bias, token_scale, residual, d];
        Ok(Dispatch { params: p, bindings, grid: *grid })
    }
}

impl Kernel for GemmKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatches: Vec<_> =
            self.parts.iter().map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

/// Output operand of a launch, its first feature, and
/// the bytes of an element.
fn output(op: &CheckedGemm, launch: &Launch) -> (GemmOperand, u32, usize) {
    let (operand, features, d) = launch.output(op);
    (operand, features.start as u32, d.dtype.bytes())
}

/// Parameters without the `*_base` fields.
fn params(&Product { op, x, .. }: &Product<'_>, launch: &Launch) -> Params {
    let (m, (_, _, d)) = (launch.m.len(), launch.output(op));
    let swiglu = swiglu_of(op);
    let flags = [
        (FLAG_ROW_SCALE, op.row_scale),
        (FLAG_K_ORDER, op.k_order),
        // As in BLAS, C is not read when its factor is
        // 0, and may hold anything.
        (FLAG_C, op.c.is_some() && op.beta != 0.0),
        (FLAG_BIAS, op.bias.is_some()),
        (FLAG_TOKEN_SCALE, op.token_scale),
        (FLAG_RESIDUAL, op.residual.is_some()),
        (FLAG_GATED, op.gated),
        (FLAG_X_ALIGNED16, x.aligned16 && x.col_stride == 1),
    ];
    let modes = Modes {
        activation: op.activation,
        x: Some(x.dtype),
        d: Some(d.dtype),
        c: op.c.map(|c| c.dtype),
        bias: op.bias,
        residual: op.residual.map(|residual| residual.dtype),
        form: None,
    };
    Params {
        shape: GemmShape {
            m: m as u32,
            stored_rows: launch.rows.end as u32,
            k: op.k as u32,
            stored_k: op.stored_k as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            out_features: op.out_features as u32,
            alpha: op.alpha,
            beta: swiglu.map_or(op.beta, |swiglu| swiglu.beta),
        },
        modes: modes.packed(),
        x_row: stride(m, x.row_stride),
        x_col: match op.x.planes {
            Some(planes) => stride(m, planes.scales_row / 4),
            None if op.k > 1 => x.col_stride as u32,
            None => 1,
        },
        c_row: match swiglu {
            Some(swiglu) => swiglu.alpha.to_bits(),
            None => op.c.map_or(0, |c| stride(m, c.row_stride)),
        },
        d_row: stride(m, d.row_stride),
        residual_row: op.residual.map_or(0, |r| stride(m, r.row_stride)),
        n_first: launch.rows.start as u32,
        ..Params::default()
    }
}

/// Grid: N tiles along x and, beyond its
/// limit, z; M tiles along y.
fn grid(plan: &LaunchPlan, launch: &Launch) -> [u32; 3] {
    let n_tiles = (launch.rows.len() as u32).div_ceil(plan.config.tile_n);
    let columns = n_tiles.clamp(1, MAX_GROUPS);
    [columns, (launch.m.len() as u32).div_ceil(plan.config.tile_m), n_tiles.div_ceil(columns)]
}

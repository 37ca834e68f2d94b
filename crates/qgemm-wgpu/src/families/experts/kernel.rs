//! Launches of MoE kernels: bindings and parameters.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_C, FLAG_GATED, FLAG_K_ORDER, FLAG_LISTS, FLAG_RESIDUAL, FLAG_ROW_SCALE, FLAG_TOKEN_SCALE,
    FLAG_X_ALIGNED16, GemmShape, expert_form_code,
};
use qgemm_hal::{
    CheckedExperts, Dense, ExpertForm, ExpertOperand, HalError, Kernel, Operand, Operands, Stream, Unsupported,
};

use super::extents::{Extents, added_c};
use crate::event::WgpuStream;
use crate::families::dispatch::{Dispatch, stride, submit};
use crate::families::gemm::{INTERFACE as GEMM_INTERFACE, x_matrix};
use crate::families::modes::{Modes, swiglu_of};
use crate::families::operands::{Bound, Touched};
use crate::memory::VECTOR;
use crate::pipeline::{Compiled, Interface};
use crate::shared::Shared;

/// Kernel interface of the products: that of `gemm`, with the index
/// in the binding of C or of the row factors.
pub(crate) const INTERFACE: Interface =
    Interface { name: "experts", bindings: GEMM_INTERFACE.bindings, params_bytes: size_of::<Params>() as u32 };

/// Interface of the index check.
pub(crate) const CHECK_INTERFACE: Interface =
    Interface { name: "experts_check", bindings: "rrw", params_bytes: size_of::<CheckParams>() as u32 };

/// Interface of the kernel that gathers index and row factors.
pub(crate) const GATHER_INTERFACE: Interface =
    Interface { name: "experts_gather", bindings: "rrw", params_bytes: size_of::<GatherParams>() as u32 };

/// Interface of the combine kernel.
pub(crate) const COMBINE_INTERFACE: Interface =
    Interface { name: "experts_combine", bindings: "rrr----rw", params_bytes: size_of::<CombineParams>() as u32 };

/// `Params` of `shaders/experts_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Params {
    shape: GemmShape,
    modes: u32,
    x_row: u32,
    x_sharers: u32,
    experts: u32,
    first_expert: u32,
    bound_experts: u32,
    d_row: u32,
    c_row: u32,
    residual_row: u32,
    row_pitch: u32,
    w_base: u32,
    token_scale_base: u32,
    bases: [u32; 2],
    x_scale_row: u32,
    limit: f32,
}

/// `Params` of `shaders/experts_gather.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct GatherParams {
    index_words: u32,
    rows: u32,
    index_base: u32,
    factors_base: u32,
    gathered_base: u32,
}

/// `Params` of `shaders/experts_check.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct CheckParams {
    form: u32,
    experts: u32,
    rows: u32,
    has_weights: u32,
    index_base: u32,
    weights_base: u32,
    status_base: u32,
}

/// `Params` of `shaders/experts_combine.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct CombineParams {
    modes: u32,
    tokens: u32,
    features: u32,
    top_k: u32,
    experts: u32,
    flags: u32,
    d_row: u32,
    residual_row: u32,
    products_base: u32,
    index_base: u32,
    weights_base: u32,
    residual_base: u32,
    d_base: u32,
}

/// The kernel within the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Check,
    Gather,
    Product,
    Combine,
}

/// One kernel of an operation.
#[derive(Debug)]
pub(super) struct ExpertsKernel {
    pub what: What,
    pub compiled: Compiled,
    pub shared: Arc<Shared>,
    pub op: CheckedExperts,
    pub extents: Extents,
    pub grid: [u32; 3],
    /// Whether slots are grouped by expert.
    pub grouped: bool,
    /// Experts whose weights a dispatch binds.
    pub bound_experts: usize,
}

impl Kernel for ExpertsKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let op = self.op.of_portion(operands.portion());
        let extents = self.extents.of_portion(&op).map_err(|reason| self.refused(reason))?;
        let run = Run { kernel: self, op, extents };
        match self.what {
            What::Check => submit(&self.shared, &CHECK_INTERFACE, &self.compiled, &[run.check(&operands)?]),
            What::Gather => submit(&self.shared, &GATHER_INTERFACE, &self.compiled, &[run.gather(&operands)?]),
            What::Product => {
                let firsts = (0..self.op.experts).step_by(self.bound_experts);
                let dispatches: Vec<_> = firsts.map(|first| run.product(first, &operands)).collect::<Result<_, _>>()?;
                submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
            }
            What::Combine => submit(&self.shared, &COMBINE_INTERFACE, &self.compiled, &[run.combine(&operands)?]),
        }
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

impl ExpertsKernel {
    fn refused(&self, reason: Unsupported) -> HalError {
        HalError::Unsupported { device: self.shared.id, what: self.compiled.name.clone(), why: reason.why }
    }
}

/// A launch for all tokens or a portion of them. The
/// grid covers all tokens.
struct Run<'k> {
    kernel: &'k ExpertsKernel,
    op: CheckedExperts,
    extents: Extents,
}

impl Run<'_> {
    /// The first `bytes` bytes of an operand,
    /// accessed `width` at a time.
    fn touched<'a>(
        &self,
        operands: &'a Operands<'_>,
        operand: ExpertOperand,
        bytes: usize,
        width: usize,
    ) -> Touched<'a> {
        Touched { what: operand.name(), view: operands.get(operand), bytes: 0..bytes, width }
    }

    fn index<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Bound<'a>, HalError> {
        self.touched(operands, ExpertOperand::Index, self.op.index_len() * 4, 4).bind(&self.kernel.shared)
    }

    /// Operand that assigns rows to experts: the expert lists for
    /// grouped slots, otherwise the index.
    fn rows_index(&self) -> (ExpertOperand, usize) {
        match (self.kernel.grouped, self.op.list_parts()) {
            (true, Some([_, slots])) => (ExpertOperand::Lists, slots.end),
            _ => (ExpertOperand::Index, self.op.index_len() * 4),
        }
    }

    /// The index followed by the row factors, as one operand.
    fn gather<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, GatherParams>, HalError> {
        use ExpertOperand as O;
        let shared = &self.kernel.shared;
        let ((of_index, index_bytes), factor_bytes) = (self.rows_index(), self.extents.token_scale);
        let (index, index_base) = self.touched(operands, of_index, index_bytes, 4).bind(shared)?;
        let (factors, factors_base) = self.touched(operands, O::TokenScale, factor_bytes, 4).bind(shared)?;
        let all = index_bytes + factor_bytes;
        let (gathered, gathered_base) = self.touched(operands, O::Workspace, all, 4).bind_written(shared)?;
        let params = GatherParams {
            index_words: (index_bytes / 4) as u32,
            rows: (factor_bytes / 4) as u32,
            index_base,
            factors_base,
            gathered_base,
        };
        Ok(Dispatch { params, bindings: vec![index, factors, gathered], grid: self.kernel.grid })
    }

    fn router_weights<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Bound<'a>, HalError> {
        let bytes = if self.op.combine.is_some() { self.op.each.m * 4 } else { 0 };
        self.touched(operands, ExpertOperand::RouterWeights, bytes, 4).bind(&self.kernel.shared)
    }

    /// Row count for kernels; with a capacity, that of one expert.
    fn rows(&self) -> u32 {
        match self.op.form {
            ExpertForm::Masked { capacity } => capacity as u32,
            _ => self.op.each.m as u32,
        }
    }

    fn check<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, CheckParams>, HalError> {
        let (index, index_base) = self.index(operands)?;
        let (weights, weights_base) = self.router_weights(operands)?;
        let status = self.touched(operands, ExpertOperand::Status, 8, 4).bind_written(&self.kernel.shared)?;
        let params = CheckParams {
            form: expert_form_code(self.op.form),
            experts: self.op.experts as u32,
            rows: self.rows(),
            has_weights: self.op.combine.is_some().into(),
            index_base,
            weights_base,
            status_base: status.1,
        };
        Ok(Dispatch { params, bindings: vec![index, weights, status.0], grid: self.kernel.grid })
    }

    /// Rows of the experts that are bound together,
    /// from expert `first` on.
    fn product<'a>(&'a self, first: usize, operands: &'a Operands<'_>) -> Result<Dispatch<'a, Params>, HalError> {
        use ExpertOperand as O;
        let (op, each, shared) = (&self.op, &self.op.each, &self.kernel.shared);
        let (x_dense, _) = x_matrix(each).map_err(|reason| self.kernel.refused(reason))?;
        let extents = &self.extents;
        let of = |dense: Option<&Dense>| dense.map_or(4, |dense| dense.dtype.bytes());
        let touched = |operand, bytes, width| self.touched(operands, operand, bytes, width);
        let mut p = params(op, &x_dense, self.rows(), self.kernel.grouped);
        let end = op.experts.min(first + self.kernel.bound_experts);
        (p.first_expert, p.bound_experts) = (first as u32, (end - first) as u32);
        let weights = if op.weights() == 1 { 0..extents.w } else { first * extents.w..end * extents.w };
        let w = Touched { what: O::W.name(), view: operands.get(O::W), bytes: weights, width: VECTOR as usize };
        let (w, w_base) = w.bind_vectors(shared)?;
        p.w_base = w_base;
        let (x, x_base) = touched(O::X, extents.x, x_dense.dtype.bytes()).bind_vectors(shared)?;
        let (row_scale, row_scale_base) = touched(O::RowScale, extents.row_scale, 4).bind(shared)?;
        let third = if each.x.planes.is_some() { O::XScales } else { O::KOrder };
        let (k_order, k_order_base) = touched(third, extents.k_order, 4).bind(shared)?;
        let (of_index, index_bytes) = self.rows_index();
        let c = touched(O::C, extents.c, of(added_c(each)));
        let (fourth, c_base, seventh, index_base);
        match (added_c(each).is_some(), each.token_scale) {
            (false, _) => {
                (fourth, index_base) = touched(of_index, index_bytes, 4).bind(shared)?;
                (seventh, p.token_scale_base) = touched(O::TokenScale, extents.token_scale, 4).bind(shared)?;
                c_base = 0;
            }
            (true, false) => {
                (fourth, c_base) = c.bind(shared)?;
                (seventh, index_base) = touched(of_index, index_bytes, 4).bind(shared)?;
            }
            (true, true) => {
                (fourth, c_base) = c.bind(shared)?;
                (seventh, index_base) = touched(O::TokenScale, index_bytes + extents.token_scale, 4).bind(shared)?;
                p.token_scale_base = index_base + (index_bytes / 4) as u32;
            }
        }
        let (bias, bias_base) = touched(O::Bias, extents.bias, each.bias.map_or(4, DType::bytes)).bind(shared)?;
        let (residual, residual_base) =
            touched(O::Residual, extents.residual, of(each.residual.as_ref())).bind(shared)?;
        let (d, d_base) = touched(O::D, extents.d, of(Some(&each.d))).bind_written(shared)?;
        p.bases = [
            packed_bases([x_base, row_scale_base, k_order_base, index_base]),
            packed_bases([bias_base, c_base, residual_base, d_base]),
        ];
        let bindings = vec![x, w, row_scale, k_order, fourth, bias, seventh, residual, d];
        Ok(Dispatch { params: p, bindings, grid: self.kernel.grid })
    }

    fn combine<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, CombineParams>, HalError> {
        use ExpertOperand as O;
        let (op, each, shared) = (&self.op, &self.op.each, &self.kernel.shared);
        let ExpertForm::Indexed { top_k, .. } = op.form else {
            let why = "only slots are added up".to_owned();
            return Err(HalError::Unsupported { device: shared.id, what: self.kernel.compiled.name.clone(), why });
        };
        let (d, residual) = op.combine.map_or((each.d, None), |combine| (combine.d, combine.residual));
        let tokens = op.tokens();
        let bytes = |dense: &Dense| {
            dense.extent(tokens, each.out_features).map_or(0, |elements| elements as usize * dense.dtype.bytes())
        };
        let touched = |operand, bytes, width| self.touched(operands, operand, bytes, width);
        let (products, products_base) = touched(O::Products, each.m * each.out_features * 4, 4).bind(shared)?;
        let (index, index_base) = self.index(operands)?;
        let (weights, weights_base) = self.router_weights(operands)?;
        let residual_width = residual.map_or(4, |dense| dense.dtype.bytes());
        let (residual_binding, residual_base) =
            touched(O::Residual, residual.as_ref().map_or(0, bytes), residual_width).bind(shared)?;
        let (d_binding, d_base) = touched(O::D, bytes(&d), d.dtype.bytes()).bind_written(shared)?;
        let modes = Modes { d: Some(d.dtype), residual: residual.map(|dense| dense.dtype), ..Modes::default() };
        let params = CombineParams {
            modes: modes.packed(),
            tokens: tokens as u32,
            features: each.out_features as u32,
            top_k: top_k as u32,
            experts: op.experts as u32,
            flags: if residual.is_some() { FLAG_RESIDUAL } else { 0 },
            d_row: row_stride(&d, tokens),
            residual_row: residual.map_or(0, |dense| row_stride(&dense, tokens)),
            products_base,
            index_base,
            weights_base,
            residual_base,
            d_base,
        };
        let bindings = vec![products, index, weights, residual_binding, d_binding];
        Ok(Dispatch { params, bindings, grid: self.kernel.grid })
    }
}

/// Four offsets in one word. Each is below the adapter's offset
/// alignment, which is at most 256 bytes.
fn packed_bases(bases: [u32; 4]) -> u32 {
    bases.iter().rev().fold(0, |word, base| word << 8 | base)
}

/// Row stride in elements; 0 for a single row.
fn row_stride(dense: &Dense, rows: usize) -> u32 {
    stride(rows, dense.row_stride)
}

/// Parameters of a product without the `*_base` fields.
fn params(op: &CheckedExperts, x: &Dense, rows: u32, grouped: bool) -> Params {
    let each = &op.each;
    let flags = [
        (FLAG_ROW_SCALE, each.row_scale),
        (FLAG_K_ORDER, each.k_order),
        (FLAG_C, added_c(each).is_some()),
        (FLAG_BIAS, each.bias.is_some()),
        (FLAG_TOKEN_SCALE, each.token_scale),
        (FLAG_RESIDUAL, each.residual.is_some()),
        (FLAG_GATED, each.gated),
        (FLAG_X_ALIGNED16, x.aligned16),
        (FLAG_LISTS, grouped),
    ];
    let modes = Modes {
        activation: each.activation,
        x: Some(x.dtype),
        d: Some(each.d.dtype),
        c: added_c(each).map(|c| c.dtype),
        bias: each.bias,
        residual: each.residual.map(|residual| residual.dtype),
        form: Some(if grouped { ExpertForm::Contiguous } else { op.form }),
    };
    let swiglu = swiglu_of(each);
    let x_sharers = match op.form {
        ExpertForm::Indexed { top_k, x_per_slot: false } => top_k as u32,
        _ => 1,
    };
    Params {
        shape: GemmShape {
            m: rows,
            stored_rows: each.stored_rows as u32,
            k: each.k as u32,
            stored_k: each.stored_k as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            out_features: each.out_features as u32,
            alpha: each.alpha,
            beta: swiglu.map_or(each.beta, |swiglu| swiglu.beta),
        },
        modes: modes.packed(),
        x_row: row_stride(x, op.x_rows()),
        x_sharers,
        x_scale_row: each.x.planes.map_or(0, |planes| stride(op.x_rows(), planes.scales_row / 4)),
        experts: op.experts as u32,
        d_row: row_stride(&each.d, each.m),
        c_row: match swiglu {
            Some(swiglu) => swiglu.alpha.to_bits(),
            None => added_c(each).map_or(0, |c| row_stride(c, each.m)),
        },
        limit: swiglu.map_or(0.0, |swiglu| swiglu.limit),
        residual_row: each.residual.map_or(0, |residual| row_stride(&residual, each.m)),
        row_pitch: op.row_pitch as u32,
        ..Params::default()
    }
}

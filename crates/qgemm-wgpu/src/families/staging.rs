//! Activations that matrix instructions cannot read as they lie: which operations want a copy of them, and the
//! dispatches that make it in the workspace before the product's.

use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::abi::FLAG_X_FACTOR;
use qgemm_hal::{
    CheckedGemm, Dense, DeviceInfo, GemmArgs, HalError, StagedLayout, StagedX, TileConfig, Unsupported, XRounding,
};

use super::kernel::Dispatch;
use super::launches::{Extents, Launch, MARGIN};
use super::operands::Operand;
use super::{MAX_GROUPS, Params, kernel};
use crate::bind_groups::bind_group;
use crate::memory::VECTOR;
use crate::pipeline::pipeline;
use crate::shader;
use crate::shared::Shared;
use crate::weight_code::WeightCode;

/// Name of the kernel.
const NAME: &str = "stage_x";
/// Invocations that copy a token.
const THREADS: u32 = 256;
/// Tokens and columns of the largest tile and step, or several: the copy is padded to whole ones.
pub(super) const PADDING: (usize, usize) = (128, 64);

/// Whether a kernel may multiply X in f16, and has room for the copy that this may take.
pub(super) fn check(op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
    let allowed = match op.x.dtype {
        DType::F16 => true,
        DType::F32 => matches!(op.x_rounding, XRounding::F16 | XRounding::Int8),
        DType::BF16 => op.x_rounding != XRounding::Exact,
    };
    if !allowed {
        let why = format!("multiplies activations in f16, to which {} may not be rounded", op.x.dtype);
        return Err(Unsupported::new(why));
    }
    let (rows, columns) = (op.m.next_multiple_of(PADDING.0) as u64, op.stored_k.next_multiple_of(PADDING.1) as u64);
    let bytes = rows.saturating_mul(columns * 2 + 4);
    let limit = info.max_buffer_bytes;
    if bytes.saturating_add(MARGIN) > limit {
        return Err(Unsupported::new(format!("copies X, {bytes} bytes, of which a binding sees {limit} at most")));
    }
    Ok(())
}

/// The copy of X that a kernel of `config` takes where X itself will not do: its type is another, or its rows are not
/// whole steps of neighbouring columns in the order of W's.
pub(super) fn staged_x(op: &CheckedGemm, config: &TileConfig) -> Option<StagedX> {
    let scaled = op.x.dtype != DType::F16;
    let whole_steps = op.stored_k.is_multiple_of(config.tile_k as usize);
    let as_it_lies = !scaled && !op.k_order && op.x.col_stride == 1 && op.x.aligned16 && whole_steps;
    (!as_it_lies).then_some(StagedX { dtype: DType::F16, scaled })
}

/// The operation as the product sees it.
pub(super) fn staged_op(op: &CheckedGemm, layout: &StagedLayout) -> CheckedGemm {
    let x = Dense { dtype: DType::F16, row_stride: layout.columns as u64, col_stride: 1, aligned16: true };
    CheckedGemm { k: layout.columns, k_order: false, x, ..op.clone() }
}

/// The dispatches that make the copy.
#[derive(Debug)]
pub(super) struct Staging {
    /// Where copy and factors lie in the workspace.
    pub layout: StagedLayout,
    /// Whether there are factors.
    pub scaled: bool,
    pipeline: wgpu::ComputePipeline,
    x_width: usize,
    parts: Vec<Part>,
}

/// Tokens that one dispatch copies.
#[derive(Debug)]
struct Part {
    /// All but the `*_base` fields.
    params: Params,
    /// Bytes of X that it reads.
    x: Range<usize>,
    /// Bytes of the column order that it reads.
    k_order: Range<usize>,
    first_token: usize,
    grid: [u32; 3],
}

impl Staging {
    /// For `op`, in as many parts as `launches`, the first rows of which see all tokens.
    pub fn new(
        shared: &Shared,
        op: &CheckedGemm,
        code: &WeightCode,
        staged: StagedX,
        layout: StagedLayout,
        launches: &[Launch],
    ) -> Result<Self, HalError> {
        let pipeline = pipeline(shared, NAME, shader::compose_staging(THREADS))?;
        let part = |launch: &Launch| {
            let mut params = kernel::params(op, code, launch);
            params.d_row = layout.columns as u32;
            if staged.scaled {
                params.shape.flags |= FLAG_X_FACTOR;
            }
            let tokens = launch.m.len() as u32;
            let columns = tokens.min(MAX_GROUPS);
            let (extents, before) = (Extents::of(op, code, launch), kernel::before(op, code, launch));
            Part {
                params,
                x: before.x..before.x + extents.x,
                k_order: before.k_order..before.k_order + extents.k_order,
                first_token: launch.m.start,
                grid: [columns, tokens.div_ceil(columns), 1],
            }
        };
        let parts = launches.iter().filter(|launch| launch.n.start == 0).map(part).collect();
        Ok(Self { layout, scaled: staged.scaled, pipeline, x_width: op.x.dtype.bytes(), parts })
    }

    /// The dispatches of a launch.
    pub fn dispatches(&self, shared: &Arc<Shared>, args: &GemmArgs<'_>) -> Result<Vec<Dispatch<'_>>, HalError> {
        let workspace = args.workspace.as_ref().map(|workspace| workspace.as_ref());
        let StagedLayout { x: first, factors, rows, columns } = self.layout;
        let factor_bytes = if self.scaled { rows * 4 } else { 0 };
        let copy_end = factors + factor_bytes;
        let dispatch = |part: &Part| {
            let mut p = part.params;
            let absent = || shared.absent.as_entire_buffer_binding();
            let operand = |what, view, touched, width| Operand { what, view, touched, width };
            let (x, order, copy, copy_base);
            (x, p.x_base) = operand("X", Some(args.x), part.x.clone(), self.x_width).bind_vectors(shared)?;
            (order, p.k_order_base) =
                operand("the column order", args.w.k_order, part.k_order.clone(), 4).bind(shared)?;
            (copy, copy_base) = operand("the workspace", workspace, first..copy_end, VECTOR as usize).bind(shared)?;
            p.d_base = copy_base * 8 + (part.first_token * columns) as u32;
            p.token_scale_base = copy_base * 4 + ((factors - first) / 4 + part.first_token) as u32;
            let bindings = [x, absent(), absent(), order, absent(), absent(), absent(), absent(), copy];
            let group = bind_group(shared, NAME, bindings)?;
            Ok(Dispatch { pipeline: &self.pipeline, group, params: p, grid: part.grid })
        };
        self.parts.iter().map(dispatch).collect()
    }
}

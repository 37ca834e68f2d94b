//! A compiled kernel with its parameters: what a launch of any family does.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_C, FLAG_GATED, FLAG_K_ORDER, FLAG_RESIDUAL, FLAG_ROW_SCALE, FLAG_TOKEN_SCALE, FLAG_X_ALIGNED16,
    FLAG_X_FACTOR, GemmShape, activation_code, dtype_code,
};
use qgemm_hal::{CheckedGemm, Dense, GemmArgs, HalError, Kernel, LaunchPlan, Stream};

use super::launches::{Extents, Launch, TILE_ROWS};
use super::operands::Operand;
use super::staging::Staging;
use super::{MAX_GROUPS, Params};
use crate::bind_groups::{Bindings, bind_group};
use crate::event::WgpuStream;
use crate::memory::VECTOR;
use crate::shared::Shared;
use crate::weight_code::WeightCode;

/// A kernel for one operation. A launch makes no device memory: parameters travel as immediates. wgpu itself allocates
/// a command buffer on the host, and the first launch with its operands a bind group.
#[derive(Debug)]
pub(super) struct GemmKernel {
    name: String,
    shared: Arc<Shared>,
    pipeline: wgpu::ComputePipeline,
    /// As the kernel sees it: where X is copied, its X is the copy.
    op: CheckedGemm,
    staging: Option<Staging>,
    parts: Vec<Part>,
}

/// A compiled kernel, called as the operation was before X was copied.
pub(super) struct Compiled {
    pub name: String,
    pub pipeline: wgpu::ComputePipeline,
}

/// What is recorded of a dispatch.
pub(super) struct Dispatch<'a> {
    pub pipeline: &'a wgpu::ComputePipeline,
    pub group: wgpu::BindGroup,
    pub params: Params,
    pub grid: [u32; 3],
}

/// One dispatch of the product.
#[derive(Debug)]
struct Part {
    /// All but the `*_base` fields, which depend on the views of a launch.
    params: Params,
    extents: Extents,
    /// Bytes of an operand that other parts read or write before what is this one's.
    before: Extents,
    grid: [u32; 3],
}

impl GemmKernel {
    /// The kernel for `launches` of `op`, which sees the copy that `staging` makes, if it does, as its X.
    pub fn new(
        Compiled { name, pipeline }: Compiled,
        shared: Arc<Shared>,
        op: CheckedGemm,
        code: &WeightCode,
        plan: &LaunchPlan,
        staging: Option<Staging>,
        launches: Vec<Launch>,
    ) -> Self {
        let part = |launch: Launch| {
            let mut part = Part {
                params: params(&op, code, &launch),
                extents: Extents::of(&op, code, &launch),
                before: before(&op, code, &launch),
                grid: grid(plan, &launch),
            };
            if let Some(staging) = &staging {
                part.before.x += staging.layout.x;
                if staging.scaled {
                    // Where columns are in order, their binding is free.
                    part.params.shape.flags |= FLAG_X_FACTOR;
                    part.before.k_order = staging.layout.factors + launch.m.start * 4;
                    part.extents.k_order = launch.m.len() * 4;
                }
            }
            part
        };
        let parts = launches.into_iter().map(part).collect();
        Self { name, shared, pipeline, op, staging, parts }
    }

    /// The bindings of a part, and its parameters.
    fn bindings<'a>(&'a self, part: &Part, args: &'a GemmArgs<'a>) -> Result<(Bindings<'a>, Params), HalError> {
        let Part { extents, before, .. } = part;
        let (shared, op, mut p) = (&self.shared, &self.op, part.params);
        let copy = args.workspace.as_ref().map(|workspace| workspace.as_ref());
        let (x_view, order_view) = match &self.staging {
            Some(_) => (copy, copy),
            None => (Some(args.x), args.w.k_order),
        };
        let operand = |what, view, of: fn(&Extents) -> usize, width| {
            let first = of(before);
            Operand { what, view, touched: first..first + of(extents), width }
        };
        // Where an operand is absent, its width is that of any.
        let width = |dtype: Option<DType>| dtype.unwrap_or(op.d.dtype).bytes();
        let dense = |dense: Option<Dense>| width(dense.map(|dense| dense.dtype));
        let (x, w, row_scale, k_order, c, bias, token_scale, residual, d);
        (x, p.x_base) = operand("X", x_view, |e| e.x, dense(Some(op.x))).bind_vectors(shared)?;
        (w, p.w_base) = operand("W", Some(args.w.data), |e| e.w, VECTOR as usize).bind_vectors(shared)?;
        (row_scale, p.row_scale_base) = operand("the row scales", args.w.row_scale, |e| e.row_scale, 4).bind(shared)?;
        (k_order, p.k_order_base) = operand("the column order", order_view, |e| e.k_order, 4).bind(shared)?;
        (c, p.c_base) = operand("C", args.c, |e| e.c, dense(op.c)).bind(shared)?;
        (bias, p.bias_base) = operand("the bias", args.bias, |e| e.bias, width(op.bias)).bind(shared)?;
        (token_scale, p.token_scale_base) =
            operand("the token scales", args.token_scale, |e| e.token_scale, 4).bind(shared)?;
        (residual, p.residual_base) =
            operand("the residual", args.residual, |e| e.residual, dense(op.residual)).bind(shared)?;
        (d, p.d_base) = operand("D", Some(args.d.as_ref()), |e| e.d, dense(Some(op.d))).bind(shared)?;
        Ok(([x, w, row_scale, k_order, c, bias, token_scale, residual, d], p))
    }
}

impl Kernel for GemmKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let _span = tracing::trace_span!("launch", kernel = self.name).entered();
        // Before anything is recorded: what is wrong with this launch must not spoil those that it is recorded with.
        let mut dispatches = match &self.staging {
            Some(staging) => staging.dispatches(&self.shared, &args)?,
            None => Vec::new(),
        };
        for part in &self.parts {
            let (bindings, params) = self.bindings(part, &args)?;
            let group = bind_group(&self.shared, &self.name, bindings)?;
            dispatches.push(Dispatch { pipeline: &self.pipeline, group, params, grid: part.grid });
        }
        self.shared.scoped("launching a kernel", || {
            self.shared.launch(|pass| {
                for Dispatch { pipeline, group, params, grid } in &dispatches {
                    pass.set_pipeline(pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.set_immediates(0, bytemuck::bytes_of(params));
                    pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
                }
            });
        })
    }
}

/// All parameters but the `*_base` fields.
pub(super) fn params(op: &CheckedGemm, code: &WeightCode, launch: &Launch) -> Params {
    let m = launch.m.len();
    // With one row or column its stride plays no part; extents that were checked bound every other stride.
    let stride = |count: usize, stride: u64| if count > 1 { stride as u32 } else { 0 };
    let mut flags = 0;
    for (flag, set) in [
        (FLAG_ROW_SCALE, op.row_scale),
        (FLAG_K_ORDER, op.k_order),
        // As in BLAS, C is not read where its factor is 0, and may hold anything.
        (FLAG_C, op.c.is_some() && op.beta != 0.0),
        (FLAG_BIAS, op.bias.is_some()),
        (FLAG_TOKEN_SCALE, op.token_scale),
        (FLAG_RESIDUAL, op.residual.is_some()),
        (FLAG_GATED, op.gated),
        (FLAG_X_ALIGNED16, op.x.aligned16 && op.x.col_stride == 1),
    ] {
        if set {
            flags |= flag;
        }
    }
    Params {
        shape: GemmShape {
            m: m as u32,
            n: launch.n.end as u32,
            k: op.k as u32,
            stored_k: op.stored_k as u32,
            k_slabs: code.k_slabs(op.stored_k) as u32,
            splits: 1,
            flags,
            activation: activation_code(op.activation),
            d_dtype: dtype_code(op.d.dtype),
            c_dtype: op.c.map_or(0, |c| dtype_code(c.dtype)),
            bias_dtype: op.bias.map_or(0, dtype_code),
            x_dtype: dtype_code(op.x.dtype),
            alpha: op.alpha,
            beta: op.beta,
            features: op.features as u32,
            residual_dtype: op.residual.map_or(0, |r| dtype_code(r.dtype)),
        },
        x_row: stride(m, op.x.row_stride),
        x_col: if op.k > 1 { op.x.col_stride as u32 } else { 1 },
        c_row: op.c.map_or(0, |c| stride(m, c.row_stride)),
        d_row: stride(m, op.d.row_stride),
        residual_row: op.residual.map_or(0, |r| stride(m, r.row_stride)),
        n_first: launch.n.start as u32,
        ..Params::default()
    }
}

/// What stands before a launch's tokens and rows.
pub(super) fn before(op: &CheckedGemm, code: &WeightCode, launch: &Launch) -> Extents {
    let tokens = |dense: Dense| launch.m.start * dense.row_stride as usize * dense.dtype.bytes();
    Extents {
        x: tokens(op.x),
        w: launch.n.start / TILE_ROWS * code.row_of_tiles_bytes(op.stored_k),
        c: op.c.map_or(0, tokens),
        token_scale: launch.m.start * 4,
        residual: op.residual.map_or(0, tokens),
        d: tokens(op.d),
        ..Extents::default()
    }
}

/// Tiles along N, those beyond one dimension's limit continuing along z, and tiles along M.
fn grid(plan: &LaunchPlan, launch: &Launch) -> [u32; 3] {
    let n_tiles = (launch.n.len() as u32).div_ceil(plan.config.tile_n);
    let columns = n_tiles.clamp(1, MAX_GROUPS);
    [columns, (launch.m.len() as u32).div_ceil(plan.config.tile_m), n_tiles.div_ceil(columns)]
}

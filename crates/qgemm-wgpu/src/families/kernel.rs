//! A compiled kernel with its parameters: what a launch of any family does.

use std::sync::Arc;

use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_C, FLAG_GATED, FLAG_K_ORDER, FLAG_RESIDUAL, FLAG_ROW_SCALE, FLAG_TOKEN_SCALE, GemmShape,
    activation_code, dtype_code,
};
use qgemm_hal::{BufferRef, CheckedGemm, GemmArgs, HalError, Kernel, LaunchPlan, Stream};

use super::extents::Extents;
use super::{MAX_GROUPS, Params, STORAGE_BUFFERS};
use crate::event::WgpuStream;
use crate::memory::WgpuBuffer;
use crate::shared::Shared;

/// A kernel for one operation. A launch makes no device memory: parameters travel as immediates. wgpu itself
/// allocates a bind group and a command buffer on the host.
#[derive(Debug)]
pub(super) struct GemmKernel {
    name: String,
    shared: Arc<Shared>,
    pipeline: wgpu::ComputePipeline,
    /// All but the `*_base` fields, which depend on the views of a launch.
    params: Params,
    extents: Extents,
    grid: [u32; 3],
    /// Bytes of an element of X, C, bias, residual and D.
    widths: Widths,
}

#[derive(Clone, Copy, Debug)]
struct Widths {
    x: usize,
    c: usize,
    bias: usize,
    residual: usize,
    d: usize,
}

impl GemmKernel {
    pub fn new(
        name: String,
        shared: Arc<Shared>,
        pipeline: wgpu::ComputePipeline,
        op: &CheckedGemm,
        plan: &LaunchPlan,
        extents: Extents,
    ) -> Self {
        let c = op.c.unwrap_or(op.d);
        let bias = op.bias.unwrap_or(op.d.dtype);
        let residual = op.residual.unwrap_or(op.d);
        Self {
            name,
            shared,
            pipeline,
            params: params(op, plan),
            extents,
            grid: grid(plan),
            widths: Widths {
                x: op.x.dtype.bytes(),
                c: c.dtype.bytes(),
                bias: bias.bytes(),
                residual: residual.dtype.bytes(),
                d: op.d.dtype.bytes(),
            },
        }
    }

    /// What of `view` to bind, and how many elements of `width` bytes the operand begins behind that.
    fn bind<'a>(
        &'a self,
        view: Option<BufferRef<'a>>,
        what: &'static str,
        bytes: usize,
        width: usize,
    ) -> Result<(wgpu::BufferBinding<'a>, u32), HalError> {
        if bytes == 0 {
            return Ok((self.shared.absent.as_entire_buffer_binding(), 0));
        }
        let len = view.map_or(0, |view| view.len());
        let Some(view) = view.filter(|_| len >= bytes) else {
            return Err(HalError::OutOfBounds { what, start: 0, end: bytes, len });
        };
        let raw = WgpuBuffer::of(&self.shared, view, what)?;
        let unsupported = |why| HalError::Unsupported { device: self.shared.id, what: format!("{what} here"), why };
        let limits = &self.shared.limits;
        let behind = view.offset() % limits.min_storage_buffer_offset_alignment as usize;
        if !behind.is_multiple_of(width) {
            return Err(unsupported(format!("it begins at byte {}, inside an element", view.offset())));
        }
        let size = (behind + bytes).next_multiple_of(4) as u64;
        if size > limits.max_storage_buffer_binding_size {
            let limit = limits.max_storage_buffer_binding_size;
            return Err(unsupported(format!("{size} bytes exceed max_storage_buffer_binding_size, {limit}")));
        }
        let binding = wgpu::BufferBinding {
            buffer: &raw.buffer,
            offset: (view.offset() - behind) as u64,
            size: wgpu::BufferSize::new(size),
        };
        Ok((binding, (behind / width) as u32))
    }
}

impl Kernel for GemmKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let _span = tracing::trace_span!("launch", kernel = self.name).entered();
        let (extents, widths) = (&self.extents, self.widths);
        let mut params = self.params;
        let (x, w, row_scale, k_order, c, bias, token_scale, residual, d);
        (x, params.x_base) = self.bind(Some(args.x), "X", extents.x, widths.x)?;
        (w, params.w_base) = self.bind(Some(args.w.data), "W", extents.w, 1)?;
        (row_scale, params.row_scale_base) = self.bind(args.w.row_scale, "the row scales", extents.row_scale, 4)?;
        (k_order, params.k_order_base) = self.bind(args.w.k_order, "the column order", extents.k_order, 4)?;
        (c, params.c_base) = self.bind(args.c, "C", extents.c, widths.c)?;
        (bias, params.bias_base) = self.bind(args.bias, "the bias", extents.bias, widths.bias)?;
        (token_scale, params.token_scale_base) =
            self.bind(args.token_scale, "the token scales", extents.token_scale, 4)?;
        (residual, params.residual_base) =
            self.bind(args.residual, "the residual", extents.residual, widths.residual)?;
        (d, params.d_base) = self.bind(Some(args.d.as_ref()), "D", extents.d, widths.d)?;

        let bindings: [wgpu::BufferBinding<'_>; STORAGE_BUFFERS as usize] =
            [x, w, row_scale, k_order, c, bias, token_scale, residual, d];
        let mut binding = 0..;
        let entries = bindings.map(|buffer| wgpu::BindGroupEntry {
            binding: binding.next().unwrap_or_default(),
            resource: wgpu::BindingResource::Buffer(buffer),
        });
        let device = &self.shared.device;
        self.shared.scoped("launching a kernel", || {
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&self.name),
                layout: &self.shared.pipelines.bindings,
                entries: &entries,
            });
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.set_immediates(0, bytemuck::bytes_of(&params));
            pass.dispatch_workgroups(self.grid[0], self.grid[1], self.grid[2]);
            drop(pass);
            self.shared.queue.submit([encoder.finish()]);
        })
    }
}

fn params(op: &CheckedGemm, plan: &LaunchPlan) -> Params {
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
    ] {
        if set {
            flags |= flag;
        }
    }
    Params {
        shape: GemmShape {
            m: op.m as u32,
            n: op.n as u32,
            k: op.k as u32,
            stored_k: op.stored_k as u32,
            k_slabs: plan.k_steps,
            splits: plan.splits,
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
        x_row: stride(op.m, op.x.row_stride),
        x_col: if op.k > 1 { op.x.col_stride as u32 } else { 1 },
        c_row: op.c.map_or(0, |c| stride(op.m, c.row_stride)),
        d_row: stride(op.m, op.d.row_stride),
        residual_row: op.residual.map_or(0, |r| stride(op.m, r.row_stride)),
        w_row: op.format.row_bytes(op.stored_k) as u32,
        ..Params::default()
    }
}

/// Tiles along N, those beyond one dimension's limit continuing along z, and tiles along M.
fn grid(plan: &LaunchPlan) -> [u32; 3] {
    let columns = plan.n_tiles.clamp(1, MAX_GROUPS);
    [columns, plan.m_tiles, plan.n_tiles.div_ceil(columns)]
}

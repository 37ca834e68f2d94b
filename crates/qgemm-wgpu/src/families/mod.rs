//! The kernel families of the backend.

mod extents;
pub(crate) mod gemm;
pub(crate) mod gemv;
mod kernel;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::PackClass;
use qgemm_hal::abi::GemmShape;
use qgemm_hal::{CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Unsupported};

use crate::device::WgpuDevice;
use crate::pipeline::pipeline;
use crate::shader;
use extents::Extents;
use kernel::GemmKernel;

/// What a wgpu device offers.
pub(crate) static FAMILIES: &[&dyn KernelFamily] = &[&gemv::Gemv, &gemm::Gemm];

/// Storage buffers of every kernel, D being the last: see `shaders/params.wgsl`.
pub(crate) const STORAGE_BUFFERS: u32 = 9;

/// Workgroups along one dimension of a grid, on every adapter.
const MAX_GROUPS: u32 = 65_535;

/// `Params` of `shaders/params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: GemmShape,
    x_row: u32,
    x_col: u32,
    c_row: u32,
    d_row: u32,
    residual_row: u32,
    w_row: u32,
    x_base: u32,
    w_base: u32,
    row_scale_base: u32,
    k_order_base: u32,
    c_base: u32,
    bias_base: u32,
    token_scale_base: u32,
    residual_base: u32,
    d_base: u32,
}

/// Size of the parameters, which travel as immediates (128 bytes at most).
pub(crate) const PARAMS_BYTES: u32 = size_of::<Params>() as u32;
const _: () = assert!(PARAMS_BYTES == 124);

/// What all families need of an operation.
fn check(op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
    if op.class != PackClass::Canonical {
        return Err(Unsupported::new(format!("reads canonical weights, not layout {:?}", op.class)));
    }
    if shader::dequant(op.format).is_none() {
        return Err(Unsupported::new(format!("there is no dequant/{}.wgsl", op.format.dequant)));
    }
    if [Some(op.d), op.c, op.residual].iter().flatten().any(|dense| dense.col_stride != 1) {
        return Err(Unsupported::new("stores row-major D and reads row-major C and residuals"));
    }
    Extents::of(op).and_then(|extents| extents.check(info.max_buffer_bytes)).map_err(Unsupported::new)
}

/// Compiles the main loop `source` for `op` and computes everything a launch needs.
fn prepare(
    source: &str,
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
) -> Result<Arc<dyn Kernel>, HalError> {
    let id = device.info().id;
    let name = op.kernel_name(plan.config.family);
    let Some(WgpuDevice { shared, .. }) = device.as_any().downcast_ref() else {
        return Err(HalError::WrongDevice { device: id, what: "a plan of the wgpu backend" });
    };
    let unsupported = |why| HalError::Unsupported { device: id, what: name.clone(), why };
    let Some(dequant) = shader::dequant(op.format) else {
        return Err(unsupported(format!("there is no dequant/{}.wgsl", op.format.dequant)));
    };
    let limits = &shared.limits;
    let extents = Extents::of(op)
        .and_then(|extents| extents.check(limits.max_storage_buffer_binding_size).map(|()| extents))
        .map_err(unsupported)?;
    let prelude = shader::prelude(op.format, op.x.dtype, &plan.config);
    let text = shader::compose(&prelude, op.format, op.d.dtype, dequant, source);
    let pipeline = pipeline(shared, &name, &prelude, text)?;
    Ok(Arc::new(GemmKernel::new(name, shared.clone(), pipeline, op, plan, extents)))
}

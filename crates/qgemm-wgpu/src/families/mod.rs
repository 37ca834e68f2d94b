//! The kernel families of the backend.

pub(crate) mod gemm;
pub(crate) mod gemm_int8;
pub(crate) mod gemm_matrix;
pub(crate) mod gemv;
pub(crate) mod gemv_int8;
mod kernel;
mod launches;
mod operands;
mod staging;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::GemmShape;
use qgemm_hal::{CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported};

use crate::device::WgpuDevice;
use crate::pipeline::pipeline;
use crate::shader::{self, Part};
use crate::shared::Shared;
use crate::weight_code::{CLASS, WeightCode};
use kernel::{Compiled, GemmKernel};
use launches::Launch;
use staging::Staging;

/// What a wgpu device offers.
pub(crate) static FAMILIES: &[&dyn KernelFamily] =
    &[&gemv::Gemv, &gemm::Gemm, &gemv_int8::GemvInt8, &gemm_int8::GemmInt8, &gemm_matrix::GemmMatrix];

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
    n_first: u32,
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

/// What all families need of an operation; `config` is the smallest that the adapter has room for.
fn check(op: &CheckedGemm, info: &DeviceInfo, config: Option<TileConfig>) -> Result<(), Unsupported> {
    let Some(config) = config else {
        return Err(Unsupported::new(format!("{} bytes of workgroup memory are too few", info.shared_bytes)));
    };
    if op.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", op.class)));
    }
    if [Some(op.d), op.c, op.residual].iter().flatten().any(|dense| dense.col_stride != 1) {
        return Err(Unsupported::new("stores row-major D and reads row-major C and residuals"));
    }
    let code = weight_code(op)?;
    Launch::of(op, &code, &config, info.max_buffer_bytes).map(|_| ()).map_err(Unsupported::new)
}

fn weight_code(op: &CheckedGemm) -> Result<WeightCode, Unsupported> {
    if shader::dequant(op.format).is_none() {
        return Err(Unsupported::new(format!("there is no dequant/{}.wgsl", op.format.dequant)));
    }
    WeightCode::new(op.format).ok_or_else(|| Unsupported::new("reads codes of one or two planes"))
}

/// Compiles the family's `part` for `op`, `None` where the device has none for the plan, and computes everything a
/// launch needs.
fn prepare(
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
    part: impl FnOnce(&WeightCode, &Shared) -> Option<Part>,
) -> Result<Arc<dyn Kernel>, HalError> {
    let info = device.info();
    let name = op.kernel_name(plan.config.family);
    let Some(WgpuDevice { shared, .. }) = device.as_any().downcast_ref() else {
        return Err(HalError::WrongDevice { device: info.id, what: "a plan of the wgpu backend" });
    };
    let unsupported = |why| HalError::Unsupported { device: info.id, what: name.clone(), why };
    let code = weight_code(op).map_err(|reason| unsupported(reason.why))?;
    let cut = |op: &CheckedGemm| Launch::of(op, &code, &plan.config, info.max_buffer_bytes).map_err(unsupported);
    let layout = plan.workspace_layout().and_then(|layout| layout.staged_x);
    let (op, staging) = match plan.config.staged_x.zip(layout) {
        None => (op.clone(), None),
        Some((staged, layout)) => {
            let staging = Staging::new(shared, op, &code, staged, layout, &cut(op)?)?;
            (staging::staged_op(op, &layout), Some(staging))
        }
    };
    let launches = cut(&op)?;
    let part = part(&code, shared).ok_or_else(|| unsupported("the plan is another device's".to_owned()))?;
    let shader = shader::compose(op.format, &code, &part);
    let pipeline = pipeline(shared, &name, shader)?;
    let compiled = Compiled { name, pipeline };
    Ok(Arc::new(GemmKernel::new(compiled, shared.clone(), op, &code, plan, staging, launches)))
}

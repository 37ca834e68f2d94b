//! A prepared kernel and its launch: shared by the families, whose kernels take the same parameters.

use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::{self, GemmPointers, GemmShape, dtype_code};
use qgemm_hal::{
    Activation, BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, Kernel, LaunchPlan, Stream,
    Unsupported, Variant,
};

use super::instance::{Instance, class};
use crate::device::CudaDevice;
use crate::function::{Function, Start};
use crate::memory::device_address;

/// The kernels' parameter (`GemmParams` in `mainloop/x_tile.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct GemmParams {
    shape: GemmShape,
    at: GemmPointers,
}

/// A kernel that is loaded, with all parameters but the addresses.
struct GemmKernel {
    name: String,
    function: Function,
    device: DeviceId,
    plan: LaunchPlan,
    params: GemmParams,
    start: Start,
    /// Offsets of partial sums and counters in the workspace, where K is split.
    workspace: Option<(u64, u64)>,
}

impl fmt::Debug for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmKernel").field("name", &self.name).field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// The variant of the device that `info` describes.
pub(super) fn variant(info: &DeviceInfo) -> Result<Variant, Unsupported> {
    info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))
}

/// Whether the weight lies in the layout that kernels of `variant` read.
pub(super) fn check_class(op: &CheckedGemm, variant: Variant) -> Result<(), Unsupported> {
    let expected = class(variant);
    if op.class == expected {
        return Ok(());
    }
    Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", op.class)))
}

/// Whether the device has the shared memory that the kernel needs.
pub(super) fn check_shared(instance: &Instance, info: &DeviceInfo) -> Result<(), Unsupported> {
    let (needs, has) = (instance.shared_bytes(), info.shared_bytes);
    if needs <= has {
        return Ok(());
    }
    Err(Unsupported::new(format!("needs {needs} bytes of shared memory, of which the device has {has}")))
}

/// Loads the kernel that `plan` chose among the `instances` of its family.
pub(super) fn prepare(
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
    instances: fn(Format, DType, Variant) -> Vec<Instance>,
) -> Result<Arc<dyn Kernel>, HalError> {
    let cuda = CudaDevice::of(device)?;
    let id = device.info().id;
    let unavailable = |why: &str| HalError::KernelUnavailable {
        kernel: op.kernel_name(plan.config.family),
        target: device.info().arch.clone(),
        why: why.to_owned(),
    };
    let variant = device.info().variant.ok_or(HalError::WrongDevice { device: id, what: "a CUDA kernel" })?;
    let instance = instances(op.format, op.x.dtype, variant)
        .into_iter()
        .find(|i| i.config() == plan.config)
        .ok_or_else(|| unavailable("the plan's configuration is none of the family's"))?;
    let function = cuda.kernel(&instance.spec())?;
    let layout = plan.workspace_layout().ok_or_else(|| unavailable("the size of its workspace overflows"))?;
    let workspace = (plan.splits > 1).then_some((layout.partials as u64, layout.counters as u64));
    Ok(Arc::new(GemmKernel {
        name: op.kernel_name(plan.config.family),
        function,
        device: id,
        plan: *plan,
        params: params(op, plan),
        // Kernels of these variants wait where they must (`griddepcontrol_wait` in atoms/sync.cuh).
        start: if instance.variant >= Variant::Sm90 { Start::Early } else { Start::InOrder },
        workspace,
    }))
}

/// Everything but the addresses. The API has checked that counts fit 32 bits.
fn params(op: &CheckedGemm, plan: &LaunchPlan) -> GemmParams {
    let flag = |present: bool, flag: u32| if present { flag } else { 0 };
    let shape = GemmShape {
        m: op.m as u32,
        n: op.n as u32,
        k: op.k as u32,
        stored_k: op.stored_k as u32,
        k_slabs: plan.k_steps,
        splits: plan.splits,
        flags: flag(op.row_scale, abi::FLAG_ROW_SCALE)
            | flag(op.k_order, abi::FLAG_K_ORDER)
            | flag(op.c.is_some(), abi::FLAG_C)
            | flag(op.bias.is_some(), abi::FLAG_BIAS)
            | flag(op.x.aligned16, abi::FLAG_X_ALIGNED16),
        activation: match op.activation {
            Activation::Identity => 0,
        },
        d_dtype: dtype_code(op.d.dtype),
        c_dtype: op.c.map_or(0, |c| dtype_code(c.dtype)),
        bias_dtype: op.bias.map_or(0, dtype_code),
        x_dtype: dtype_code(op.x.dtype),
        alpha: op.alpha,
        beta: op.beta,
        ..GemmShape::default()
    };
    let at = GemmPointers {
        x_row: op.x.row_stride,
        x_col: op.x.col_stride,
        c_row: op.c.map_or(0, |c| c.row_stride),
        d_row: op.d.row_stride,
        ..GemmPointers::default()
    };
    GemmParams { shape, at }
}

impl Kernel for GemmKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        let address = |view: BufferRef<'_>, what| device_address(self.device, view, what);
        let optional = |view: Option<BufferRef<'_>>, what| view.map_or(Ok(0), |v| address(v, what));
        let mut params = self.params;
        params.at.x = address(args.x, "x")?;
        params.at.w = address(args.w.data, "the weight")?;
        params.at.row_scale = optional(args.w.row_scale, "the row scales")?;
        params.at.k_order = optional(args.w.k_order, "the column order")?;
        params.at.c = optional(args.c, "c")?;
        params.at.bias = optional(args.bias, "the bias")?;
        params.at.d = address(args.d.as_ref(), "d")?;
        if let (Some((partials, counters)), Some(workspace)) = (self.workspace, &args.workspace) {
            let base = address(workspace.as_ref(), "the workspace")?;
            params.at.partials = base + partials;
            params.at.counters = base + counters;
        }
        let config = &self.plan.config;
        // SAFETY: `GemmParams` is the parameter of the families' kernels, whose layout the generated abi.cuh asserts.
        // The API checked that every operand is as long as shape and strides say, and that the workspace is as long
        // as the plan asks and zeroed; the borrows in `args` outlive the call, and buffers are freed in stream order
        // or after the device is idle. Kernels that may start early read only weights before they wait.
        unsafe {
            self.function.launch(
                stream,
                self.plan.grid,
                config.threads,
                config.shared_bytes,
                bytemuck::bytes_of(&params),
                self.start,
            )
        }
    }
}

//! A prepared kernel and its launch: shared by the families, whose kernels take the same parameters.

use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{self, GemmPointers, GemmShape, dtype_code};
use qgemm_hal::{
    Activation, BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, Kernel, LaunchPlan, Stream,
    Unsupported, Variant, WorkspaceLayout,
};

use super::instance::{Instance, class};
use crate::device::CudaDevice;
use crate::function::{Function, Start};
use crate::memory::device_address;
use crate::spec::KernelSpec;

/// The kernels' parameter (`GemmParams` in `mainloop/params.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct GemmParams {
    shape: GemmShape,
    at: GemmPointers,
}

impl GemmParams {
    /// As the kernel sees it.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

/// A kernel of a family with its launch and all parameters but the addresses: what a GPU needs to run it, or an
/// emulation of one.
#[derive(Clone, Debug)]
pub struct GemmLaunch {
    /// The kernel's name in plans and messages: `gemm_nt_q4_k_f16`.
    pub name: String,
    /// The kernel.
    pub spec: KernelSpec,
    /// Grid, threads, shared memory.
    pub plan: LaunchPlan,
    /// Whether the kernel may start before earlier work of its stream is done: it then waits itself
    /// (`griddepcontrol.wait`) before it reads anything but the weight, and before it writes.
    pub starts_early: bool,
    /// Where partial sums and counters lie in the workspace, when K is split.
    pub workspace: Option<WorkspaceLayout>,
    params: GemmParams,
}

impl GemmLaunch {
    /// The launch that `plan` describes of a kernel among the `instances` of its family.
    fn new(
        op: &CheckedGemm,
        plan: &LaunchPlan,
        info: &DeviceInfo,
        instances: impl Iterator<Item = Instance>,
    ) -> Result<Self, HalError> {
        let unavailable = |why: &str| HalError::KernelUnavailable {
            kernel: op.kernel_name(plan.config.family),
            target: info.arch.clone(),
            why: why.to_owned(),
        };
        let mut instances = instances.filter(|i| i.config() == plan.config);
        let instance =
            instances.next().ok_or_else(|| unavailable("the plan's configuration is none of the family's"))?;
        let layout = plan.workspace_layout().ok_or_else(|| unavailable("the size of its workspace overflows"))?;
        Ok(Self {
            name: op.kernel_name(plan.config.family),
            spec: instance.spec(),
            plan: *plan,
            // Kernels of these variants wait where they must (`griddepcontrol_wait` in atoms/sync.cuh).
            starts_early: instance.variant >= Variant::Sm90,
            workspace: (plan.splits > 1).then_some(layout),
            params: params(op, plan),
        })
    }

    /// The kernel's parameter as bytes, with the addresses that `address` gives of the arguments.
    ///
    /// # Errors
    /// Those of `address`.
    pub fn params(
        &self,
        args: &GemmArgs<'_>,
        address: impl Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
    ) -> Result<GemmParams, HalError> {
        let optional = |view: Option<BufferRef<'_>>, what| view.map_or(Ok(0), |v| address(v, what));
        let mut params = self.params;
        params.at.x = address(args.x, "x")?;
        params.at.w = address(args.w.data, "the weight")?;
        params.at.row_scale = optional(args.w.row_scale, "the row scales")?;
        params.at.k_order = optional(args.w.k_order, "the column order")?;
        params.at.c = optional(args.c, "c")?;
        params.at.bias = optional(args.bias, "the bias")?;
        params.at.d = address(args.d.as_ref(), "d")?;
        if let (Some(layout), Some(workspace)) = (&self.workspace, &args.workspace) {
            let base = address(workspace.as_ref(), "the workspace")?;
            params.at.partials = base + layout.partials as u64;
            params.at.counters = base + layout.counters as u64;
        }
        Ok(params)
    }
}

/// A launch whose kernel is loaded.
struct GemmKernel {
    launch: GemmLaunch,
    function: Function,
    device: DeviceId,
}

impl fmt::Debug for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmKernel").field("launch", &self.launch).finish_non_exhaustive()
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

/// The launch of the kernel of the family `family` that `plan` describes, on a device like `info`.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the plan is none of the family's, [`HalError::WrongDevice`] when the device has
/// no kernel variant.
pub fn launch_of(family: &str, op: &CheckedGemm, plan: &LaunchPlan, info: &DeviceInfo) -> Result<GemmLaunch, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let instances = super::instances(op.format, op.x.dtype, variant).filter(|i| i.family() == family);
    GemmLaunch::new(op, plan, info, instances)
}

/// Loads the kernel that `plan` chose of the family `family`.
pub(super) fn prepare(
    family: &str,
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
) -> Result<Arc<dyn Kernel>, HalError> {
    let cuda = CudaDevice::of(device)?;
    let launch = launch_of(family, op, plan, device.info())?;
    let function = cuda.kernel(&launch.spec)?;
    Ok(Arc::new(GemmKernel { launch, function, device: device.info().id }))
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
        &self.launch.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        let params = self.launch.params(&args, |view, what| device_address(self.device, view, what))?;
        let GemmLaunch { plan, starts_early, .. } = &self.launch;
        let start = if *starts_early { Start::Early } else { Start::InOrder };
        // SAFETY: `GemmParams` is the parameter of the families' kernels, whose layout the generated abi.cuh asserts.
        // The API checked that every operand is as long as shape and strides say, and that the workspace is as long
        // as the plan asks and zeroed; the borrows in `args` outlive the call, and buffers are freed in stream order
        // or after the device is idle. Kernels that may start early read only weights before they wait.
        unsafe {
            let config = &plan.config;
            self.function.launch(stream, plan.grid, config.threads, config.shared_bytes, params.as_bytes(), start)
        }
    }
}

//! A prepared kernel and its launch: shared by the families, whose kernels take the same parameters.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::abi::{self, GemmPointers, GemmShape, TileSchedule, activation_code, dtype_code};
use qgemm_hal::{
    BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, Kernel, LaunchPlan, Stream, StreamK,
    Unsupported, Variant, WorkspaceLayout,
};

use super::gemm::{Instance, K_BLOCK, XAccess, instances};
use super::params::{GemmParams, LaunchParams};
use super::staging::{StageLaunch, staged_op};
use crate::arch;
use crate::function::{Function, Start};
use crate::gpu::Gpu;
use crate::launch::Geometry;
use crate::memory::device_address;
use crate::spec::KernelSpec;
use crate::tensor_map::{self, EncodedMap, XMap};

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
    /// Where counters, partial sums and staged activations lie in the workspace, when there is any.
    pub workspace: Option<WorkspaceLayout>,
    /// The launch before this one, which copies X.
    pub staging: Option<StageLaunch>,
    /// Bytes from the gate's bias to the up's, of a gated pair.
    second_bias: u64,
    params: GemmParams,
    /// Whether the kernel reads X through a tensor map.
    takes_x_map: bool,
    x_dtype: DType,
}

impl GemmLaunch {
    /// The launch that `plan` describes of a kernel among the `instances` of its family.
    fn new(
        op: &CheckedGemm,
        plan: &LaunchPlan,
        info: &DeviceInfo,
        family: &str,
        variant: Variant,
    ) -> Result<Self, HalError> {
        let unavailable = |why: &str| HalError::KernelUnavailable {
            kernel: op.kernel_name(plan.config.family),
            target: info.arch.clone(),
            why: why.to_owned(),
        };
        let layout = plan.workspace_layout().ok_or_else(|| unavailable("the size of its workspace overflows"))?;
        let staging = (plan.config.staged_x.zip(layout.staged_x))
            .map(|(staged, at)| StageLaunch::new(op, staged, at, variant, info));
        let staged;
        let op = match &staging {
            None => op,
            Some(staging) => {
                staged = staged_op(op, staging.staged, &staging.layout);
                &staged
            }
        };
        let mut all = instances(op.format, op.x.dtype, variant).iter();
        let instance = all
            .find(|i| i.main_loop.family == family && i.is(&plan.config))
            .ok_or_else(|| unavailable("the plan's configuration is none of the family's"))?;
        Ok(Self {
            name: op.kernel_name(plan.config.family),
            spec: instance.spec(),
            plan: *plan,
            // Kernels of these variants wait where they must (`griddepcontrol_wait` in atoms/sync.cuh).
            starts_early: variant >= Variant::Sm90,
            workspace: (layout.bytes > 0).then_some(layout),
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.features * dtype.bytes()) as u64,
            params: params(op, plan),
            takes_x_map: instance.main_loop.x_access == XAccess::Tma,
            x_dtype: instance.types.x,
            staging,
        })
    }

    /// The kernel's parameter, with the addresses that `address` gives of the arguments and the tensor map that
    /// `encode` makes of X, where the kernel has one.
    ///
    /// # Errors
    /// Those of `address` and `encode`.
    pub fn params(
        &self,
        args: &GemmArgs<'_>,
        address: impl Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
        encode: impl Fn(&XMap) -> Result<EncodedMap, HalError>,
    ) -> Result<LaunchParams, HalError> {
        let optional = |view: Option<BufferRef<'_>>, what| view.map_or(Ok(0), |v| address(v, what));
        let mut params = self.params;
        params.at.x = address(args.x, "x")?;
        params.at.w = address(args.w.data, "the weight")?;
        params.at.row_scale = optional(args.w.row_scale, "the row scales")?;
        params.at.k_order = optional(args.w.k_order, "the column order")?;
        params.at.c = optional(args.c, "c")?;
        params.at.bias = optional(args.bias, "the bias")?;
        params.at.token_scale = optional(args.token_scale, "the token scales")?;
        params.at.residual = optional(args.residual, "the residual")?;
        params.at.d = address(args.d.as_ref(), "d")?;
        if [params.at.bias, params.at.bias + self.second_bias].iter().all(|at| at.is_multiple_of(16)) {
            params.shape.flags |= abi::FLAG_BIAS_ALIGNED16;
        }
        if let (Some(layout), Some(workspace)) = (&self.workspace, &args.workspace) {
            let base = address(workspace.as_ref(), "the workspace")?;
            params.at.partials = base + layout.partials as u64;
            params.at.counters = base + layout.counters as u64;
            if let Some(staged) = layout.staged_x {
                params.at.x = base + staged.x as u64;
                params.at.x_factor = base + staged.factors as u64;
            }
        }
        if !self.takes_x_map {
            return Ok(LaunchParams::plain(params));
        }
        let tile_m = self.plan.config.tile_m;
        let map = |tokens| self.x_map(&params, tokens).map_or(Ok(EncodedMap::default()), |map| encode(&map));
        let tail = match params.shape.m % tile_m {
            0 => EncodedMap::default(),
            tokens => map(tokens)?,
        };
        Ok(LaunchParams::with_maps(params, [map(tile_m)?, tail]))
    }

    /// X for the copy engine, `tokens` at once; none where X lies so that the kernel copies it through registers.
    fn x_map(&self, params: &GemmParams, tokens: u32) -> Option<XMap> {
        let GemmParams { shape, at, .. } = params;
        let in_place = shape.flags & abi::FLAG_X_ALIGNED16 != 0 && shape.flags & abi::FLAG_K_ORDER == 0;
        in_place.then_some(XMap {
            address: at.x,
            dtype: self.x_dtype,
            size: [shape.k.into(), shape.m.into()],
            row_bytes: at.x_row * self.x_dtype.bytes() as u64,
            tile: [K_BLOCK, tokens],
        })
    }
}

/// A launch whose kernel is loaded.
struct GemmKernel {
    launch: GemmLaunch,
    function: Function,
    /// The kernel of the launch before, when there is one.
    stage: Option<Function>,
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
    let expected = arch::pack_class(variant);
    if op.class == expected {
        return Ok(());
    }
    Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", op.class)))
}

/// Whether the device has the shared memory that the kernel needs.
pub(super) fn check_shared(instance: &Instance, info: &DeviceInfo) -> Result<(), Unsupported> {
    let (needs, has) = (instance.shared_bytes, info.shared_bytes);
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
    GemmLaunch::new(op, plan, info, family, variant)
}

/// Loads the kernel that `plan` chose of the family `family`.
pub(super) fn prepare(
    family: &str,
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
) -> Result<Arc<dyn Kernel>, HalError> {
    let gpu = Gpu::of(device)?;
    let launch = launch_of(family, op, plan, device.info())?;
    let function = gpu.kernel(&launch.spec)?;
    let stage = launch.staging.as_ref().map(|staging| gpu.kernel(&staging.spec)).transpose()?;
    Ok(Arc::new(GemmKernel { launch, function, stage, device: device.info().id }))
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
            | flag(op.x.aligned16, abi::FLAG_X_ALIGNED16)
            | flag(op.token_scale, abi::FLAG_TOKEN_SCALE)
            | flag(op.residual.is_some(), abi::FLAG_RESIDUAL)
            | flag(op.gated, abi::FLAG_GATED)
            | flag(op.d.aligned16, abi::FLAG_D_ALIGNED16)
            | flag(op.c.is_some_and(|c| c.aligned16), abi::FLAG_C_ALIGNED16)
            | flag(op.residual.is_some_and(|r| r.aligned16), abi::FLAG_RESIDUAL_ALIGNED16)
            | flag(plan.config.staged_x.is_some_and(|staged| staged.scaled), abi::FLAG_X_FACTOR),
        activation: activation_code(op.activation),
        d_dtype: dtype_code(op.d.dtype),
        c_dtype: op.c.map_or(0, |c| dtype_code(c.dtype)),
        bias_dtype: op.bias.map_or(0, dtype_code),
        x_dtype: dtype_code(op.x.dtype),
        features: op.features as u32,
        residual_dtype: op.residual.map_or(0, |r| dtype_code(r.dtype)),
        alpha: op.alpha,
        beta: op.beta,
    };
    let at = GemmPointers {
        x_row: op.x.row_stride,
        x_col: op.x.col_stride,
        c_row: op.c.map_or(0, |c| c.row_stride),
        d_row: op.d.row_stride,
        residual_row: op.residual.map_or(0, |r| r.row_stride),
        ..GemmPointers::default()
    };
    GemmParams { shape, at, tiles: tile_schedule(plan) }
}

fn tile_schedule(plan: &LaunchPlan) -> TileSchedule {
    let StreamK { cut_tiles, cut_blocks, cut_steps, raster_group } = plan.stream_k.unwrap_or_default();
    TileSchedule {
        n_tiles: plan.n_tiles,
        m_tiles: plan.m_tiles,
        raster_group,
        cut_tiles,
        cut_blocks,
        cut_slabs: cut_steps,
    }
}

impl Kernel for GemmKernel {
    fn name(&self) -> &str {
        &self.launch.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        let address = |view: BufferRef<'_>, what| device_address(self.device, view, what);
        let params = self.launch.params(&args, address, |map| tensor_map::encode(self.device, map))?;
        let GemmLaunch { plan, starts_early, staging, .. } = &self.launch;
        let start = if *starts_early { Start::Early } else { Start::InOrder };
        if let (Some(staging), Some(stage)) = (staging, &self.stage) {
            let params = staging.params(&args, address)?;
            let Geometry { grid, threads, shared_bytes } = staging.geometry;
            // SAFETY: `StageX` is the parameter of the kernels that copy activations; for the rest, as below. They read
            // X and write the workspace after they have waited.
            unsafe { stage.launch(stream, grid, threads, shared_bytes, bytemuck::bytes_of(&params), start)? };
        }
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

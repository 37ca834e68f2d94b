//! The CUDA backend's families, with kernels that run here.

use std::sync::{Arc, OnceLock};

use once_cell::sync::OnceCell;
use qgemm_cuda::{EncodedMap, GemmLaunch, StageLaunch, XMap};
use qgemm_hal::{
    BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, HostMemory, HostStream, Kernel,
    KernelFamily, LaunchPlan, Stream, TileConfig, Unsupported,
};

use crate::device::{EmuDevice, Geometry};
use crate::kernel::LoadedKernel;
use crate::machine::{Access, Region, Swizzle, TensorMap};

/// A family of the CUDA backend.
#[derive(Debug)]
struct EmuFamily(&'static dyn KernelFamily);

/// One for each of the CUDA backend.
pub(crate) fn all() -> &'static [&'static dyn KernelFamily] {
    static ALL: OnceLock<Vec<&'static dyn KernelFamily>> = OnceLock::new();
    ALL.get_or_init(|| {
        let emulated = |family: &&'static dyn KernelFamily| -> &'static dyn KernelFamily {
            // Made once, for the process.
            Box::leak(Box::new(EmuFamily(*family)))
        };
        qgemm_cuda::FAMILIES.iter().map(emulated).collect()
    })
}

impl KernelFamily for EmuFamily {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        self.0.supports(op, info)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        self.0.candidates(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        let emu = EmuDevice::of(device)?;
        let launch = qgemm_cuda::launch_of(self.name(), op, plan, device.info())?;
        let kernel = emu.kernel(&launch.spec)?;
        let stage = launch.staging.as_ref().map(|staging| emu.kernel(&staging.spec)).transpose()?;
        // Whoever holds the reference holds the device.
        let device = emu.handle().ok_or(HalError::WrongDevice { device: emu.id(), what: "the kernel" })?;
        Ok(Arc::new(EmuKernel { launch, kernel, stage, device }))
    }
}

/// A kernel that is ready to launch.
#[derive(Debug)]
struct EmuKernel {
    launch: GemmLaunch,
    kernel: Arc<OnceCell<LoadedKernel>>,
    /// The kernel of the launch before, when there is one.
    stage: Option<Arc<OnceCell<LoadedKernel>>>,
    device: Arc<EmuDevice>,
}

impl EmuKernel {
    fn region(&self, view: BufferRef<'_>, name: &'static str, access: Access) -> Result<Region, HalError> {
        Ok(Region { name, start: address(self.device.id(), view, name)? as usize, len: view.len(), access })
    }

    /// What the launch may touch.
    fn regions(&self, args: &GemmArgs<'_>) -> Result<Vec<Region>, HalError> {
        let mut regions = vec![
            self.region(args.w.data, "the weight", Access::Weight)?,
            self.region(args.d.as_ref(), "d", Access::Write)?,
        ];
        match self.launch.staging {
            None => regions.push(self.region(args.x, "x", Access::Read)?),
            Some(_) => regions.extend(self.staged_regions(args, Access::Read)?),
        }
        let optional = [
            (args.w.row_scale, "the row scales", Access::Weight),
            (args.w.k_order, "the column order", Access::Weight),
            (args.c, "c", Access::Read),
            (args.bias, "the bias", Access::Read),
            (args.token_scale, "the token scales", Access::Read),
            (args.residual, "the residual", Access::Read),
        ];
        for (view, name, access) in optional {
            regions.extend(view.map(|view| self.region(view, name, access)).transpose()?);
        }
        if let (Some(layout), Some(workspace)) = (&self.launch.workspace, &args.workspace)
            && layout.partial_bytes > 0
        {
            let whole = self.region(workspace.as_ref(), "the workspace", Access::ReadWrite)?;
            let tiles = self.launch.plan.shared_tiles() as usize;
            let part = |name, from: usize, len: usize, access| Region { name, start: whole.start + from, len, access };
            regions.push(part("the counters", layout.counters, tiles * 4, Access::ReadWrite));
            regions.push(part("the partial sums", layout.partials, layout.partial_bytes, Access::Write));
        }
        Ok(regions)
    }

    /// What the launch before it may touch.
    fn stage_regions(&self, args: &GemmArgs<'_>) -> Result<Vec<Region>, HalError> {
        let mut regions = vec![self.region(args.x, "x", Access::Read)?];
        let order = args.w.k_order.map(|view| self.region(view, "the column order", Access::Weight));
        regions.extend(order.transpose()?);
        regions.extend(self.staged_regions(args, Access::Write)?);
        Ok(regions)
    }

    /// The copy of X and the tokens' factors.
    fn staged_regions(&self, args: &GemmArgs<'_>, access: Access) -> Result<Vec<Region>, HalError> {
        let (Some(StageLaunch { layout, staged, tokens, .. }), Some(workspace)) =
            (&self.launch.staging, &args.workspace)
        else {
            return Ok(Vec::new());
        };
        let start = address(self.device.id(), workspace.as_ref(), "the workspace")? as usize;
        let x_bytes = tokens * layout.columns * staged.dtype.bytes();
        let factor_bytes = if staged.scaled { tokens * 4 } else { 0 };
        Ok(vec![
            Region { name: "the staged activations", start: start + layout.x, len: x_bytes, access },
            Region { name: "the tokens' factors", start: start + layout.factors, len: factor_bytes, access },
        ])
    }
}

impl Kernel for EmuKernel {
    fn name(&self) -> &str {
        &self.launch.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        let id = self.device.id();
        HostStream::check(id, stream)?;
        let params = self.launch.params(&args, |view, what| address(id, view, what), |map| Ok(encode(map)))?;
        let regions = self.regions(&args)?;
        let GemmLaunch { plan, starts_early, spec, staging, .. } = &self.launch;
        if let (Some(staging), Some(stage)) = (staging, self.stage.as_ref().and_then(|slot| slot.get())) {
            let params = staging.params(&args, |view, what| address(id, view, what))?;
            let geometry = Geometry {
                blocks: staging.geometry.grid,
                threads: staging.geometry.threads,
                shared_bytes: staging.geometry.shared_bytes,
                params: bytemuck::bytes_of(&params),
                starts_early: *starts_early,
            };
            // SAFETY: as below; the parameter is that of the kernels that copy activations.
            unsafe { self.device.launch(&staging.spec.name, stage, geometry, &self.stage_regions(&args)?)? };
        }
        let geometry = Geometry {
            blocks: plan.grid,
            threads: plan.config.threads,
            shared_bytes: plan.config.shared_bytes,
            params: params.as_bytes(),
            starts_early: *starts_early,
        };
        let Some(kernel) = self.kernel.get() else {
            return Err(HalError::WrongDevice { device: id, what: "the kernel" });
        };
        // SAFETY: the parameter is that of the families' kernels, made for this launch; the regions are views that
        // `args` borrows, those that are written exclusively.
        unsafe { self.device.launch(&spec.name, kernel, geometry, &regions) }
    }
}

/// Address of the first byte of a view of `device`'s memory.
pub(crate) fn address(device: DeviceId, view: BufferRef<'_>, what: &'static str) -> Result<u64, HalError> {
    let wrong = HalError::WrongDevice { device, what };
    if view.device() != device {
        return Err(wrong);
    }
    Ok(HostMemory::address(view).ok_or(wrong)?.as_ptr().expose_provenance() as u64)
}

/// The map of X as the emulated copy engine takes it.
fn encode(x: &XMap) -> EncodedMap {
    TensorMap {
        address: x.address,
        element_bytes: x.dtype.bytes() as u32,
        size: x.size,
        row_bytes: x.row_bytes,
        tile: x.tile,
        swizzle: Swizzle::Bytes128,
    }
    .encode()
}

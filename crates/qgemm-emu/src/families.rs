//! The CUDA backend's families, with kernels that run here.

use std::sync::{Arc, OnceLock};

use once_cell::sync::OnceCell;
use qgemm_cuda::GemmLaunch;
use qgemm_hal::{
    BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, GemmArgs, HalError, HostMemory, HostStream, Kernel,
    KernelFamily, LaunchPlan, Stream, TileConfig, Unsupported,
};

use crate::device::{EmuDevice, Geometry};
use crate::kernel::LoadedKernel;
use crate::machine::{Access, Region};

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
        // Whoever holds the reference holds the device.
        let device = emu.handle().ok_or(HalError::WrongDevice { device: emu.id(), what: "the kernel" })?;
        Ok(Arc::new(EmuKernel { launch, kernel, device }))
    }
}

/// A kernel that is ready to launch.
#[derive(Debug)]
struct EmuKernel {
    launch: GemmLaunch,
    kernel: Arc<OnceCell<LoadedKernel>>,
    device: Arc<EmuDevice>,
}

impl EmuKernel {
    /// What the launch may touch.
    fn regions(&self, args: &GemmArgs<'_>) -> Result<Vec<Region>, HalError> {
        let id = self.device.id();
        let region = |view: BufferRef<'_>, name, access| {
            Ok::<_, HalError>(Region { name, start: address(id, view, name)? as usize, len: view.len(), access })
        };
        let mut regions = vec![
            region(args.x, "x", Access::Read)?,
            region(args.w.data, "the weight", Access::Weight)?,
            region(args.d.as_ref(), "d", Access::Write)?,
        ];
        let optional = [
            (args.w.row_scale, "the row scales", Access::Weight),
            (args.w.k_order, "the column order", Access::Weight),
            (args.c, "c", Access::Read),
            (args.bias, "the bias", Access::Read),
        ];
        for (view, name, access) in optional {
            regions.extend(view.map(|view| region(view, name, access)).transpose()?);
        }
        if let (Some(layout), Some(workspace)) = (&self.launch.workspace, &args.workspace) {
            let whole = region(workspace.as_ref(), "the workspace", Access::ReadWrite)?;
            let tiles = self.launch.plan.n_tiles as usize * self.launch.plan.m_tiles as usize;
            let part = |name, from: usize, len: usize, access| Region { name, start: whole.start + from, len, access };
            regions.push(part("the counters", layout.counters, tiles * 4, Access::ReadWrite));
            regions.push(part("the partial sums", layout.partials, layout.bytes - layout.partials, Access::Write));
        }
        Ok(regions)
    }
}

impl Kernel for EmuKernel {
    fn name(&self) -> &str {
        &self.launch.name
    }

    fn launch(&self, stream: &Stream, args: GemmArgs<'_>) -> Result<(), HalError> {
        let id = self.device.id();
        HostStream::check(id, stream)?;
        let params = self.launch.params(&args, |view, what| address(id, view, what))?;
        let regions = self.regions(&args)?;
        let GemmLaunch { plan, starts_early, spec, .. } = &self.launch;
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

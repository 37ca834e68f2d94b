//! Families of the CUDA backend with emulated kernels.

use std::sync::{Arc, OnceLock};

use once_cell::sync::OnceCell;
use qgemm_cuda::{Addresses, CATALOG, CudaOperation, EncodedMap, KernelLaunch, MapSwizzle, TileMap};
use qgemm_hal::{
    self as hal, BufferRef, Catalog, Device, DeviceId, DeviceInfo, Families, Family, HalError, HostMemory, HostStream,
    Kernel, LaunchSequence, Operands, Operation, Stream, Unsupported, with_operations,
};

use crate::device::{EmuDevice, Geometry};
use crate::kernel::LoadedKernel;
use crate::machine::{Access, Region, Swizzle, TensorMap};

/// The CUDA backend's catalog, emulated.
pub(crate) fn catalog() -> Catalog {
    static ALL: OnceLock<Catalog> = OnceLock::new();
    *ALL.get_or_init(|| with_operations!(emulated_catalog))
}

macro_rules! emulated_catalog {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        Catalog { $($name: emulated_families(CATALOG.$name),)* }
    };
}
use emulated_catalog;

/// The families, emulated; leaked once per process.
fn emulated_families<O: CudaOperation>(families: Families<O>) -> Families<O> {
    let emulated = families.iter().map(|&family| &*Box::leak(Box::new(EmuFamily(family))) as &'static dyn Family<O>);
    Box::leak(emulated.collect())
}

/// A family of the CUDA backend.
#[derive(Debug)]
struct EmuFamily<O: Operation>(&'static dyn Family<O>);

impl<O: CudaOperation> Family<O> for EmuFamily<O> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &O, info: &DeviceInfo) -> Result<Vec<O::Config>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &O, plan: &O::Plan) -> Result<LaunchSequence, HalError> {
        op.sequence(plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &O, config: &O::Config) -> u64 {
        self.0.source_hash(op, config)
    }
}

/// Compiles a launch's kernel for `device`.
fn emulated(device: &dyn Device, launch: KernelLaunch) -> Result<Arc<dyn Kernel>, HalError> {
    let emu = EmuDevice::of(device)?;
    let kernel = emu.kernel(&launch.spec)?;
    // The kernel keeps the device alive.
    let device = emu.handle().ok_or(HalError::WrongDevice { device: emu.id(), what: "the kernel" })?;
    Ok(Arc::new(EmuKernel { launch, kernel, device }))
}

/// A kernel that is ready to launch.
#[derive(Debug)]
struct EmuKernel {
    launch: KernelLaunch,
    kernel: Arc<OnceCell<LoadedKernel>>,
    device: Arc<EmuDevice>,
}

impl EmuKernel {
    /// The memory that the launch may access: its operands.
    fn regions(&self, operands: &Operands<'_>) -> Result<Vec<Region>, HalError> {
        let region = |(slot, desc): (usize, &hal::OperandDesc)| {
            let view = operands.at(slot)?;
            let start = address(self.device.id(), view, desc.name);
            let access = match desc.access {
                hal::Access::Constant => Access::Weight,
                hal::Access::Read => Access::Read,
                hal::Access::Write if self.launch.updated == Some(slot) => Access::ReadWrite,
                hal::Access::Write | hal::Access::State => Access::Write,
                hal::Access::Accumulate => Access::ReadWrite,
            };
            Some(start.map(|start| Region { name: desc.name, start: start as usize, len: view.len(), access }))
        };
        self.launch.operands.iter().enumerate().filter_map(region).collect()
    }
}

impl Kernel for EmuKernel {
    fn takes_portions(&self) -> bool {
        self.launch.takes_portions()
    }

    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        let id = self.device.id();
        HostStream::check(id, stream)?;
        let places = Addresses { address: &|view, what| address(id, view, what), encode: &|map| Ok(encode(map)) };
        let params = self.launch.params(&operands, &places)?;
        let regions = self.regions(&operands)?;
        let hal::Geometry { grid, threads, shared_bytes } = self.launch.geometry;
        let geometry = Geometry {
            blocks: grid,
            threads,
            shared_bytes,
            params: params.as_bytes(),
            starts_early: self.launch.starts_early,
        };
        let Some(kernel) = self.kernel.get() else {
            return Err(HalError::WrongDevice { device: id, what: "the kernel" });
        };
        // SAFETY: the parameter is that of the kernel, made for this
        // launch. The regions are views that `operands` borrows,
        // exclusively if they are written.
        unsafe { self.device.launch(&self.launch.spec.name, kernel, geometry, &regions) }
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

/// A tensor map in the emulated TMA's format.
fn encode(tensor: &TileMap) -> EncodedMap {
    let TileMap { address, element, size, strides, tile, swizzle, .. } = *tensor;
    let swizzle = match swizzle {
        MapSwizzle::None => Swizzle::None,
        MapSwizzle::Bytes64 => Swizzle::Bytes64,
        MapSwizzle::Bytes128 => Swizzle::Bytes128,
    };
    TensorMap { address, element_bytes: element.bytes() as u32, size, strides, tile, swizzle }.encode()
}

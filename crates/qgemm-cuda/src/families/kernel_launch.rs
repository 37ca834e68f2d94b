//! [`KernelLaunch`]: a kernel with its launch geometry and parameters without addresses. A GPU or the emulator can run it.

use std::fmt;
use std::sync::Arc;

use qgemm_hal::{
    Access, BufferRef, Device, DeviceId, DeviceInfo, Geometry, HalError, Kernel, KernelId, LaunchStep, Operand,
    OperandDesc, Operands, Stream,
};

use super::launch_params::LaunchParams;
use crate::function::{Function, Start};
use crate::gpu::Gpu;
use crate::memory::device_address;
use crate::spec::KernelSpec;
use crate::tensor_map::{self, EncodedMap, TileMap};

/// One launch of a plan.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The kernel.
    pub id: KernelId,
    /// Its source.
    pub spec: KernelSpec,
    /// Grid, threads, shared memory.
    pub geometry: Geometry,
    /// Whether it uses programmatic dependent launch: the kernel may start
    /// before earlier work of its stream is done. It calls
    /// `griddepcontrol.wait` before it reads anything but constant
    /// operands, and before it writes.
    pub starts_early: bool,
    /// Operands and their access.
    pub operands: &'static [OperandDesc],
    /// Slot of the operand that it reads before overwriting it: D,
    /// if that holds the residual.
    pub updated: Option<usize>,
    pub(super) params: Arc<dyn Params>,
}

/// `all`, with constant access to the operands in `slots`. These were written before the launch
/// ahead began, so a kernel that starts early may read them before `griddepcontrol.wait`.
pub(super) const fn with_constants<const N: usize>(all: &[OperandDesc], slots: &[usize]) -> [OperandDesc; N] {
    let mut operands = [all[0]; N];
    let mut at = 0;
    while at < N {
        operands[at] = all[at];
        at += 1;
    }
    at = 0;
    while at < slots.len() {
        operands[slots[at]].access = Access::Constant;
        at += 1;
    }
    operands
}

/// The error for a plan's kernel whose family is none of this
/// operation on CUDA.
pub(super) fn unknown_family(kernel: &KernelId, info: &DeviceInfo) -> HalError {
    HalError::KernelUnavailable {
        kernel: kernel.to_string(),
        target: info.arch.clone(),
        why: format!("no CUDA family is called `{}`", kernel.family),
    }
}

/// Kernel parameter without launch-dependent parts.
pub(super) trait Params: Send + Sync + fmt::Debug {
    /// The parameter with the operands' addresses, and
    /// tensor maps of X if used.
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError>;

    /// Whether the parameter supports portions. The grid stays the same,
    /// and CTAs beyond the portion exit.
    fn takes_portions(&self) -> bool {
        false
    }
}

/// Resolves addresses and tensor maps, for a GPU or the emulator.
pub struct Addresses<'a> {
    /// Address of a view; the text names it in errors.
    pub address: &'a dyn Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
    /// Encodes a tensor map.
    pub encode: &'a dyn Fn(&TileMap) -> Result<EncodedMap, HalError>,
}

impl Addresses<'_> {
    /// Address of an operand; 0 when absent.
    pub(super) fn of(&self, operands: &Operands<'_>, operand: impl Operand) -> Result<u64, HalError> {
        operands.get(operand).map_or(Ok(0), |view| (self.address)(view, operand.name()))
    }

    /// Writes the addresses of operands into a kernel's parameters.
    pub(super) fn fill<'p, O: Operand>(
        &self,
        operands: &Operands<'_>,
        pointers: impl IntoIterator<Item = (&'p mut u64, O)>,
    ) -> Result<(), HalError> {
        for (pointer, operand) in pointers {
            *pointer = self.of(operands, operand)?;
        }
        Ok(())
    }
}

/// Prepares a launch's kernel: loads it on a GPU, or
/// compiles it for emulation.
pub type MakeKernel<'a> = dyn FnMut(KernelLaunch) -> Result<Arc<dyn Kernel>, HalError> + 'a;

impl KernelLaunch {
    /// Kernel parameter for operands at these addresses.
    ///
    /// # Errors
    /// Errors of `at`.
    pub fn params(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        self.params.with(operands, at)
    }

    /// Whether a launch may cover a portion of its tokens.
    pub fn takes_portions(&self) -> bool {
        self.params.takes_portions()
    }

    /// The launch as a step, with its kernel prepared by
    /// `make` and no operand bound.
    pub(super) fn step<O: Operand>(self, make: &mut MakeKernel<'_>) -> Result<LaunchStep, HalError> {
        let (id, geometry) = (self.id, self.geometry);
        Ok(LaunchStep::new::<O>(id, geometry, make(self)?))
    }
}

/// A launch whose kernel is loaded on a GPU.
struct CudaKernel {
    launch: KernelLaunch,
    function: Function,
    device: DeviceId,
}

impl fmt::Debug for CudaKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaKernel").field("launch", &self.launch).finish_non_exhaustive()
    }
}

/// Loads a launch's kernel on `device`.
pub(super) fn load(device: &dyn Device) -> impl FnMut(KernelLaunch) -> Result<Arc<dyn Kernel>, HalError> + '_ {
    move |launch| {
        let function = Gpu::of(device)?.kernel(&launch.spec)?;
        Ok(Arc::new(CudaKernel { launch, function, device: device.info().id }))
    }
}

impl Kernel for CudaKernel {
    fn takes_portions(&self) -> bool {
        self.launch.takes_portions()
    }

    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        let places = Addresses {
            address: &|view, what| device_address(self.device, view, what),
            encode: &|map| tensor_map::encode(self.device, map),
        };
        let params = self.launch.params(&operands, &places)?;
        let Geometry { grid, threads, shared_bytes } = self.launch.geometry;
        let start = if self.launch.starts_early { Start::Early } else { Start::InOrder };
        // SAFETY: the parameter has the kernel's layout, which the
        // generated abi.cuh asserts. The API checked that every operand is
        // as long as shape and strides require, and that the workspace
        // has the plan's size and is zeroed; the sequence passes on
        // parts of it with the plan's sizes. The borrows in `operands`
        // outlive the call, and buffers are freed in stream order or
        // after the device is idle. Kernels that start early read only
        // constant operands before they wait.
        unsafe { self.function.launch(stream, grid, threads, shared_bytes, params.as_bytes(), start) }
    }
}

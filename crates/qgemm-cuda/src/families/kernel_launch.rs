//! [`KernelLaunch`]: a kernel with its launch and all parameters but the addresses: what a GPU needs to run it, or an emulation
//! of one.

use std::fmt;
use std::sync::Arc;

use qgemm_hal::{
    BufferRef, Device, DeviceId, Geometry, HalError, Kernel, KernelId, LaunchStep, Operand, OperandDesc, Operands,
    Stream,
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
    /// Whether the kernel may start before earlier work of its stream is done: it then waits itself
    /// (`griddepcontrol.wait`) before it reads anything but constant operands, and before it writes.
    pub starts_early: bool,
    /// What it reads and writes.
    pub operands: &'static [OperandDesc],
    /// Slot of the operand of which it reads elements before it writes them: D, where that holds the residual.
    pub updated: Option<usize>,
    pub(super) params: Arc<dyn Params>,
}

/// A kernel's parameter, but for what a launch brings.
pub(super) trait Params: Send + Sync + fmt::Debug {
    /// The parameter with the operands' addresses, and a tensor map of X where the kernel takes one.
    fn with(&self, operands: &Operands<'_>, at: &Places<'_>) -> Result<LaunchParams, HalError>;

    /// Whether the parameter follows the operands' portion: the grid stays, and CTAs beyond the portion find nothing to do.
    fn takes_portions(&self) -> bool {
        false
    }
}

/// Where operands lie, as a GPU or an emulation of one says it.
pub struct Places<'a> {
    /// The address of a view; the text names it in errors.
    pub address: &'a dyn Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
    /// A tensor map.
    pub encode: &'a dyn Fn(&TileMap) -> Result<EncodedMap, HalError>,
}

impl Places<'_> {
    /// The address of an operand; 0 of one that is absent.
    pub(super) fn of(&self, operands: &Operands<'_>, operand: impl Operand) -> Result<u64, HalError> {
        operands.get(operand).map_or(Ok(0), |view| (self.address)(view, operand.name()))
    }
}

/// Makes a launch's kernel ready: loads it on a GPU, or compiles it for an emulation of one.
pub type MakeKernel<'a> = dyn FnMut(KernelLaunch) -> Result<Arc<dyn Kernel>, HalError> + 'a;

impl KernelLaunch {
    /// The kernel's parameter for operands that lie at these places.
    ///
    /// # Errors
    /// Those of the places.
    pub fn params(&self, operands: &Operands<'_>, at: &Places<'_>) -> Result<LaunchParams, HalError> {
        self.params.with(operands, at)
    }

    /// Whether a launch may be for a portion of the tokens that it was made for.
    pub fn takes_portions(&self) -> bool {
        self.params.takes_portions()
    }

    /// The step of a sequence that `make` makes of it; none of its operands, of type `O`, is bound yet.
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
        let places = Places {
            address: &|view, what| device_address(self.device, view, what),
            encode: &|map| tensor_map::encode(self.device, map),
        };
        let params = self.launch.params(&operands, &places)?;
        let Geometry { grid, threads, shared_bytes } = self.launch.geometry;
        let start = if self.launch.starts_early { Start::Early } else { Start::InOrder };
        // SAFETY: the parameter is that of the kernel, whose layout the generated abi.cuh asserts. The API checked that every
        // operand is as long as shape and strides say, and that the workspace is as long as the plan asks and zeroed; the
        // sequence hands down parts of it that are as long as the plan says. The borrows in `operands` outlive the call, and
        // buffers are freed in stream order or after the device is idle. Kernels that may start early read only constant
        // operands before they wait.
        unsafe { self.function.launch(stream, grid, threads, shared_bytes, params.as_bytes(), start) }
    }
}

//! [`EmuDevice`]: the HAL device of the emulator.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use once_cell::sync::OnceCell;
use qgemm_cuda::{KernelSpec, Repack, Sha256Hash};
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{Format, HostWeight};
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, Catalog, Device, DeviceId, DeviceInfo, Event, HalError, HostEvent, HostMemory,
    HostStream, Stream, Variant,
};

use crate::compile::Compiler;
use crate::counters::KernelCounters;
use crate::families;
use crate::kernel::LoadedKernel;
use crate::machine::{self, Access, Launch, Region};
use crate::model::Precision;

/// A launch without its kernel: geometry, parameter and operands.
#[derive(Clone, Copy, Debug)]
pub struct Geometry<'a> {
    /// Grid: CTAs along x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// The kernel's parameter as bytes.
    pub params: &'a [u8],
    /// Whether the kernel may start while the previous one runs
    /// (programmatic dependent launch).
    pub starts_early: bool,
}

/// An emulated GPU of one variant. Launches run synchronously.
pub(crate) struct EmuDevice {
    /// For kernels, which outlive the call that prepares them.
    this: Weak<EmuDevice>,
    info: DeviceInfo,
    variant: Variant,
    /// Summation model of the matrix instructions.
    precision: Mutex<Precision>,
    compiler: &'static Compiler,
    /// Locked only to find a slot. Compilation happens in the slot.
    kernels: Mutex<HashMap<Sha256Hash, Arc<OnceCell<LoadedKernel>>>>,
    counting: AtomicBool,
    /// Seed of the CTA order.
    seed: AtomicU64,
    counters: Mutex<BTreeMap<String, KernelCounters>>,
}

impl EmuDevice {
    /// Opens a device that emulates `variant` and plans as the
    /// chip `info`.
    pub(crate) fn open(variant: Variant, info: DeviceInfo) -> Result<Arc<Self>, HalError> {
        let compiler = Compiler::get().map_err(|why| HalError::NoDevice { device: info.id.to_string(), why })?;
        Ok(Arc::new_cyclic(|this| Self {
            this: this.clone(),
            info,
            variant,
            precision: Mutex::new(Precision::of(variant)),
            compiler,
            kernels: Mutex::default(),
            counting: AtomicBool::new(false),
            seed: AtomicU64::new(1),
            counters: Mutex::default(),
        }))
    }

    /// The emulated device behind `device`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`].
    pub(crate) fn of(device: &dyn Device) -> Result<&Self, HalError> {
        let wrong = HalError::WrongDevice { device: device.info().id, what: "an emulated kernel" };
        device.as_any().downcast_ref().ok_or(wrong)
    }

    /// A shared handle to the device.
    pub(crate) fn handle(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    /// The kernel `spec`, compiled and loaded once.
    pub(crate) fn kernel(&self, spec: &KernelSpec) -> Result<Arc<OnceCell<LoadedKernel>>, HalError> {
        let slot = {
            // A panic under the lock cannot leave the map half changed.
            let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            kernels.entry(spec.key()).or_default().clone()
        };
        slot.get_or_try_init(|| LoadedKernel::load(self.compiler.shared_object(spec)?.path()))?;
        Ok(slot)
    }

    /// Runs a launch of the kernel `name`.
    ///
    /// # Safety
    /// The kernel's parameter must match `geometry`. Nothing else
    /// may use the memory of `regions` meanwhile, except for
    /// reading what the launch only reads.
    pub(crate) unsafe fn launch(
        &self,
        name: &str,
        kernel: &LoadedKernel,
        geometry: Geometry<'_>,
        regions: &[Region],
    ) -> Result<(), HalError> {
        let launch = Launch {
            run: kernel.run(),
            params: geometry.params,
            blocks: geometry.blocks,
            threads: geometry.threads,
            shared_bytes: geometry.shared_bytes,
            starts_early: geometry.starts_early,
            regions,
            seed: self.seed.load(Ordering::Relaxed),
            counting: self.counting.load(Ordering::Relaxed),
            precision: *self.precision.lock().unwrap_or_else(PoisonError::into_inner),
        };
        // SAFETY: by the contract of this function.
        let ran = unsafe { machine::run(&launch) };
        let no_stack = |e: std::io::Error| HalError::Driver {
            device: self.info.id,
            call: "making the threads' stacks",
            message: e.to_string(),
        };
        let counters = ran.map_err(no_stack)?.map_err(|fault| HalError::KernelFault {
            device: self.info.id,
            kernel: name.to_owned(),
            fault: fault.to_string(),
        })?;
        let mut all = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(name.to_owned()).or_default().add(&counters);
        Ok(())
    }

    pub(crate) fn count_accesses(&self) {
        self.counting.store(true, Ordering::Relaxed);
    }

    pub(crate) fn set_seed(&self, seed: u64) {
        self.seed.store(seed, Ordering::Relaxed);
    }

    pub(crate) fn set_precision(&self, precision: Precision) {
        *self.precision.lock().unwrap_or_else(PoisonError::into_inner) = precision;
    }

    /// Counters by kernel since the last call.
    pub(crate) fn take_counters(&self) -> BTreeMap<String, KernelCounters> {
        std::mem::take(&mut self.counters.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.info.id
    }
}

impl fmt::Debug for EmuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmuDevice({})", self.info.id)
    }
}

impl Device for EmuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        HostMemory::allocate(self.id(), bytes, what)
    }

    fn default_stream(&self) -> Stream {
        HostStream::stream(self.id())
    }

    fn new_stream(&self) -> Result<Stream, HalError> {
        Ok(HostStream::stream(self.id()))
    }

    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        HostStream::check(self.id(), stream)?;
        HostMemory::upload(self.id(), src, dst)
    }

    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        HostStream::check(self.id(), stream)?;
        HostMemory::download(self.id(), src, dst)
    }

    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        HostStream::check(self.id(), stream)?;
        HostMemory::fill(self.id(), dst, value)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        HostStream::check(self.id(), stream)
    }

    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        HostStream::check(self.id(), stream)?;
        Ok(HostEvent::now())
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        HostStream::check(self.id(), stream)?;
        HostEvent::check(self.id(), event)
    }

    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        HostEvent::elapsed(self.id(), start, end)
    }

    fn fragment_layout(&self, _format: Format) -> FragmentLayout {
        qgemm_cuda::fragment_layout(self.variant)
    }

    fn pack(&self, stream: &Stream, weight: &HostWeight) -> Result<Buffer, HalError> {
        HostStream::check(self.id(), stream)?;
        let wrong = || HalError::WrongDevice { device: self.id(), what: "the kernel" };
        let repack = Repack::new(weight.format(), self.variant).ok_or_else(wrong)?;
        let slot = self.kernel(repack.spec())?;
        let kernel = slot.get().ok_or_else(wrong)?;
        repack.run(self, stream, weight, |launch| {
            let params = launch.params(|view, what| families::address(self.id(), view, what))?;
            let region = |name, start: u64, len, access| Region { name, start: start as usize, len, access };
            let regions = [
                region("the rows of a weight", params.rows, launch.rows.len(), Access::Read),
                region("the packed weight", params.packed, launch.packed.view().len(), Access::Write),
            ];
            let geometry = Geometry {
                blocks: launch.geometry.grid,
                threads: launch.geometry.threads,
                shared_bytes: launch.geometry.shared_bytes,
                params: bytemuck::bytes_of(&params),
                starts_early: false,
            };
            // SAFETY: the parameter is the kernel's; the regions are
            // views that `launch` borrows.
            unsafe { self.launch(&repack.spec().name, kernel, geometry, &regions) }
        })
    }

    fn catalog(&self) -> Catalog {
        families::catalog()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

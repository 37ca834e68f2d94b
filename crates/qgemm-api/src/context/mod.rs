//! [`Context`]: an open device, and the factory of everything on it.

mod loading;
mod planning;
mod ranks;

use std::sync::Arc;

use qgemm_formats::element::{bytes_of, bytes_of_mut};
use qgemm_formats::{Element, ElementType};
use qgemm_hal::{Buffer, BufferMut, BufferRef, Collective, Communicator, Device, DeviceId, DeviceInfo, Event, Stream};
use qgemm_sched::TunedTable;

use crate::backends::{self, DeviceChoice};
use crate::error::Error;
use crate::operand::{Checks, check_element};
use crate::plan_cache::PlanCaches;
use crate::tune::Tuned;
use crate::workspace::Workspace;

/// Open device. Cheap to clone and shared freely between threads.
#[derive(Clone, Debug)]
pub struct Context {
    device: Arc<dyn Device>,
    tuned: Arc<TunedTable>,
    /// Cache of plans made with this table.
    plans: Arc<PlanCaches>,
    communicator: Option<Arc<dyn Communicator>>,
}

impl Context {
    /// Opens a device by name or by a [`DeviceId`] of [`devices`](crate::devices).
    ///
    /// Names: `cpu`, `cuda:0`, `wgpu:0`, `noop`, or `auto` for the best device (CUDA, then
    /// a GPU through wgpu, then the CPU). Contexts of one device share its memory:
    /// buffers, weights and plans of one work with another. Objects of another device are
    /// refused with both names.
    ///
    /// # Errors
    /// When the name does not parse, the device does not exist, or it fails to open. `auto`
    /// skips backends without a device. A device that exists but fails to open is an error.
    pub fn open<'a>(device: impl Into<DeviceChoice<'a>>) -> Result<Self, Error> {
        backends::open(device.into()).map(Self::from_device)
    }

    /// Context on a device that the caller opened.
    pub fn from_device(device: Arc<dyn Device>) -> Self {
        Self { device, tuned: Arc::default(), plans: Arc::default(), communicator: None }
    }

    /// Adds measured configurations: a table, or with [`Tuned::Auto`] the one in the
    /// user's cache folder, if any.
    ///
    /// Plans use them for known shapes, and the cost model elsewhere.
    ///
    /// ```
    /// use qgemm_api::{Context, Tuned};
    ///
    /// let ctx = Context::open("cpu")?.with_tuned(Tuned::Auto);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn with_tuned(self, tuned: impl Into<Tuned>) -> Self {
        let Some(table) = tuned.into().table() else { return self };
        // Clones keep their table and their plans.
        Self { tuned: Arc::new(table), plans: Arc::default(), ..self }
    }

    /// Makes the context that of a rank: plans of models are then this rank's, and run
    /// their collectives on `communicator`.
    pub fn with_communicator(self, communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator: Some(communicator), ..self }
    }

    /// The rank's end of its group, if there is one.
    pub fn communicator(&self) -> Option<&Arc<dyn Communicator>> {
        self.communicator.as_ref()
    }

    /// Submits a collective of the group to `stream`. X is of gathers and scatters alone.
    ///
    /// # Errors
    /// [`Error::NoCommunicator`] without a group. [`Error::Hal`] when a rank is gone or silent or
    /// runs another collective, and for operands that are too short.
    pub fn submit<'a>(
        &self,
        stream: &Stream,
        collective: &Collective,
        x: Option<BufferRef<'_>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Result<(), Error> {
        let communicator = self.communicator.as_ref().ok_or(Error::NoCommunicator)?;
        Ok(communicator.submit(&*self.device, stream, collective, x, d.into())?)
    }

    /// Properties and capabilities of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Measured configurations.
    pub(crate) fn tuned(&self) -> &Arc<TunedTable> {
        &self.tuned
    }

    /// Device, for events, copies and fills on a given stream.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Stream of calls without a stream argument.
    pub fn default_stream(&self) -> Stream {
        self.device.default_stream()
    }

    /// Creates a stream. Work is ordered only within it.
    ///
    /// # Errors
    /// A driver error.
    pub fn new_stream(&self) -> Result<Stream, Error> {
        Ok(self.device.new_stream()?)
    }

    /// Waits for all work of `stream`.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.device.synchronize(stream)?)
    }

    /// Records an event after the work submitted to `stream` so far.
    ///
    /// # Errors
    /// A device error.
    pub fn record(&self, stream: &Stream) -> Result<Event, Error> {
        Ok(self.device.record(stream)?)
    }

    /// Makes later work of `stream` wait for `event`, which may be from another
    /// stream. The host does not wait.
    ///
    /// # Errors
    /// When stream and event belong to different devices, or a device error.
    pub fn wait(&self, stream: &Stream, event: &Event) -> Result<(), Error> {
        Ok(self.device.wait(stream, event)?)
    }

    pub(crate) fn plan_caches(&self) -> &PlanCaches {
        &self.plans
    }

    pub(crate) fn check_weight(&self, got: DeviceId) -> Result<(), Error> {
        Checks(self.info().id).device("weight", got)
    }

    /// Allocates a zeroed workspace of at least `bytes` bytes. Use it
    /// with one stream at a time.
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn workspace(&self, bytes: usize) -> Result<Workspace, Error> {
        Ok(Workspace::new(self.device.allocate(bytes, "a workspace")?))
    }

    /// Allocates a zeroed buffer of `bytes` bytes without an element type. Plans
    /// accept it for any operand.
    ///
    /// [`Context::allocate_elements`] makes typed buffers, which plans check.
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(self.device.allocate(bytes, "a buffer")?)
    }

    /// Allocates a zeroed buffer of `count` elements with their type. Plans refuse it for
    /// operands of another type.
    ///
    /// ```
    /// use qgemm_api::{Context, Conversion, ConversionArgs, DType, ElementType, Error};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_conversion(&Conversion::new(1, 4, DType::F16, DType::F32))?;
    /// let (x, mut d) = (ctx.upload(&[1.0f32; 4])?, ctx.allocate_elements(DType::F32, 4)?);
    /// let refused = plan.run(&ctx.default_stream(), ConversionArgs::new(&x, &mut d));
    /// let (f16, f32) = (ElementType::from(DType::F16), ElementType::from(DType::F32));
    /// assert!(matches!(refused, Err(Error::WrongElementType { operand: "X", expected, got }) if (expected, got) == (f16, f32)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn allocate_elements(&self, element: impl Into<ElementType>, count: usize) -> Result<Buffer, Error> {
        let element = element.into();
        // Saturation exceeds the memory of any device.
        Ok(self.allocate(count.saturating_mul(element.bytes()))?.typed(element))
    }

    /// Uploads `values` (numbers or bytes) to a new buffer, ready for every stream.
    ///
    /// The buffer has the element type of `values`. Bytes have none: see
    /// [`Context::allocate_elements`].
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer, Error> {
        let mut buffer = self.allocate_elements(T::TYPE, values.len())?;
        self.upload_into(values, &mut buffer)?;
        Ok(buffer)
    }

    /// Copies `values` to the start of `dst`, which no submitted work may use. Visible
    /// to every stream on return.
    ///
    /// # Errors
    /// When `dst` is too short, on another device, or has another element type; or a device
    /// error. Bytes go anywhere.
    pub fn upload_into<'a, T: Element>(&self, values: &[T], dst: impl Into<BufferMut<'a>>) -> Result<(), Error> {
        self.upload_on(&self.default_stream(), values, dst)
    }

    /// Copies `values` to the start of `dst` after previous work of `stream`, e.g.
    /// work that still reads `dst`. Visible to every stream on return.
    ///
    /// # Errors
    /// As [`Context::upload_into`].
    pub fn upload_on<'a, T: Element>(
        &self,
        stream: &Stream,
        values: &[T],
        dst: impl Into<BufferMut<'a>>,
    ) -> Result<(), Error> {
        self.enqueue_upload(stream, values, dst)?;
        Ok(self.device.synchronize(stream)?)
    }

    /// As [`Context::upload_on`], for later work of `stream` alone. It may return before the
    /// copy is done, and then waits for nothing: for the inputs of a step.
    ///
    /// # Errors
    /// As [`Context::upload_into`].
    pub fn enqueue_upload<'a, T: Element>(
        &self,
        stream: &Stream,
        values: &[T],
        dst: impl Into<BufferMut<'a>>,
    ) -> Result<(), Error> {
        let dst = dst.into();
        check_copied::<T>("destination of an upload", dst.view())?;
        Ok(self.device.enqueue_upload(stream, bytes_of(values), dst)?)
    }

    /// Waits for the default stream and downloads the values of `src`.
    ///
    /// Other streams are not waited for: use [`Context::download_on`].
    ///
    /// # Errors
    /// When `src` is no whole number of values or has another element type; or a device
    /// error. Bytes come from anywhere.
    pub fn download<'a, T: Element>(&self, src: impl Into<BufferRef<'a>>) -> Result<Vec<T>, Error> {
        self.download_on(&self.default_stream(), src)
    }

    /// Waits for `stream` and downloads the values of `src`.
    ///
    /// # Errors
    /// As [`Context::download`].
    pub fn download_on<'a, T: Element>(&self, stream: &Stream, src: impl Into<BufferRef<'a>>) -> Result<Vec<T>, Error> {
        let (src, width) = (src.into(), size_of::<T>());
        check_copied::<T>("source of a download", src)?;
        if !src.len().is_multiple_of(width) {
            return Err(Error::PartOfAValue { bytes: src.len(), width });
        }
        let mut values = vec![T::zeroed(); src.len() / width];
        self.device.download(stream, src, bytes_of_mut(&mut values))?;
        Ok(values)
    }
}

/// Checks that memory holds elements of `T`, unless they are copied as bytes.
pub(crate) fn check_copied<T: Element>(operand: &'static str, view: BufferRef<'_>) -> Result<(), Error> {
    if T::TYPE == ElementType::Bytes { Ok(()) } else { check_element(operand, T::TYPE, view) }
}

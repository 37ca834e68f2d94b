//! [`Context`]: an opened device and everything that is made on it.

mod loading;
mod planning;

use std::sync::Arc;

use qgemm_formats::element::{bytes_of, bytes_of_mut};
use qgemm_formats::{Element, ElementType};
use qgemm_hal::{Buffer, BufferMut, BufferRef, Device, DeviceId, DeviceInfo, Event, Stream};
use qgemm_sched::TunedTable;

use crate::backends::{self, DeviceChoice};
use crate::error::Error;
use crate::operand::{Checks, check_element};
use crate::plan_cache::PlanCaches;
use crate::tune::Tuned;
use crate::workspace::Workspace;

/// An opened device. Cheap to clone, and shared freely between threads.
#[derive(Clone, Debug)]
pub struct Context {
    device: Arc<dyn Device>,
    tuned: Arc<TunedTable>,
    /// What was planned before, with this table.
    plans: Arc<PlanCaches>,
}

impl Context {
    /// Opens a device by name (`cpu`, `cuda:0`, `wgpu:0`, `noop`, or `auto` for the best there is: CUDA, then a GPU through
    /// wgpu, then the CPU) or by the [`DeviceId`] that [`devices`](crate::devices) lists. Contexts of one device share its
    /// memory: buffers, weights and plans of one are used with the other. Those of another device are refused, with both named.
    ///
    /// # Errors
    /// When the name does not parse, there is no such device, or it fails to open. `auto` passes over backends
    /// that find no device, but a device that is found and fails to open is an error.
    pub fn open<'a>(device: impl Into<DeviceChoice<'a>>) -> Result<Self, Error> {
        backends::open(device.into()).map(Self::from_device)
    }

    /// A context over a device that the caller opened.
    pub fn from_device(device: Arc<dyn Device>) -> Self {
        Self { device, tuned: Arc::default(), plans: Arc::default() }
    }

    /// The context with measured configurations, of a table or, with [`Tuned::Auto`], of the one in the user's cache folder, where there is
    /// one: plans take them where they know the shape, and what the cost model expects to be fastest elsewhere.
    ///
    /// ```
    /// use qgemm_api::{Context, Tuned};
    ///
    /// let ctx = Context::open("cpu")?.with_tuned(Tuned::Auto);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn with_tuned(self, tuned: impl Into<Tuned>) -> Self {
        let Some(table) = tuned.into().table() else { return self };
        // Other clones keep their table, and what they planned by it.
        Self { tuned: Arc::new(table), plans: Arc::default(), ..self }
    }

    /// What the device is and can do.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The measured configurations that plans follow.
    pub(crate) fn tuned(&self) -> &Arc<TunedTable> {
        &self.tuned
    }

    /// The device itself, for events, copies and fills on a stream of one's choice.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The stream that calls without one of their own use.
    pub fn default_stream(&self) -> Stream {
        self.device.default_stream()
    }

    /// A new stream, whose work is ordered only within itself.
    ///
    /// # Errors
    /// A driver error.
    pub fn new_stream(&self) -> Result<Stream, Error> {
        Ok(self.device.new_stream()?)
    }

    /// Waits until all work of `stream` is done.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.device.synchronize(stream)?)
    }

    /// Marks the present end of `stream`'s work, for other streams to wait for.
    ///
    /// # Errors
    /// A device error.
    pub fn record(&self, stream: &Stream) -> Result<Event, Error> {
        Ok(self.device.record(stream)?)
    }

    /// Makes work that is submitted to `stream` from here on begin after the work before `event`, which may be another
    /// stream's. The host does not wait.
    ///
    /// # Errors
    /// When one of them belongs to another device, or a device error.
    pub fn wait(&self, stream: &Stream, event: &Event) -> Result<(), Error> {
        Ok(self.device.wait(stream, event)?)
    }

    pub(crate) fn plan_caches(&self) -> &PlanCaches {
        &self.plans
    }

    pub(crate) fn check_weight(&self, got: DeviceId) -> Result<(), Error> {
        Checks(self.info().id).device("weight", got)
    }

    /// Scratch memory of at least `bytes` bytes, zeroed. Use it with one stream at a time.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn workspace(&self, bytes: usize) -> Result<Workspace, Error> {
        Ok(Workspace::new(self.device.allocate(bytes, "a workspace")?))
    }

    /// A zeroed buffer of `bytes` bytes, which remembers no element type: plans take it for any operand, whatever has been written to it.
    /// [`Context::allocate_elements`] has plans refuse it for others.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(self.device.allocate(bytes, "a buffer")?)
    }

    /// A zeroed buffer of `count` elements, which remembers their type: a plan that would read or write other elements refuses it.
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
    /// A device error such as exhausted memory.
    pub fn allocate_elements(&self, element: impl Into<ElementType>, count: usize) -> Result<Buffer, Error> {
        let element = element.into();
        // No device has as many bytes as the largest number.
        Ok(self.allocate(count.saturating_mul(element.bytes()))?.typed(element))
    }

    /// A new buffer that holds `values` (numbers, or bytes), ready for every stream. It remembers what the values are, and of bytes nothing:
    /// see [`Context::allocate_elements`].
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer, Error> {
        let mut buffer = self.allocate_elements(T::TYPE, values.len())?;
        self.upload_into(values, &mut buffer)?;
        Ok(buffer)
    }

    /// Copies `values` to the start of `dst`, which must not be in use by work submitted before. Every stream
    /// sees them when this returns.
    ///
    /// # Errors
    /// When `dst` is too short, on another device or known to hold other elements, or a device error. Bytes go anywhere.
    pub fn upload_into<'a, T: Element>(&self, values: &[T], dst: impl Into<BufferMut<'a>>) -> Result<(), Error> {
        self.upload_on(&self.default_stream(), values, dst)
    }

    /// Copies `values` to the start of `dst` after the work of `stream` that was submitted before, such as what still reads
    /// `dst`. Every stream sees them when this returns.
    ///
    /// # Errors
    /// As [`Context::upload_into`].
    pub fn upload_on<'a, T: Element>(
        &self,
        stream: &Stream,
        values: &[T],
        dst: impl Into<BufferMut<'a>>,
    ) -> Result<(), Error> {
        let dst = dst.into();
        check_copied::<T>("destination of an upload", dst.view())?;
        self.device.upload(stream, bytes_of(values), dst)?;
        Ok(self.device.synchronize(stream)?)
    }

    /// Waits for the default stream and returns the values of `src`: numbers, or bytes. Work on another stream is not waited
    /// for: take [`Context::download_on`] for that.
    ///
    /// # Errors
    /// When `src` is no whole number of values, or is known to hold other elements, or a device error. Bytes come from anywhere.
    pub fn download<'a, T: Element>(&self, src: impl Into<BufferRef<'a>>) -> Result<Vec<T>, Error> {
        self.download_on(&self.default_stream(), src)
    }

    /// Waits for `stream` and returns the values of `src`.
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

/// That memory holds values of `T`, unless they are copied as bytes.
pub(crate) fn check_copied<T: Element>(operand: &'static str, view: BufferRef<'_>) -> Result<(), Error> {
    if T::TYPE == ElementType::Bytes { Ok(()) } else { check_element(operand, T::TYPE, view) }
}

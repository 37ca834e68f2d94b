//! CUDA graphs: launches captured once and replayed with one call.

use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use qgemm_hal::{Buffer, BufferMut, BufferRef, Device, HalError, Stream};

use crate::driver::DeviceContext;
use crate::gpu::Gpu;
use crate::memory::device_address;
use crate::stream::CudaStream;

/// Captured launches. The graph borrows their memory, so that it
/// cannot be freed or seen half written while the graph can
/// be replayed. Data that changes between replays belongs in its `N`
/// [buffers](Graph::buffers_mut).
pub struct Graph<'a, const N: usize = 0> {
    context: Arc<DeviceContext>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    /// Lent as views only, so that the addresses used by
    /// the launches stay valid.
    buffers: [Buffer; N],
    /// Dropped with the graph: it owns what was moved into it.
    _work: Box<dyn Send + 'a>,
}

// SAFETY: graph handles may be used from any thread, one at
// a time. `Graph` is not `Sync`, because it holds raw pointers.
unsafe impl<const N: usize> Send for Graph<'_, N> {}

/// A closure, kept for its borrows and owned values.
struct Kept<F>(F);

/// Captures what `work` submits to `stream` instead of running it.
///
/// `work` must not allocate, free, copy from host memory or wait:
/// the driver refuses these during capture.
///
/// # Errors
/// Errors of `work`, [`HalError::WrongDevice`], or a driver error.
pub fn capture<'a, F, E>(device: &dyn Device, stream: &Stream, mut work: F) -> Result<Graph<'a>, E>
where
    F: FnMut() -> Result<(), E> + Send + 'a,
    E: From<HalError>,
{
    capture_with(device, stream, [], move |_: [BufferMut<'_>; 0]| work())
}

/// As [`capture`], for work on `buffers`. The graph owns them
/// from then on and lends them between replays, for uploading
/// inputs and downloading results.
///
/// ```no_run
/// use qgemm_api::half::f16;
/// use qgemm_api::{Args, Context, DType, Problem, cuda, quantize};
///
/// let ctx = Context::open("cuda:0")?;
/// let weight = ctx.load(&quantize(&[0.25; 64 * 128], 64, 128, "q8_0".parse()?)?.0)?;
/// let plan = ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16))?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let (stream, buffers) = (ctx.new_stream()?, [ctx.allocate(128 * 2)?, ctx.allocate(64 * 2)?]);
/// let mut graph = cuda::capture_with(&**ctx.device(), &stream, buffers, |[x, d]| {
///     plan.run(&stream, Args::new(x.view(), &weight, d).workspace(&mut workspace))
/// })?;
/// for token in [f16::ONE, f16::ZERO] {
///     let [x, _] = graph.buffers_mut();
///     ctx.upload_on(&stream, &[token; 128], x)?; // after the replay before
///     graph.replay(&stream)?;
///     let [_, d] = graph.buffers();
///     let values: Vec<f16> = ctx.download_on(&stream, d)?;
/// #   drop(values);
/// }
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Errors
/// As [`capture`].
pub fn capture_with<'a, const N: usize, F, E>(
    device: &dyn Device,
    stream: &Stream,
    mut buffers: [Buffer; N],
    mut work: F,
) -> Result<Graph<'a, N>, E>
where
    F: for<'b> FnMut([BufferMut<'b>; N]) -> Result<(), E> + Send + 'a,
    E: From<HalError>,
{
    let context = Gpu::of(device)?.context().clone();
    // Dropped before the buffers, which cannot be freed during capture.
    let recording = Recording::begin(&context, CudaStream::of(context.id(), stream)?)?;
    work(buffers.each_mut().map(Buffer::view_mut))?;
    let graph = recording.end()?;
    Ok(Graph::new(&context, graph, buffers, Box::new(Kept(work)))?)
}

impl<'a, const N: usize> Graph<'a, N> {
    /// A graph that was just captured, with what it keeps.
    fn new(
        context: &Arc<DeviceContext>,
        graph: sys::CUgraph,
        buffers: [Buffer; N],
        work: Box<dyn Send + 'a>,
    ) -> Result<Self, HalError> {
        let (context, executable) = (Arc::clone(context), ptr::null_mut());
        let mut built = Graph { context, graph, executable, buffers, _work: work };
        // SAFETY: the graph was just captured.
        let executable = unsafe { result::graph::instantiate(built.graph, sys::CUgraphInstantiate_flags(0)) };
        built.executable = built.context.check("cuGraphInstantiate", executable)?;
        Ok(built)
    }
}

/// Captured launches on memory that the caller keeps and lends for each
/// replay. Graphs of several batch sizes share it that way.
#[derive(Debug)]
pub struct LentGraph<'a> {
    graph: Graph<'a>,
    /// Address and length of the memory.
    at: (u64, usize),
}

/// As [`capture`], for work on `memory`, which the caller keeps.
///
/// # Errors
/// As [`capture`].
pub fn capture_lent<'a, F, E>(
    device: &dyn Device,
    stream: &Stream,
    mut memory: BufferMut<'_>,
    mut work: F,
) -> Result<LentGraph<'a>, E>
where
    F: for<'b> FnMut(BufferMut<'b>) -> Result<(), E> + Send + 'a,
    E: From<HalError>,
{
    let context = Gpu::of(device)?.context().clone();
    let at = address_and_len(&context, &memory)?;
    let recording = Recording::begin(&context, CudaStream::of(context.id(), stream)?)?;
    work(memory.reborrow())?;
    let graph = Graph::new(&context, recording.end()?, [], Box::new(Kept(work)))?;
    Ok(LentGraph { graph, at })
}

fn address_and_len(context: &DeviceContext, memory: &BufferMut<'_>) -> Result<(u64, usize), HalError> {
    let view = memory.view();
    Ok((device_address(context.id(), view, "a graph's memory")?, view.len()))
}

impl LentGraph<'_> {
    /// Submits the captured launches to `stream`. `memory` is what they were captured with.
    ///
    /// # Errors
    /// [`HalError::OtherMemory`], [`HalError::WrongDevice`] or a driver error.
    pub fn replay(&self, stream: &Stream, memory: BufferMut<'_>) -> Result<(), HalError> {
        match address_and_len(&self.graph.context, &memory)? == self.at {
            true => self.graph.replay(stream),
            false => Err(HalError::OtherMemory { what: "a captured graph" }),
        }
    }
}

impl<const N: usize> Graph<'_, N> {
    /// The graph's buffers.
    pub fn buffers(&self) -> [BufferRef<'_>; N] {
        self.buffers.each_ref().map(Buffer::view)
    }

    /// The graph's buffers, writable between replays. Writes on the
    /// replay stream (`Context::upload_on`) are ordered after earlier
    /// replays and before later ones.
    pub fn buffers_mut(&mut self) -> [BufferMut<'_>; N] {
        self.buffers.each_mut().map(Buffer::view_mut)
    }

    /// Submits the captured launches to `stream`, which may
    /// differ from the capture stream.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    pub fn replay(&self, stream: &Stream) -> Result<(), HalError> {
        let stream = CudaStream::of(self.context.id(), stream)?;
        self.context.bind()?;
        // SAFETY: graph and stream are alive and of one context. The
        // graph borrows or owns the memory that it uses.
        self.context.check("cuGraphLaunch", unsafe { result::graph::launch(self.executable, stream.handle()) })
    }
}

impl<const N: usize> Drop for Graph<'_, N> {
    fn drop(&mut self) {
        let destroyed = self.context.bind().and_then(|()| {
            // SAFETY: both handles were made by `capture` and are destroyed
            // once. A running replay completes.
            unsafe {
                if !self.executable.is_null() {
                    self.context.check("cuGraphExecDestroy", result::graph::exec_destroy(self.executable))?;
                }
                self.context.check("cuGraphDestroy", result::graph::destroy(self.graph))
            }
        });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "a graph could not be destroyed");
        }
    }
}

impl<const N: usize> fmt::Debug for Graph<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {:p})", self.context.id(), self.executable)
    }
}

/// A stream in capture mode. Dropped without
/// [`Recording::end`], it discards the capture, so that the
/// stream runs work again after an error.
struct Recording<'s> {
    context: &'s DeviceContext,
    stream: &'s CudaStream,
    ended: bool,
    /// A thread-local capture must be ended by the
    /// thread that began it.
    _on_this_thread: PhantomData<*const ()>,
}

impl<'s> Recording<'s> {
    fn begin(context: &'s DeviceContext, stream: &'s CudaStream) -> Result<Self, HalError> {
        context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and of this context.
        context.check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream.handle(), mode) })?;
        Ok(Self { context, stream, ended: false, _on_this_thread: PhantomData })
    }

    fn end(mut self) -> Result<sys::CUgraph, HalError> {
        self.ended = true;
        // SAFETY: the stream is alive and capturing.
        let graph = unsafe { result::stream::end_capture(self.stream.handle()) };
        self.context.check("cuStreamEndCapture", graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // SAFETY: the stream is alive and capturing; a resulting
        // graph is destroyed at once.
        unsafe {
            if let Ok(graph) = result::stream::end_capture(self.stream.handle())
                && !graph.is_null()
                && let Err(error) = result::graph::destroy(graph)
            {
                tracing::warn!(code = error.0 as u32, "a discarded graph could not be destroyed");
            }
        }
    }
}

//! CUDA graphs: launches recorded once and replayed with one call.

use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use qgemm_hal::{Device, HalError, Stream};

use crate::driver::DeviceContext;
use crate::gpu::Gpu;
use crate::stream::CudaStream;

/// Recorded launches. Borrows what they read and write, so that the memory can be neither freed nor seen half
/// written while the graph can be replayed.
pub struct Graph<'a> {
    context: Arc<DeviceContext>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    /// Dropped with the graph: it owns what was moved into it.
    _work: Box<dyn Send + 'a>,
}

// SAFETY: graph handles may be used from any thread, one at a time; `Graph` is not `Sync`, for it holds raw pointers.
unsafe impl Send for Graph<'_> {}

/// A closure, kept for what it borrows and owns.
struct Kept<F>(F);

/// Records what `work` submits to `stream` instead of running it. `work` must not allocate, free, copy from host
/// memory or wait: the driver refuses these while it records.
///
/// # Errors
/// Those of `work`, [`HalError::WrongDevice`], or a driver error.
pub fn capture<'a, F, E>(device: &dyn Device, stream: &Stream, mut work: F) -> Result<Graph<'a>, E>
where
    F: FnMut() -> Result<(), E> + Send + 'a,
    E: From<HalError>,
{
    let context = Gpu::of(device)?.context().clone();
    let recording = Recording::begin(&context, CudaStream::of(context.id(), stream)?)?;
    work()?;
    let graph = recording.end()?;
    let mut built = Graph { context: context.clone(), graph, executable: ptr::null_mut(), _work: Box::new(Kept(work)) };
    // SAFETY: the graph was just recorded.
    let executable = unsafe { result::graph::instantiate(built.graph, sys::CUgraphInstantiate_flags(0)) };
    built.executable = context.check("cuGraphInstantiate", executable)?;
    Ok(built)
}

impl Graph<'_> {
    /// Submits the recorded launches to `stream`, which may be another one than they were recorded from.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    pub fn replay(&self, stream: &Stream) -> Result<(), HalError> {
        let stream = CudaStream::of(self.context.id(), stream)?;
        self.context.bind()?;
        // SAFETY: graph and stream are alive and of one context; the memory that the graph uses is borrowed.
        self.context.check("cuGraphLaunch", unsafe { result::graph::launch(self.executable, stream.handle()) })
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let destroyed = self.context.bind().and_then(|()| {
            // SAFETY: both handles were made by `capture` and are destroyed once; a replay that is under way
            // completes.
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

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {:p})", self.context.id(), self.executable)
    }
}

/// A stream that records. Dropped without [`Recording::end`], it throws the recording away, so that the stream runs
/// work again after an error.
struct Recording<'s> {
    context: &'s DeviceContext,
    stream: &'s CudaStream,
    ended: bool,
    /// The driver wants a thread-local recording ended by the thread that began it.
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
        // SAFETY: the stream is alive and recording.
        let graph = unsafe { result::stream::end_capture(self.stream.handle()) };
        self.context.check("cuStreamEndCapture", graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // SAFETY: the stream is alive and recording; a graph that comes of it is destroyed at once.
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

//! Launch profiling: device times of each step of a sequence.
//!
//! A recording belongs to a thread. When no thread records, a
//! run costs one extra relaxed load.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::caps::Math;
use crate::device::{Device, Event, Stream};
use crate::error::HalError;
use crate::kernel_id::KernelId;
use crate::op::Operation;
use crate::operands::Operands;
use crate::sequence::{Geometry, LaunchSequence};

/// Times of one run of an operation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchTimes {
    /// Name of the operation.
    pub operation: &'static str,
    /// The sequence's name.
    pub kernel: String,
    /// Minimum bytes of the operation.
    pub bytes: f64,
    /// Multiply-adds of the operation.
    pub macs: f64,
    /// Arithmetic, if the sequence declares it.
    pub math: Option<Math>,
    /// Times of its kernels.
    pub steps: Vec<StepTimes>,
}

/// Time of one kernel of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepTimes {
    /// The kernel's identity.
    pub kernel_id: KernelId,
    /// Its launch geometry.
    pub geometry: Geometry,
    /// Start time since the first kernel of the recording.
    pub start: Duration,
    /// Duration.
    pub time: Duration,
}

/// Number of recording threads.
static RECORDING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Runs that a thread has recorded.
struct Recorder {
    device: Arc<dyn Device>,
    launches: Vec<Recorded>,
}

/// A run whose events are not evaluated yet.
struct Recorded {
    operation: &'static str,
    kernel: String,
    bytes: f64,
    macs: f64,
    math: Option<Math>,
    steps: Vec<(KernelId, Geometry, [Event; 2])>,
}

/// Counts the thread as recording until it is dropped.
struct Recording;

impl Recording {
    fn begin(device: Arc<dyn Device>) -> Self {
        RECORDER.set(Some(Recorder { device, launches: Vec::new() }));
        RECORDING.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDING.fetch_sub(1, Ordering::Relaxed);
        RECORDER.set(None);
    }
}

/// Runs `work` and returns the times of the sequences that this
/// thread ran on `device` meanwhile.
///
/// Events between the kernels keep a kernel from starting
/// before the last one ended. Capturing a sequence into a
/// graph fails, because events have no time there. A nested
/// recording ends the outer one.
///
/// # Errors
/// Device errors when the events are evaluated.
pub fn record_launches<R>(
    device: &Arc<dyn Device>,
    work: impl FnOnce() -> R,
) -> Result<(R, Vec<LaunchTimes>), HalError> {
    let recording = Recording::begin(Arc::clone(device));
    let result = work();
    let launches = RECORDER.take().map(|recorder| recorder.launches).unwrap_or_default();
    drop(recording);
    let Some(first) = launches.iter().flat_map(|launch| &launch.steps).map(|(.., [start, _])| start.clone()).next()
    else {
        return Ok((result, Vec::new()));
    };
    let times = launches.into_iter().map(|launch| launch.times(device.as_ref(), &first));
    Ok((result, times.collect::<Result<_, _>>()?))
}

impl Recorded {
    /// Evaluates the events, relative to `first`.
    fn times(self, device: &dyn Device, first: &Event) -> Result<LaunchTimes, HalError> {
        let Self { operation, kernel, bytes, macs, math, steps } = self;
        let times = |(kernel_id, geometry, [start, end]): (KernelId, Geometry, [Event; 2])| {
            let time = device.elapsed(&start, &end)?;
            Ok(StepTimes { kernel_id, geometry, start: device.elapsed(first, &start)?, time })
        };
        let steps = steps.into_iter().map(times).collect::<Result<_, HalError>>()?;
        Ok(LaunchTimes { operation, kernel, bytes, macs, math, steps })
    }
}

/// Whether any thread is recording.
pub(crate) fn is_recording() -> bool {
    RECORDING.load(Ordering::Relaxed) > 0
}

/// Runs a sequence for `op`. If this thread records the stream's
/// device, events surround each step.
pub(crate) fn run<O: Operation>(
    sequence: &LaunchSequence,
    op: &O,
    stream: &Stream,
    mut operands: Operands<'_>,
) -> Result<(), HalError> {
    let device = RECORDER.with_borrow(|recorder| recorder.as_ref().map(|recorder| Arc::clone(&recorder.device)));
    let Some(device) = device.filter(|device| device.info().id == stream.device()) else {
        return sequence.run(stream, operands);
    };
    let mut steps = Vec::new();
    for step in sequence.steps() {
        let start = device.record(stream)?;
        step.launch(stream, &mut operands)?;
        steps.push((*step.kernel_id(), step.geometry(), [start, device.record(stream)?]));
    }
    let kernel = sequence.name().to_owned();
    let (bytes, macs, math) = (op.traffic(), op.macs(), sequence.math());
    let recorded = Recorded { operation: O::NAME, kernel, bytes, macs, math, steps };
    RECORDER.with_borrow_mut(|recorder| {
        if let Some(recorder) = recorder {
            recorder.launches.push(recorded);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noop;

    #[test]
    fn a_recording_ends_with_its_work_even_when_that_panics() {
        let device: Arc<dyn Device> = noop::open("noop".parse().expect("a name")).expect("always there");
        let (inside, launches) = record_launches(&device, is_recording).expect("nothing ran");
        assert!(inside && launches.is_empty());
        let panics = std::panic::AssertUnwindSafe(|| record_launches(&device, || panic!("the work's own")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(RECORDER.take().is_none());
    }
}

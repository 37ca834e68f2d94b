//! Kernel profiler ([`Context::profile`]): device time of each step.

use std::fmt;
use std::time::Duration;

use qgemm_hal::{DeviceInfo, LaunchTimes, record_launches};
use serde::Serialize;

use crate::context::Context;
use crate::error::Error;

/// Profile: runs of a profiled context in order, times in seconds.
///
/// Serialised, it is data; its text is a table. [`Profile::chrome_trace`] is for
/// Perfetto and `chrome://tracing`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Profile {
    /// Device name.
    pub device: String,
    /// Read bandwidth of the device in bytes per second.
    pub bandwidth: f64,
    /// Runs of operations, one each.
    pub runs: Vec<ProfiledRun>,
}

/// Run of one plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProfiledRun {
    /// Operation: `gemm`.
    pub operation: String,
    /// Kernel name: `gemm_nt_q4_k_f16`.
    pub kernel: String,
    /// Total time of its steps.
    pub seconds: f64,
    /// Minimum bytes of the operation, divided by the time.
    pub bytes_per_second: f64,
    /// Additions and multiplications, divided by the time.
    pub operations_per_second: f64,
    /// Achieved share of the device's read bandwidth.
    pub bandwidth_share: f64,
    /// Arithmetic: `f16_tensor`. Absent for operations without multiplications.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub math: Option<String>,
    /// Achieved share of the device's peak rate for that arithmetic, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arithmetic_share: Option<f64>,
    /// Kernels of the run.
    pub steps: Vec<ProfiledStep>,
}

/// Kernel launch of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProfiledStep {
    /// Kernel id.
    pub kernel_id: String,
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Start, since the first kernel.
    pub start: f64,
    /// Duration.
    pub seconds: f64,
}

impl Context {
    /// Runs `work` and records the device time of each kernel that this thread launches
    /// by plans of this device.
    ///
    /// Events separate kernels, so none overlaps the next: the sum exceeds the undisturbed
    /// time. CUDA graphs cannot be captured meanwhile.
    ///
    /// ```
    /// use qgemm_api::{Args, Context, Problem, quantize};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let (host, _) = quantize(&vec![0.5; 64 * 64], 64, 64, "q8_0".parse()?)?;
    /// let weight = ctx.load(&host)?;
    /// let plan = ctx.plan(&Problem::new(&weight, 1))?;
    /// let (x, mut d) = (ctx.upload(&[1.0_f32; 64])?, ctx.allocate(64 * 4)?);
    /// let stream = ctx.default_stream();
    /// let (result, profile) = ctx.profile(|| plan.run(&stream, Args::new(&x, &weight, &mut d)))?;
    /// result?;
    /// assert_eq!(profile.runs[0].operation, "gemm");
    /// println!("{profile}");
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// Device errors, e.g. of a kernel of `work`.
    pub fn profile<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Profile), Error> {
        let _span = tracing::debug_span!("profile", device = %self.info().id).entered();
        let (result, launches) = record_launches(self.device(), work)?;
        let info = self.info();
        let runs = launches.into_iter().map(|launch| ProfiledRun::new(launch, info)).collect();
        Ok((result, Profile { device: info.name.clone(), bandwidth: info.bandwidth, runs }))
    }
}

impl ProfiledRun {
    fn new(launch: LaunchTimes, info: &DeviceInfo) -> Self {
        let seconds = launch.steps.iter().map(|step| step.time).sum::<Duration>().as_secs_f64();
        // A clock without progress yields no rate.
        let rate = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let steps = launch.steps.into_iter().map(|step| ProfiledStep {
            kernel_id: step.kernel_id.to_string(),
            grid: step.geometry.grid,
            start: step.start.as_secs_f64(),
            seconds: step.time.as_secs_f64(),
        });
        Self {
            operation: launch.operation.to_owned(),
            kernel: launch.kernel,
            seconds,
            bytes_per_second: rate(launch.bytes),
            operations_per_second: rate(2.0 * launch.macs),
            bandwidth_share: rate(launch.bytes) / info.bandwidth,
            math: launch.math.map(|math| math.name().to_owned()),
            arithmetic_share: launch.math.and_then(|math| info.rate(math)).map(|most| rate(launch.macs) / most),
            steps: steps.collect(),
        }
    }
}

impl Profile {
    /// Concatenates profiles of one device, each starting where the previous
    /// one ended. `None` for none.
    pub fn joined<'a>(profiles: impl IntoIterator<Item = &'a Profile>) -> Option<Profile> {
        profiles.into_iter().fold(None, |joined: Option<Profile>, next| {
            let Some(mut joined) = joined else { return Some(next.clone()) };
            let last = joined.runs.iter().flat_map(|run| &run.steps).last();
            let end = last.map_or(0.0, |step| step.start + step.seconds);
            let mut runs = next.runs.clone();
            runs.iter_mut().flat_map(|run| &mut run.steps).for_each(|step| step.start += end);
            joined.runs.extend(runs);
            Some(joined)
        })
    }

    /// JSON trace for Perfetto and `chrome://tracing`: operations in one
    /// row, kernels in another.
    pub fn chrome_trace(&self) -> String {
        let event = |name: &str, row: u32, start: f64, seconds: f64, args: serde_json::Value| {
            serde_json::json!({
                "name": name, "ph": "X", "pid": 0, "tid": row, "ts": start * 1e6, "dur": seconds * 1e6, "args": args,
            })
        };
        let mut events = Vec::new();
        for run in &self.runs {
            let (Some(first), Some(last)) = (run.steps.first(), run.steps.last()) else { continue };
            let rates = serde_json::json!({
                "operation": run.operation,
                "bytes_per_second": run.bytes_per_second,
                "operations_per_second": run.operations_per_second,
                "bandwidth_share": run.bandwidth_share,
                "arithmetic_share": run.arithmetic_share,
            });
            events.push(event(&run.kernel, 0, first.start, last.start + last.seconds - first.start, rates));
            for step in &run.steps {
                events.push(event(
                    &step.kernel_id,
                    1,
                    step.start,
                    step.seconds,
                    serde_json::json!({"grid": step.grid}),
                ));
            }
        }
        serde_json::json!({"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"device": self.device}})
            .to_string()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, reads {:.1} GB/s", self.device, self.bandwidth / 1e9)?;
        writeln!(f, "{:>10} {:>9} {:>9} {:>7} {:>7}  kernel", "time us", "GB/s", "TFLOP/s", "of read", "of math")?;
        for run in &self.runs {
            let (bytes, operations) = (run.bytes_per_second / 1e9, run.operations_per_second / 1e12);
            let share = run.bandwidth_share * 100.0;
            let micro = run.seconds * 1e6;
            let of_math = run.arithmetic_share.map_or_else(|| "-".into(), |share| format!("{:.1}%", share * 100.0));
            writeln!(f, "{micro:>10.2} {bytes:>9.1} {operations:>9.3} {share:>6.1}% {of_math:>7}  {}", run.kernel)?;
            for step in &run.steps {
                let [x, y, z] = step.grid;
                writeln!(f, "{:>10.2} {:>35}   {} <<<({x}, {y}, {z})>>>", step.seconds * 1e6, "", step.kernel_id)?;
            }
        }
        Ok(())
    }
}

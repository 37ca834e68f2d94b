//! Timeline of decode steps: which kernels take
//! how long, how much of that earlier work
//! covers, and when the device idles.

use std::fmt;

use qgemm_api::cuda::TimelineEntry;
use serde::Serialize;

/// Recorded steps.
pub const STEPS: usize = 8;

/// Where the time of a step goes. Numbers are those of an average step.
#[derive(Debug, Serialize)]
pub struct Timeline {
    /// The test: `tg128 @ d2048`.
    test: String,
    /// Microseconds from the end of a step to that of the next.
    microseconds: f64,
    /// Idle microseconds: those without any work on the device.
    idle: f64,
    /// Kernels and copies, in order of their first start.
    work: Vec<Work>,
    #[serde(skip)]
    entries: Vec<TimelineEntry>,
}

/// Launches of a kernel with one geometry.
#[derive(Debug, Serialize)]
struct Work {
    name: String,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    /// Launches of a step.
    launches: f64,
    /// Mean duration. Launches overlap: a kernel may start while
    /// the kernel before it ends.
    microseconds: f64,
    /// Time of a step in which no earlier work was at the device.
    own_microseconds: f64,
}

impl Timeline {
    /// The timeline of `entries`, which begin with the end of the step
    /// before and are sorted by start.
    pub fn of_steps(test: String, entries: &[TimelineEntry], steps: usize) -> Self {
        let micro = |nanoseconds: u64| nanoseconds as f64 * 1e-3 / steps as f64;
        let mut work: Vec<Work> = Vec::new();
        let begin = entries.first().map_or(0, |entry| entry.end);
        let (mut end, mut idle) = (begin, 0);
        for entry in entries.iter().skip(1) {
            idle += entry.start.saturating_sub(end);
            let own = entry.end.saturating_sub(entry.start.max(end));
            end = end.max(entry.end);
            let is_same = |work: &Work| {
                work.name == entry.name && work.grid == entry.grid && work.shared_bytes == entry.shared_bytes
            };
            let place = work.iter().position(is_same).unwrap_or_else(|| {
                work.push(Work::none_of(entry));
                work.len() - 1
            });
            let of_entry = &mut work[place];
            of_entry.launches += 1.0;
            of_entry.microseconds += (entry.end - entry.start.min(entry.end)) as f64 * 1e-3;
            of_entry.own_microseconds += micro(own);
        }
        for work in &mut work {
            work.microseconds /= work.launches;
            work.launches /= steps as f64;
        }
        Self { test, microseconds: micro(end - begin), idle: micro(idle), work, entries: entries.to_vec() }
    }
}

impl Work {
    fn none_of(entry: &TimelineEntry) -> Self {
        let TimelineEntry { name, grid, threads, shared_bytes, .. } = entry;
        let (name, grid, threads, shared_bytes) = (name.clone(), *grid, *threads, *shared_bytes);
        Self { name, grid, threads, shared_bytes, launches: 0.0, microseconds: 0.0, own_microseconds: 0.0 }
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { test, microseconds, idle, .. } = self;
        writeln!(f, "{test}: {microseconds:.1} us a step, {idle:.1} us without work")?;
        writeln!(
            f,
            "{:<34} {:>14} {:>7} {:>7} {:>8} {:>8} {:>9}",
            "work", "grid", "threads", "shared", "launches", "us each", "us alone"
        )?;
        for work in &self.work {
            let Work { name, grid: [x, y, z], threads, shared_bytes, launches, microseconds, own_microseconds } = work;
            let grid = format!("{x}x{y}x{z}");
            writeln!(
                f,
                "{name:<34} {grid:>14} {threads:>7} {shared_bytes:>7} {launches:>8.1} {microseconds:>8.2} {own_microseconds:>9.2}"
            )?;
        }
        Ok(())
    }
}

/// JSON trace for Perfetto and `chrome://tracing`: a process a timeline, with
/// launches that overlap in rows of their own.
pub fn chrome_trace(timelines: &[&Timeline]) -> String {
    let mut events = Vec::new();
    for (process, timeline) in timelines.iter().enumerate() {
        events.push(
            serde_json::json!({"name": "process_name", "ph": "M", "pid": process, "args": {"name": timeline.test}}),
        );
        let begin = timeline.entries.first().map_or(0, |entry| entry.start);
        let mut rows: Vec<u64> = Vec::new();
        for entry in &timeline.entries {
            let row = rows.iter().position(|end| *end <= entry.start).unwrap_or_else(|| {
                rows.push(0);
                rows.len() - 1
            });
            rows[row] = entry.end;
            let micro = |nanoseconds: u64| nanoseconds as f64 * 1e-3;
            events.push(serde_json::json!({
                "name": entry.name, "ph": "X", "pid": process, "tid": row,
                "ts": micro(entry.start - begin), "dur": micro(entry.end.saturating_sub(entry.start)),
                "args": {"grid": entry.grid, "threads": entry.threads, "shared_bytes": entry.shared_bytes},
            }));
        }
    }
    serde_json::json!({"traceEvents": events, "displayTimeUnit": "ns"}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, start: u64, end: u64) -> TimelineEntry {
        let mut entry = TimelineEntry::default();
        (entry.name, entry.start, entry.end) = (name.into(), start, end);
        entry
    }

    /// Two steps of a kernel and one that starts before its end, with 1 us between.
    #[test]
    fn time_belongs_to_the_work_that_was_there_first() {
        let of_step = |at: u64| {
            let copy = entry(TimelineEntry::COPY_TO_HOST, at + 9_000, at + 10_000);
            [entry("first", at + 1_000, at + 6_000), entry("second", at + 2_000, at + 9_000), copy]
        };
        let before = entry(TimelineEntry::COPY_TO_HOST, 0, 0);
        let entries: Vec<_> = [before].into_iter().chain(of_step(0)).chain(of_step(10_000)).collect();
        let timeline = Timeline::of_steps("tg2".into(), &entries, 2);
        assert_eq!((timeline.microseconds, timeline.idle), (10.0, 1.0));
        let work = |place: usize| {
            let work = &timeline.work[place];
            (work.name.as_str(), work.launches, work.microseconds, work.own_microseconds)
        };
        let expected = [("first", 1.0, 5.0, 5.0), ("second", 1.0, 7.0, 3.0), ("copy to host", 1.0, 1.0, 1.0)];
        assert_eq!([work(0), work(1), work(2)], expected);
        let trace: serde_json::Value = serde_json::from_str(&chrome_trace(&[&timeline])).expect("JSON");
        let rows: Vec<_> =
            trace["traceEvents"].as_array().expect("events").iter().filter_map(|event| event["tid"].as_u64()).collect();
        assert_eq!(rows, [0, 0, 1, 0, 0, 1, 0]);
    }

    #[test]
    fn an_empty_recording_has_no_work() {
        let timeline = Timeline::of_steps("tg8".into(), &[], 1);
        assert_eq!((timeline.microseconds, timeline.idle, timeline.work.len()), (0.0, 0.0, 0));
        assert!(chrome_trace(&[&timeline]).contains("tg8"));
    }
}

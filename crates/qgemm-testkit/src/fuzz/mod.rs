//! Fuzzers of the library's file readers: mutated model files and
//! settings, plans, tables and packed weights.
//!
//! Target, seed and number determine a case, so it can be run
//! again.
//! A reader must return an error or the file's contents. It must
//! not panic, hang or exceed the memory limit.
//! A *wrong acceptance* is a file that is read without an error
//! as something else. Each target has an oracle for that.

mod checkpoint;
mod gguf;
mod grouped;
mod layer;
mod meaning;
pub mod mutate;
mod packed;
mod plan;
mod tuned;

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

pub use checkpoint::CheckpointTarget;
pub use gguf::GgufTarget;
pub use packed::PackedTarget;
pub use plan::PlanTarget;
pub use tuned::TunedTarget;

/// A reader, with files for it.
pub trait FuzzTarget: Sync {
    /// The target's name in reports.
    fn name(&self) -> &'static str;

    /// Makes a randomly mutated file.
    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a>;
}

/// A mutated file.
pub struct FuzzCase<'a> {
    /// Description of the mutations.
    pub mutations: String,
    /// Reads the file and judges the outcome.
    pub read: Box<dyn FnOnce() -> FuzzVerdict + 'a>,
}

/// Verdict on a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FuzzVerdict {
    /// The reader returned an error.
    Refused,
    /// The reader returned the file's contents.
    Accepted,
    /// The reader returned something else, described here.
    Wrong(String),
}

/// A failed case.
#[derive(Clone, Debug)]
pub struct FuzzFinding {
    /// Number of the case.
    pub case: u64,
    /// Description of the mutations.
    pub mutations: String,
    /// Description of the failure.
    pub what: String,
}

/// Result of many cases.
#[derive(Clone, Debug, Default)]
pub struct FuzzOutcome {
    /// Cases that ended in an error.
    pub refused: u64,
    /// Cases read correctly.
    pub accepted: u64,
    /// All other failures.
    pub findings: Vec<FuzzFinding>,
}

/// Limit on a case's computing time. A case that is not over
/// after [`HANG`] ends the process.
const SLOW: Duration = Duration::from_secs(5);
const HANG: Duration = Duration::from_secs(120);
/// Limit on a case's allocated bytes. Files and their contents
/// have some hundred kilobytes.
const MOST_BYTES: u64 = 32 << 20;
/// Limit on reported findings; more would be alike.
const MOST_FINDINGS: usize = 50;

/// Runs `cases` of `target`.
/// `bytes_of` calls its argument and returns the peak of
/// allocated bytes meanwhile. The caller owns the allocator.
///
/// # Panics
/// When a thread cannot be spawned.
pub fn fuzz(
    target: &dyn FuzzTarget,
    seed: u64,
    cases: Range<u64>,
    bytes_of: impl Fn(&mut dyn FnMut()) -> u64,
) -> FuzzOutcome {
    let mut outcome = FuzzOutcome::default();
    let watch = Watch::default();
    std::thread::scope(|scope| {
        scope.spawn(|| watch.look(target.name(), seed));
        // Dropped also when a mutation panics: a panic is not a hang.
        let _over = Over(&watch.over);
        for case in cases {
            if outcome.findings.len() >= MOST_FINDINGS {
                break;
            }
            watch.begin(case);
            run_case(target, seed, case, &bytes_of, &mut outcome);
        }
    });
    outcome
}

fn run_case(
    target: &dyn FuzzTarget,
    seed: u64,
    case: u64,
    bytes_of: &impl Fn(&mut dyn FnMut()) -> u64,
    outcome: &mut FuzzOutcome,
) {
    let FuzzCase { mutations, read } = target.draw(&mut case_rng(seed, case));
    let (read, verdict) = (Cell::new(Some(read)), Cell::new(None));
    let start = thread_time();
    let bytes = bytes_of(&mut || {
        if let Some(read) = read.take() {
            verdict.set(Some(catch_unwind(AssertUnwindSafe(read))));
        }
    });
    let elapsed = thread_time().saturating_sub(start);
    let what = match verdict.take() {
        Some(Ok(FuzzVerdict::Wrong(what))) => what,
        Some(Err(panic)) => format!("panic: {}", message(&*panic)),
        _ if elapsed > SLOW => format!("took {elapsed:?}"),
        _ if bytes > MOST_BYTES => format!("held {bytes} bytes"),
        Some(Ok(FuzzVerdict::Refused)) => return outcome.refused += 1,
        Some(Ok(FuzzVerdict::Accepted)) => return outcome.accepted += 1,
        None => "was not read".to_owned(),
    };
    outcome.findings.push(FuzzFinding { case, mutations, what });
}

/// CPU time of the calling thread, if the system reports it.
/// Other processes must not make a case look slow.
fn thread_time() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.as_ref().and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or(Duration::ZERO, Duration::from_nanos)
}

/// Random numbers of a case.
fn case_rng(seed: u64, case: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(case))
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Signals on drop that all cases are over.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Watchdog for hanging cases.
#[derive(Default)]
struct Watch {
    begun: Mutex<Option<(u64, Instant)>>,
    over: AtomicBool,
}

impl Watch {
    fn begin(&self, case: u64) {
        *self.begun.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((case, Instant::now()));
    }

    fn look(&self, target: &str, seed: u64) {
        while !self.over.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(20));
            let begun = *self.begun.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some((case, start)) = begun
                && start.elapsed() > HANG
            {
                // A hanging thread cannot be stopped.
                eprintln!("{target}, seed {seed}: case {case} hangs");
                std::process::abort();
            }
        }
    }
}

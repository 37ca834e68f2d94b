//! Fuzzers of the files that this library reads: mutated model files and settings, plans, tables and packed weights.
//!
//! A case is decided by its target, the seed and its number, and can be run again by these three. Reading must end in an error or
//! in what the file says: no panic, no hang, no memory beyond a limit, and no *wrong acceptance*, which is a file that is read
//! without complaint as something that it does not say. Each target has an oracle of its own for that.

mod checkpoint;
mod gguf;
mod meaning;
pub mod mutate;
mod packed;
mod plan;
mod tuned;

use std::cell::Cell;
use std::collections::BTreeMap;
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

/// A reader, and files for it.
pub trait FuzzTarget: Sync {
    /// What reports call it.
    fn name(&self) -> &'static str;

    /// Draws a mutated file.
    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a>;
}

/// A mutated file.
pub struct FuzzCase<'a> {
    /// What was mutated.
    pub mutations: String,
    /// Reads the file and judges the outcome.
    pub read: Box<dyn FnOnce() -> FuzzVerdict + 'a>,
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FuzzVerdict {
    /// The reader gave an error.
    Refused,
    /// The reader gave what the file says.
    Accepted,
    /// The reader gave something else in a way that is known, and is to be mended: which.
    Known(&'static str),
    /// The reader gave something else: what it was.
    Wrong(String),
}

/// What went wrong in a case.
#[derive(Clone, Debug)]
pub struct FuzzFinding {
    /// Number of the case.
    pub case: u64,
    /// What was mutated.
    pub mutations: String,
    /// What happened.
    pub what: String,
}

/// The outcome of many cases.
#[derive(Clone, Debug, Default)]
pub struct FuzzOutcome {
    /// Cases that ended in an error.
    pub refused: u64,
    /// Cases that were read as what the file says.
    pub accepted: u64,
    /// Cases that were read as something else in ways that are known, and how many of each.
    pub known: BTreeMap<&'static str, u64>,
    /// All others.
    pub findings: Vec<FuzzFinding>,
}

/// Most time that a case computes. A case that is not over after [`HANG`] ends the process.
const SLOW: Duration = Duration::from_secs(5);
const HANG: Duration = Duration::from_secs(120);
/// Most bytes that a case may hold at once; files and what they are read to have some hundred kilobytes.
const MOST_BYTES: u64 = 32 << 20;
/// Findings beyond this number are alike.
const MOST_FINDINGS: usize = 50;

/// Runs `cases` of `target`. `bytes_of` calls its argument and returns the most bytes that were allocated at once meanwhile: the
/// caller has the allocator.
///
/// # Panics
/// When no thread can be made.
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
        // Also when a mutation panics, which is no case that hangs.
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
        Some(Ok(FuzzVerdict::Known(which))) => return *outcome.known.entry(which).or_default() += 1,
        None => "was not read".to_owned(),
    };
    outcome.findings.push(FuzzFinding { case, mutations, what });
}

/// What the calling thread has computed so far, where the system tells: other processes do not make a case slow.
fn thread_time() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.as_ref().and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or(Duration::ZERO, Duration::from_nanos)
}

/// The numbers that decide a case.
fn case_rng(seed: u64, case: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(case))
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Says at its end that all cases are over.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Looks whether a case hangs.
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
                // A thread that hangs cannot be ended.
                eprintln!("{target}, seed {seed}: case {case} hangs");
                std::process::abort();
            }
        }
    }
}

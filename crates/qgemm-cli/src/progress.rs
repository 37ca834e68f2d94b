//! Progress bar on standard error, which does not disturb tables.

use std::thread;
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressStyle};
use qgemm_api::printable;

use crate::out;

/// A bar, or nothing.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar over `steps` steps.
    pub fn new(steps: u64, what: &'static str) -> Self {
        let bar = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} ({elapsed}, {eta} left) {msg}")
        {
            bar.set_style(style);
        }
        bar.set_prefix(what);
        // Without a thread the bar moves only at steps.
        let has_threads = || thread::Builder::new().spawn(|| ()).is_ok();
        if Term::stderr().is_term() && has_threads() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self(bar)
    }

    /// No bar.
    pub fn none() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Advances by `steps`.
    pub fn step(&self, steps: u64) {
        self.0.inc(steps);
    }

    /// Steps done.
    pub fn position(&self) -> u64 {
        self.0.position()
    }

    /// Sets the message.
    pub fn say(&self, what: String) {
        self.0.set_message(printable(&what));
    }

    /// Prints a line to standard output above the bar.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn print(&self, line: &str) -> anyhow::Result<()> {
        self.0.suspend(|| out::line(line))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

//! The suites as tests of a backend.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use qgemm_api::{Context, Error, HalError};
use rayon::prelude::*;

use crate::outcome::{Outcome, Verdict};
use crate::suite::{Selection, suite_with};

/// Adopts the suites of all operations for a device: one test a group.
///
/// A device that is absent counts as skipped, and its reason is printed; `QGEMM_REQUIRE_DEVICE` set to the
/// device's name (or to several, with commas) turns that into a failure.
#[macro_export]
macro_rules! conformance {
    ($device:literal) => {
        $crate::conformance!(@tests $device
            shapes_plain shapes_int_offset shapes_int_affine shapes_int_zero shapes_codebook shapes_float8
            exact values deep_k epilogue scales activations gated layouts act_order x_prologue batch_invariant configurations
            convert_types convert_layouts convert_gathered convert_special convert_row_factors);
    };
    (@tests $device:literal $($group:ident)*) => {
        $(
            #[test]
            fn $group() {
                $crate::check_group($device, stringify!($group));
            }
        )*

        #[test]
        fn no_group_is_missing() {
            assert_eq!([$(stringify!($group)),*].as_slice(), $crate::group_names());
        }
    };
}

/// Runs one group of an operation's suite on a device, all formats, and reports every failure.
///
/// # Panics
/// When a case fails, the device fails to open, or there is no such group.
pub fn check_group(device: &str, group: &str) {
    let suite = suite_with(group).unwrap_or_else(|| panic!("no conformance group is called `{group}`"));
    let ctx = match shared_context(device) {
        Ok(ctx) => ctx,
        Err(error) if is_absent(&error) => {
            let required =
                std::env::var("QGEMM_REQUIRE_DEVICE").is_ok_and(|names| names.split(',').any(|n| n.trim() == device));
            assert!(!required, "{device} is required (QGEMM_REQUIRE_DEVICE) and absent: {error}");
            skipped(&format!("conformance {group} on {device}"), &error.to_string());
            return;
        }
        Err(error) => panic!("{device} fails to open: {error}"),
    };
    let cases = suite.cases(group, &Selection::default());
    let outcomes: Vec<Outcome> = cases.par_iter().map(|case| case.run(&ctx)).collect();
    let mut skips = BTreeMap::<&str, usize>::new();
    let mut failures = Vec::new();
    for outcome in &outcomes {
        match &outcome.verdict {
            Verdict::Pass => {}
            Verdict::Skip(reason) => *skips.entry(reason).or_default() += 1,
            Verdict::Fail(failure) => {
                let kernel = outcome.kernel.as_deref().unwrap_or("-");
                failures.push(format!("{} [{kernel}]: {failure}", outcome.case));
            }
        }
    }
    for (reason, count) in skips {
        skipped(&format!("{count} cases of {group} on {device}"), reason);
    }
    assert!(!outcomes.is_empty(), "the group {group} has no cases");
    const SHOWN: usize = 40;
    assert!(
        failures.is_empty(),
        "{} of {} cases of {group} failed on {device}:\n{}{}",
        failures.len(),
        outcomes.len(),
        failures[..failures.len().min(SHOWN)].join("\n"),
        if failures.len() > SHOWN { "\n…" } else { "" }
    );
}

/// The one context of this process on a device: compiling a kernel again for each group would take most of the time.
fn shared_context(device: &str) -> Result<Arc<Context>, Error> {
    static OPEN: Mutex<BTreeMap<String, Arc<Context>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ctx) = open.get(device) {
        return Ok(Arc::clone(ctx));
    }
    let ctx = Arc::new(Context::open(device)?);
    open.insert(device.to_owned(), Arc::clone(&ctx));
    Ok(ctx)
}

/// Whether the device does not exist here, as opposed to failing.
fn is_absent(error: &Error) -> bool {
    matches!(error, Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })
}

/// Says that `what` is not tested here, and why: a line on standard error, past the capture that hides what passing
/// tests print. `cargo xtask test` gathers these lines.
pub fn skipped(what: &str, why: &str) {
    // A closed standard error is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "skipped: {what}: {why}");
}

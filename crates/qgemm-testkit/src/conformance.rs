//! Conformance suites as tests of a backend.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use qgemm_api::{Context, Error, HalError};
use rayon::prelude::*;

use crate::outcome::{Outcome, Verdict};
use crate::suite::{Selection, Suite, TestCase, group_names, suite_with};

/// Runs the suites of all operations on a
/// device, one test per group.
///
/// Tests of an absent device are skipped, and print the reason.
/// If `QGEMM_REQUIRE_DEVICE` names the device (names are separated
/// by commas), they fail instead.
#[macro_export]
macro_rules! conformance {
    ($device:literal) => {
        $crate::conformance!(@tests $device
            shapes_plain shapes_int_offset shapes_int_affine shapes_int_zero shapes_codebook shapes_float8
            exact values deep_k epilogue scales activations gated whole_tiles layouts act_order x_prologue x_formats nan_codes norm
            fused projection batch_invariant configurations
            convert_types convert_layouts convert_gathered convert_special convert_row_factors
            experts_forms experts_exact experts_epilogue experts_layouts experts_faults experts_grouped experts_shared experts_every_kernel
            experts_nan_codes experts_norm experts_x_formats experts_x_permitted experts_invariant
            routing_sizes routing_scores routing_special routing_shared routing_local routing_layouts routing_ids
            matmul_layouts matmul_sizes matmul_exact matmul_epilogue matmul_batched matmul_strides matmul_special
            matmul_slopes matmul_gradients matmul_k_grouped matmul_rows_grouped matmul_tf32 matmul_every_kernel
            matmul_bf16x3 matmul_e4m3 matmul_e4m3_blocks
            quantize_formats quantize_layouts quantize_special quantize_factors
            attention_lengths attention_heads attention_masks attention_values attention_places attention_pages attention_layouts
            attention_codes attention_decode attention_bits attention_every_kernel attention_dequantized
            attention_sinks attention_gated attention_mixed attention_invariant
            norm_sizes norm_types norm_layouts norm_values norm_residual norm_quantized norm_gated
            kv_append_lengths kv_append_heads kv_append_angles kv_append_layouts kv_append_hadamard
            kv_append_head_norm kv_append_in_place
            indexer_lengths indexer_heads indexer_values indexer_best indexer_layouts
            gradient_formats gradient_exact gradient_nan_codes gradient_parts gradient_order gradient_gated gradient_experts
            optimizer_rules optimizer_steps
            gather_rows_formats gather_rows_ids gather_rows_layouts
            sampling_rules sampling_sizes sampling_penalties sampling_log_probabilities sampling_faults sampling_layouts
            merge_attention_sizes merge_attention_types merge_attention_values merge_attention_layouts
            linear_attention_sizes linear_attention_forms linear_attention_gates linear_attention_sequences linear_attention_layouts
            linear_attention_chunks linear_attention_long
            short_conv_sizes short_conv_types short_conv_sequences short_conv_state short_conv_gates short_conv_layouts);
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

/// Runs one group of an operation's suite on a device, for all
/// formats, and reports every failure.
///
/// # Panics
/// When a case fails, the device fails to open, or the
/// group does not exist.
pub fn check_group(device: &str, group: &str) {
    let suite = suite_with(group).unwrap_or_else(|| panic!("no conformance group is called `{group}`"));
    let Some(ctx) = open_or_skip(&format!("conformance {group}"), device) else { return };
    if !is_of_today(device, group) {
        return;
    }
    let cases = cases_of_today(suite, group, device);
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

/// `all` makes emulated devices run every format.
const ALL_VARIABLE: &str = "QGEMM_CONFORMANCE";
/// Days until an emulated device has run every format. Emulation is
/// thousands of times slower than a GPU.
const EMULATED_DAYS: u64 = 12;
/// An emulated device runs one in this many groups until it has
/// run every format, and then the next.
const GROUP_TURNS: u64 = 4;
/// As [`GROUP_TURNS`], of wgpu, where compiling
/// a group's shaders takes longer.
const WGPU_GROUP_TURNS: u64 = 6;
/// Days until all cases have run, of groups without formats. Such
/// groups have fewer cases.
const CASE_DAYS: u64 = 7;
/// Days until wgpu has run all formats. Without a GPU its
/// adapter is software.
const WGPU_DAYS: u64 = 6;
/// Groups whose cases compile a kernel each, or those of every
/// configuration, which takes longer than running them. For them, wgpu draws
/// formats like emulated devices, and both draw among the cases, too.
const MANY_KERNELS: &[&str] = &[
    "configurations",
    "experts_every_kernel",
    "attention_every_kernel",
    "attention_dequantized",
    "attention_sinks",
    "attention_gated",
    "attention_mixed",
    "matmul_every_kernel",
    "whole_tiles",
];
/// Turns until such a device has run all cases of such a group. A
/// turn is over when all groups and formats have run.
const KERNEL_TURNS: u64 = 4;

/// Whether a test of `device` runs a group today.
/// Emulated devices and wgpu run some of the groups, and the next
/// when all formats have run.
fn is_of_today(device: &str, group: &str) -> bool {
    let Some(days) = days_of_formats(device, group) else { return true };
    let turns = group_turns(device);
    say_once(device, &format!("conformance on {device} of all groups but one in {turns}"));
    let place = group_names().iter().position(|name| *name == group).unwrap_or(0) as u64;
    is_drawn(place, variant_number(device), today() / days, turns)
}

/// Whether group `place` is drawn for variant `variant` on a turn.
fn is_drawn(place: u64, variant: u64, turn: u64, turns: u64) -> bool {
    (place + variant + turn).is_multiple_of(turns)
}

/// Turns until a device has run every group.
fn group_turns(device: &str) -> u64 {
    if is_emulated(device) { GROUP_TURNS } else { WGPU_GROUP_TURNS }
}

/// Days until a test of `group` on `device` has run all formats;
/// `None` if each run has them all.
fn days_of_formats(device: &str, group: &str) -> Option<u64> {
    match device.split(':').next() {
        _ if runs_all() => None,
        Some("emu") => Some(EMULATED_DAYS),
        Some("wgpu") if MANY_KERNELS.contains(&group) => Some(EMULATED_DAYS),
        Some("wgpu") => Some(WGPU_DAYS),
        _ => None,
    }
}

/// Whether nothing may be left out.
fn runs_all() -> bool {
    std::env::var(ALL_VARIABLE).is_ok_and(|value| value == "all")
}

/// The cases of a group that a test of `device` runs today.
/// Emulated devices and wgpu draw among the cases if they compile many
/// kernels, emulated devices also if leaving out formats removes none.
fn cases_of_today(suite: &dyn Suite, group: &str, device: &str) -> Vec<Box<dyn TestCase>> {
    let all = Selection::default();
    let today = selection(device, group);
    let cases = suite.cases(group, &today);
    // The date may draw none of the group's few formats.
    let drew_none = cases.is_empty();
    let cases = if drew_none { suite.cases(group, &all) } else { cases };
    let Some(days) = days_of_formats(device, group) else { return cases };
    if MANY_KERNELS.contains(&group) && cases.len() >= KERNEL_TURNS as usize {
        say_once(device, &format!("three of four cases of {group} on {device}"));
        return drawn(cases, self::today() / (days * group_turns(device)), KERNEL_TURNS).0;
    }
    if !is_emulated(device) {
        return cases;
    }
    let depends_on_formats = drew_none || cases.len() < suite.cases(group, &all).len();
    if depends_on_formats {
        return cases;
    }
    // A group of fewer cases than days has one every day.
    let turns = CASE_DAYS.min(cases.len() as u64).max(1);
    drawn(cases, turn(device), turns).0
}

/// The formats that a test of `group` on `device` runs:
/// all, or those drawn by date. The six variants draw
/// different formats on a day.
fn selection(device: &str, group: &str) -> Selection {
    let all = Selection::default();
    let Some(days) = days_of_formats(device, group) else { return all };
    let (formats, left_out) = drawn(all.formats, turn(device), days);
    let names = left_out.iter().map(|format| format.desc().name).collect::<Vec<_>>().join(", ");
    let what = match (is_emulated(device), MANY_KERNELS.contains(&group)) {
        (true, _) => format!("conformance on {device} of {names}, and six of seven cases without a format"),
        (false, true) => format!("conformance {group} on {device} of {names}"),
        (false, false) => format!("conformance on {device} of {names}"),
    };
    say_once(device, &what);
    Selection { formats, ..Selection::default() }
}

fn is_emulated(device: &str) -> bool {
    device.starts_with("emu:")
}

/// Start of today's draw, different for each emulated variant.
fn turn(device: &str) -> u64 {
    today() + variant_number(device)
}

/// Number of an emulated device's variant; 0 for other devices.
fn variant_number(device: &str) -> u64 {
    const VARIANTS: [&str; 6] = ["emu:sm70", "emu:sm75", "emu:sm80", "emu:sm89", "emu:sm90", "emu:sm120"];
    VARIANTS.iter().position(|variant| *variant == device).unwrap_or(0) as u64
}

/// Days since 1970.
fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / (24 * 60 * 60))
}

/// Every `days`-th element, starting at `turn`, and the others.
fn drawn<T>(all: Vec<T>, turn: u64, days: u64) -> (Vec<T>, Vec<T>) {
    let numbered = (turn..).zip(all);
    let (drawn, left_out): (Vec<_>, Vec<_>) = numbered.partition(|(number, _)| number.is_multiple_of(days));
    let unnumbered = |numbered: Vec<(u64, T)>| numbered.into_iter().map(|(_, one)| one).collect();
    (unnumbered(drawn), unnumbered(left_out))
}

/// Prints once per process what `device` leaves out.
fn say_once(device: &str, what: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(what.to_owned()) {
        let day = today();
        let why =
            format!("day {day} drew the others; {ALL_VARIABLE}=all runs all, as does `qgemm verify --device {device}`");
        skipped(what, &why);
    }
}

/// Opens a device, or says that `what` is skipped on it because
/// it is absent. All tests of a process share the context.
///
/// # Panics
/// When the device fails to open, or is absent though
/// `QGEMM_REQUIRE_DEVICE` names it.
pub fn open_or_skip(what: &str, device: &str) -> Option<Arc<Context>> {
    match shared_context(device) {
        Ok(ctx) => Some(ctx),
        Err(error) if is_absent(&error) => {
            let required =
                std::env::var("QGEMM_REQUIRE_DEVICE").is_ok_and(|names| names.split(',').any(|n| n.trim() == device));
            assert!(!required, "{device} is required (QGEMM_REQUIRE_DEVICE) and absent: {error}");
            skipped(&format!("{what} on {device}"), &error.to_string());
            None
        }
        Err(error) => panic!("{device} fails to open: {error}"),
    }
}

/// Opens a device for a test whose two ranks have a device each:
/// as [`open_or_skip`], and skipped where the second GPU is absent.
///
/// # Panics
/// As [`open_or_skip`].
pub fn open_for_ranks_or_skip(what: &str, device: &str) -> Option<Arc<Context>> {
    // Ranks share other devices.
    if device == "cuda:0" {
        open_or_skip(what, "cuda:1")?;
    }
    open_or_skip(what, device)
}

/// The process's context of a device. Groups share it, because
/// compiling kernels again would take most of the time.
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

/// Whether the device is absent, as opposed to failing.
fn is_absent(error: &Error) -> bool {
    matches!(error, Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })
}

/// Says that `what` is not tested here, and why: a line on standard
/// error, past the capture that hides what passing tests print.
/// `cargo xtask test` gathers these lines.
pub fn skipped(what: &str, why: &str) {
    // A closed standard error is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "skipped: {what}: {why}");
}

#[cfg(test)]
mod tests {
    use qgemm_formats::Format;

    use super::*;

    #[test]
    fn days_for_all_turns_draw_every_format_for_every_group() {
        for (device, group) in
            [("emu:sm70", "exact"), ("emu:sm90", "exact"), ("wgpu:0", "exact"), ("wgpu:0", "configurations")]
        {
            let (days, turns) = (days_of_formats(device, group).expect("it draws"), group_turns(device));
            let variant = variant_number(device);
            for (format, place) in (0..days).flat_map(|format| (0..turns).map(move |place| (format, place))) {
                let mut of_format =
                    (20_780..20_780 + turns * days).filter(|day| (format + variant + day).is_multiple_of(days));
                let is_met = of_format.any(|day| is_drawn(place, variant, day / days, turns));
                assert!(is_met, "format {format} of group {place} on {device}");
            }
        }
    }

    #[test]
    fn so_many_days_draw_every_format_once() {
        let all: Vec<Format> = Format::all().collect();
        let mut seen = Vec::new();
        for day in 20_780..20_780 + EMULATED_DAYS {
            let (formats, left_out) = drawn(all.clone(), day, EMULATED_DAYS);
            assert_eq!(formats.len() + left_out.len(), all.len());
            assert!(formats.len() >= all.len() / EMULATED_DAYS as usize);
            seen.extend(formats);
        }
        assert_eq!(seen.len(), all.len());
        assert!(all.iter().all(|format| seen.contains(format)));
        let of = |device, group| selection(device, group).formats.len();
        assert_eq!(of("cpu", "experts_every_kernel"), all.len());
        assert!(of("wgpu:0", "exact") < all.len() && of("wgpu:0", "exact") >= all.len() / WGPU_DAYS as usize);
        assert!(
            of("wgpu:0", "experts_every_kernel") < of("wgpu:0", "exact")
                && of("emu:sm80", "exact") < of("wgpu:0", "exact")
        );
    }
}

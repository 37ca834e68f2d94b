//! Fuzzing of file readers. No mutated file may panic, hang, exceed the memory limit or
//! be accepted with wrong contents.
//!
//! `QGEMM_FUZZ` is the number of cases over all targets, `QGEMM_FUZZ_SEED` their seed:
//! `QGEMM_FUZZ=1000000 QGEMM_FUZZ_SEED=1 cargo test -p qgemm-testkit --test fuzz`.

use qgemm_testkit::fuzz::{CheckpointTarget, FuzzTarget, GgufTarget, PackedTarget, PlanTarget, TunedTarget, fuzz};

/// Cases over all targets, in CI.
const CASES: u64 = 20_000;

fn number(variable: &str, otherwise: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{variable}={text}: {error}")),
        Err(_) => otherwise,
    }
}

/// Runs a share of the cases, in percent.
fn check(target: &dyn FuzzTarget, share: u64) {
    let (cases, seed) = (number("QGEMM_FUZZ", CASES) * share / 100, number("QGEMM_FUZZ_SEED", 50));
    let outcome = fuzz(target, seed, 0..cases, |read| allocation_counter::measure(read).bytes_max);
    let found: Vec<String> =
        outcome.findings.iter().map(|f| format!("case {}: {}\n    {}", f.case, f.mutations, f.what)).collect();
    let (refused, accepted) = (outcome.refused, outcome.accepted);
    eprintln!("{}, seed {seed}: {cases} cases, {refused} refused, {accepted} accepted", target.name());
    assert!(found.is_empty(), "{}, seed {seed}: {} findings\n{}", target.name(), found.len(), found.join("\n"));
    // A fuzzer whose files are all refused tests little.
    assert!(accepted * 50 > cases, "{accepted} of {cases} accepted");
}

#[test]
fn checkpoints() {
    check(&CheckpointTarget::new(), 40);
}

#[test]
fn gguf() {
    check(&GgufTarget::new(), 15);
}

#[test]
fn packed_weights() {
    check(&PackedTarget::new().expect("the CPU is there"), 10);
}

#[test]
fn plans() {
    let folder = tempfile::tempdir().expect("writable");
    check(&PlanTarget::new(folder.path()).expect("the models are served"), 10);
}

#[test]
fn tuned_tables() {
    check(&TunedTarget::new().expect("the CPU is there"), 15);
}

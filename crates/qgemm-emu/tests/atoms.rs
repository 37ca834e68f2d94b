//! Atom probes on a GPU and in the emulator.
//!
//! `recorded/` has the results of an H200, from PTX of each probe's variant.
//! The emulator must match them on any machine. `QGEMM_RECORD=<folder>` makes a GPU
//! write its results there instead of comparing.

mod atom_probe;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};

use qgemm_cuda::CACHE_VARIABLE;
use qgemm_cuda::build::{self, BuildError};
use qgemm_emu::model::fit::{Recording, agreement};
use qgemm_emu::model::{COLLECTIVES, Class, Collective, NO_WORDS, Precision};
use qgemm_hal::{Device, HalError, Variant};

use atom_probe::{LANES, PROBES, Probe, fill, on_emulator, on_gpu, spec, sums_are_exact, target, variants};

/// Folder for the GPU's results.
const RECORD_VARIABLE: &str = "QGEMM_RECORD";
/// Recorded cases per warp and per warpgroup: eight and two of each fill.
const RECORDED_CASES: usize = 32;
const RECORDED_WARPGROUP_CASES: usize = 8;
/// Cases on a GPU.
const LIVE_CASES: usize = 1024;
/// Chip of the recordings.
const RECORDED_CHIP: Variant = Variant::Sm90;

#[test]
fn every_probe_compiles() {
    if let Err(why) = build::compiler() {
        return qgemm_testkit::skipped("every_probe_compiles", &why.to_string());
    }
    // A user's cache may be copied to a machine without this compiler.
    let temporary = tempfile::tempdir().expect("a folder");
    let named = env::var_os(CACHE_VARIABLE).map(PathBuf::from);
    let cache = named.as_deref().unwrap_or(temporary.path());
    for variant in variants() {
        match build::compile(cache, &spec(variant), target(variant)) {
            Ok(built) => assert!(built.artifact.target.is_ptx(), "{variant}"),
            Err(BuildError::Kernel(HalError::KernelUnavailable { why, .. })) => {
                qgemm_testkit::skipped(&format!("every_probe_compiles on {variant}"), &why);
            }
            Err(error) => panic!("{variant}: {error}"),
        }
    }
}

#[test]
fn the_emulator_gives_what_is_recorded() {
    if let Err(why) = qgemm_emu::devices() {
        return qgemm_testkit::skipped("the_emulator_gives_what_is_recorded", &why.to_string());
    }
    for probe in PROBES {
        let inputs = fill(probe, recorded_cases(probe));
        let emulated = on_emulator(probe, &inputs).unwrap_or_else(|e| panic!("{}: {e}", probe.name));
        // Emulated devices add like their own chip. The next test
        // covers the recorded chip.
        check(probe, "the emulator", &inputs, &emulated, &recorded(probe), float_mma(probe).is_some());
    }
}

#[test]
fn models_add_like_the_recorded_chip() {
    let precision = Precision::of(RECORDED_CHIP);
    for (probe, op) in PROBES.iter().filter_map(|p| Some((p, float_mma(p)?))) {
        let recordings = recordings(probe, &fill(probe, RECORDED_CASES), &recorded(probe));
        let agreement = agreement(op, &recordings, &precision);
        assert!(agreement.is_full(), "{}: {agreement:x?}", probe.name);
    }
}

#[test]
fn sums_that_are_called_exact_are_the_same_on_every_chip() {
    for (probe, op) in PROBES.iter().filter_map(|p| Some((p, float_mma(p)?))) {
        let inputs = fill(probe, RECORDED_CASES);
        let unknown = vec![0; RECORDED_CASES * LANES * probe.words_out];
        let cases = recordings(probe, &inputs, &unknown);
        for (case, Recording { inputs, .. }) in cases.iter().enumerate().filter(|(case, _)| sums_are_exact(*case)) {
            let mut wide = NO_WORDS;
            (op.run)(inputs, &mut wide, &Precision::WIDE);
            for variant in Variant::ALL.into_iter().filter(|&v| v >= probe.variant) {
                let mut chip = NO_WORDS;
                (op.run)(inputs, &mut chip, &Precision::of(variant));
                assert_eq!(chip, wide, "{} on {variant}, case {case}", probe.name);
            }
        }
    }
}

#[test]
fn a_gpu_gives_what_is_recorded() {
    let test = "a_gpu_gives_what_is_recorded";
    let Some(device) = gpu_or_skip(test) else { return };
    let record = env::var_os(RECORD_VARIABLE).map(PathBuf::from);
    for probe in PROBES {
        let inputs = fill(probe, recorded_cases(probe));
        match (on_gpu_or_skip(test, &*device, probe, &inputs), &record) {
            (Some(outputs), Some(folder)) => write_recording(folder, probe, &outputs),
            (None, Some(_)) => panic!("{} is not recorded", probe.name),
            (Some(outputs), None) => {
                let only_exact = float_mma(probe).is_some() && chip(&*device) != RECORDED_CHIP.number();
                check(probe, "the GPU", &inputs, &outputs, &recorded(probe), only_exact);
            }
            (None, None) => {}
        }
    }
}

#[test]
fn the_emulator_agrees_with_a_gpu() {
    let test = "the_emulator_agrees_with_a_gpu";
    let Some(device) = gpu_or_skip(test) else { return };
    if let Err(why) = qgemm_emu::devices() {
        return qgemm_testkit::skipped(test, &why.to_string());
    }
    for probe in PROBES {
        let inputs = fill(probe, LIVE_CASES);
        let Some(outputs) = on_gpu_or_skip(test, &*device, probe, &inputs) else { continue };
        let emulated = on_emulator(probe, &inputs).unwrap_or_else(|e| panic!("{}: {e}", probe.name));
        check(probe, "the emulator", &inputs, &emulated, &outputs, float_mma(probe).is_some());
        if let Some(op) = float_mma(probe)
            && chip(&*device) == RECORDED_CHIP.number()
        {
            let agreement = agreement(op, &recordings(probe, &inputs, &outputs), &Precision::of(RECORDED_CHIP));
            assert!(agreement.is_full(), "{}: {agreement:x?}", probe.name);
        }
    }
}

fn gpu_or_skip(test: &str) -> Option<Arc<dyn Device>> {
    match qgemm_cuda::open(0) {
        Ok(device) => Some(device),
        Err(why @ HalError::NoDevice { .. }) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Results of `probe`, unless the GPU is too old or there is no compiler.
fn on_gpu_or_skip(test: &str, device: &dyn Device, probe: &Probe, inputs: &[u32]) -> Option<Vec<u32>> {
    let is_chips_own = spec(probe.variant).arch_specific;
    let why = if chip(device) < probe.variant.number() || is_chips_own && chip(device) != probe.variant.number() {
        format!("the GPU is {}", device.info().arch)
    } else {
        match on_gpu(device, probe, inputs) {
            Ok(outputs) => return Some(outputs),
            Err(HalError::KernelUnavailable { why, .. }) => why,
            Err(other) => panic!("{}: {other}", probe.name),
        }
    };
    qgemm_testkit::skipped(&format!("{test}, {} of {}", probe.name, probe.variant), &why);
    None
}

/// Compute capability of the GPU, 10 × major + minor.
fn chip(device: &dyn Device) -> u32 {
    let arch = &device.info().arch;
    arch.strip_prefix("sm_").and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("{arch}"))
}

/// Matrix instruction of the probe, if it has f32 sums.
fn float_mma(probe: &Probe) -> Option<&'static Collective> {
    COLLECTIVES.iter().find(|op| op.name == probe.name && op.class == Class::FloatMma)
}

/// Cases of a matrix instruction in the form of the models.
fn recordings(probe: &Probe, inputs: &[u32], outputs: &[u32]) -> Vec<Recording> {
    let (words_in, words_out) = (probe.words_in(), probe.words_out);
    let cases = inputs.chunks_exact(LANES * words_in).zip(outputs.chunks_exact(LANES * words_out));
    cases
        .map(|(inputs, outputs)| {
            let mut recording = Recording { inputs: NO_WORDS, outputs: NO_WORDS };
            for (lane, words) in inputs.chunks_exact(words_in).enumerate() {
                recording.inputs[lane][..words_in].copy_from_slice(words);
            }
            for (lane, words) in outputs.chunks_exact(words_out).enumerate() {
                recording.outputs[lane][..words_out].copy_from_slice(words);
            }
            recording
        })
        .collect()
}

fn recorded_cases(probe: &Probe) -> usize {
    if probe.lanes() == LANES { RECORDED_CASES } else { RECORDED_WARPGROUP_CASES }
}

fn recording_name(probe: &Probe) -> String {
    format!("{}.bin", probe.name)
}

fn write_recording(folder: &Path, probe: &Probe, outputs: &[u32]) {
    let bytes: Vec<u8> = outputs.iter().flat_map(|word| word.to_le_bytes()).collect();
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(folder.join(recording_name(probe)), bytes))
        .expect("a recording");
}

/// Recorded results of the first cases.
fn recorded(probe: &Probe) -> Vec<u32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let path = folder.join(recording_name(probe));
    let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}; {RECORD_VARIABLE} makes it", path.display()));
    let words: Vec<_> = bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    assert_eq!(words.len(), recorded_cases(probe) * probe.lanes() * probe.words_out, "{}", path.display());
    words
}

/// Compares all lanes exactly, in all cases or only those with
/// exact sums on every chip.
fn check(probe: &Probe, who: &str, inputs: &[u32], got: &[u32], expected: &[u32], only_exact: bool) {
    assert_eq!(got.len(), expected.len(), "{}", probe.name);
    let (words_in, words_out) = (probe.words_in(), probe.words_out);
    let counts = |word: usize| !only_exact || sums_are_exact(word / words_out / probe.lanes());
    let wrong: Vec<_> = (0..got.len()).filter(|&word| counts(word) && got[word] != expected[word]).collect();
    let Some(&first) = wrong.first() else { return };
    let lane = first / words_out;
    panic!(
        "{}: {who} differs in {} of {} words, first in word {} of case {}, lane {}: {:#010x}, expected {:#010x}; \
         the lane's inputs: {:x?}",
        probe.name,
        wrong.len(),
        got.len(),
        first % words_out,
        lane / probe.lanes(),
        lane % probe.lanes(),
        got[first],
        expected[first],
        &inputs[lane * words_in..(lane + 1) * words_in],
    );
}

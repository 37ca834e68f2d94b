//! `qgemm run` and `qgemm bench MODEL` on the CPU.
//! Tests with a real model take SmolLM2 from
//! `QGEMM_TEST_LANGUAGE_MODEL`, which `cargo xtask test`
//! sets; without it, they are skipped.

mod support;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use qgemm_testkit::skipped;
use serde_json::Value;
use support::{model, qgemm, succeeds, text};

fn smollm2(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("QGEMM_TEST_LANGUAGE_MODEL").map(PathBuf::from).filter(|path| path.is_file());
    if path.is_none() {
        skipped(test, "QGEMM_TEST_LANGUAGE_MODEL names no file with SmolLM2; `cargo xtask test` sets it");
    }
    path
}

#[test]
fn a_text_is_continued() {
    let Some(path) = smollm2("a_text_is_continued") else { return };
    let arguments = ["run", text(&path), "The capital of France is", "--device", "cpu", "--tokens", "8"];
    let streamed = succeeds(&arguments);
    assert!(streamed.starts_with(" Paris"), "{streamed:?}");
    let json: Value = serde_json::from_str(&succeeds(&[&arguments[..], &["--json"]].concat())).expect("JSON");
    assert_eq!(json["text"].as_str().map(str::trim_end), Some(streamed.trim_end()));
    assert_eq!((&json["finish"], &json["architecture"]), (&"tokens".into(), &"llama".into()));
    assert_eq!((json["tokens"].as_array().map(Vec::len), json["prompt_tokens"].as_u64()), (Some(8), Some(5)));
    let probabilities = json["log_probabilities"].as_array().expect("numbers");
    assert!(probabilities.len() == 8 && probabilities.iter().all(|p| p.as_f64().is_some_and(|p| p <= 0.0)));
}

/// Three KV heads, of which one rank has two.
#[test]
fn two_ranks_continue_a_text_as_one_device() {
    let Some(path) = smollm2("two_ranks_continue_a_text_as_one_device") else { return };
    let base = ["run", text(&path), "The capital of France is", "--device", "cpu", "--tokens", "8", "--json"];
    let [one, two]: [Value; 2] = [&[][..], &["--tp", "2"]].map(|ranks| {
        let printed = succeeds(&[&base[..], ranks].concat());
        serde_json::from_str(&printed).expect("JSON")
    });
    assert_eq!((&two["tokens"], &two["text"]), (&one["tokens"], &one["text"]));
    assert_eq!((one["ranks"].as_u64(), two["ranks"].as_u64()), (Some(1), Some(2)));
    let rows = bench(&path, &["--pp", "8", "--tg", "2", "--tp", "2"]);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["ranks"] == 2), "{rows:?}");
    let output = qgemm(&[&base[..], &["--tp", "4"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("9 query heads of 3 KV heads"), "{errors}");
}

/// Processes that meet at a file: rank 0 prints, and sees when another dies.
#[test]
fn two_processes_continue_a_text_as_one_device() {
    let Some(path) = smollm2("two_processes_continue_a_text_as_one_device") else { return };
    let folder = tempfile::tempdir().expect("a writable folder");
    let start = |place: &Path, rank: &str, tokens: &str| {
        let ranks = ["--tp", "2", "--rank", rank, "--join", text(place), "--tokens", tokens];
        let base = ["run", text(&path), "The capital of France is", "--device", "cpu"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_qgemm"));
        command.args(base).args(ranks).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    let place = folder.path().join("both");
    let [first, second] = ["0", "1"].map(|rank| start(&place, rank, "8"));
    let [first, second] = [first, second].map(|rank| rank.wait_with_output().expect("it ends"));
    assert!(first.status.success() && second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
    let alone = succeeds(&["run", text(&path), "The capital of France is", "--device", "cpu", "--tokens", "8"]);
    assert_eq!((String::from_utf8_lossy(&first.stdout).into_owned(), second.stdout), (alone, Vec::new()));

    let place = folder.path().join("dying");
    let (mut first, mut second) = (start(&place, "0", "2000"), start(&place, "1", "2000"));
    // Text comes when both are at work.
    first.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("text");
    second.kill().expect("it runs");
    second.wait().expect("it ends");
    let first = first.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&first.stderr);
    assert!(!first.status.success() && errors.contains("rank 1 is gone"), "{errors}");
}

#[test]
fn an_incomplete_model_is_refused_by_what_is_missing() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = model(folder.path());
    let output = qgemm(&["run", text(&path), "Hello", "--device", "cpu"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("`tokenizer.ggml.tokens`"), "{errors}");
}

/// Rows of `bench`, at one repetition.
fn bench(path: &Path, options: &[&str]) -> Vec<Value> {
    let base = ["bench", text(path), "--device", "cpu", "--repetitions", "1", "--json"];
    let printed = succeeds(&[&base[..], options].concat());
    serde_json::from_str(&printed).expect("a list")
}

#[test]
fn a_model_is_benchmarked() {
    let Some(path) = smollm2("a_model_is_benchmarked") else { return };
    let rows = bench(&path, &["--pp", "16", "--tg", "4", "--depth", "0,16", "--sessions", "1,3"]);
    let of =
        |row: &Value| (row["test"].as_str().expect("text").to_owned(), row["sessions"].as_u64().expect("a number"));
    let expected = [("pp16", 1), ("pp16 @ d16", 1), ("tg4", 1), ("tg4", 3), ("tg4 @ d16", 1), ("tg4 @ d16", 3)];
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected.map(|(test, sessions)| (test.to_owned(), sessions)));
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        let tokens = number("tokens") * number("sessions");
        let rate = tokens / (number("milliseconds") / 1e3);
        assert!((number("tokens_per_second") / rate - 1.0).abs() < 1e-6, "{row}");
        let is_decode = row["test"].as_str().is_some_and(|test| test.starts_with("tg"));
        assert_eq!(row["bandwidth_share"].as_f64().is_some_and(|share| share > 0.0), is_decode, "{row}");
    }
    // 30 layers, 3 heads of 64 features in f16. Keys of four
    // steps are 2.5 on average, behind 16 tokens 18.5.
    let (token, bytes) = (30.0 * 3.0 * 64.0 * 2.0 * 2.0, |row: usize| rows[row]["step_bytes"].as_f64().expect("bytes"));
    assert_eq!(bytes(3) - bytes(2), 2.0 * 2.5 * token);
    assert_eq!(bytes(4) - bytes(2), 16.0 * token);
    let weights = bytes(2) - 2.5 * token;
    assert!((80e6..100e6).contains(&weights), "{weights}");
    let q8_0 = bench(&path, &["--pp", "0", "--tg", "4", "--kv-format", "q8_0"]);
    assert_eq!(q8_0[0]["step_bytes"].as_f64(), Some(weights + 2.5 * token * 34.0 / 64.0));
    let printed = succeeds(&["bench", text(&path), "--device", "cpu", "--pp", "0", "--tg", "1", "--repetitions", "1"]);
    assert!(printed.contains("tg1 ") && printed.contains("of read"), "{printed}");
}

#[test]
fn a_test_that_does_not_fit_the_model_is_refused() {
    let Some(path) = smollm2("a_test_that_does_not_fit_the_model_is_refused") else { return };
    for (options, part) in [
        (["--depth", "8192"], "expected at most 8192 tokens"),
        (["--depth", "1000"], "a multiple of 512"),
        (["--sessions", "0"], "expected 1 to 4096 sessions"),
        (["--repetitions", "0"], "at least one repetition"),
    ] {
        let output = qgemm(&[&["bench", text(&path), "--device", "cpu"][..], &options].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(part), "{options:?}: {errors}");
    }
}

#[test]
fn products_of_a_model_are_benchmarked_with_an_operation() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = model(folder.path());
    let products = ["bench", text(&path), "--device", "cpu", "--op", "gemm", "--shape", "1x1x1", "--json"];
    let rows: Vec<Value> = serde_json::from_str(&succeeds(&products)).expect("a list");
    assert!(rows.iter().any(|row| row["shape"] == "1x96x64"), "{rows:?}");
    for (options, part) in [
        (&["--shape", "1x1x1"][..], "`--op gemm`"),
        (&["--format", "q4_0"], "`--op gemm`"),
        (&["--op", "gemm", "--depth", "1"], "no `--op`"),
        (&["--op", "norm"], "does not take a model"),
    ] {
        let output = qgemm(&[&["bench", text(&path), "--device", "cpu"][..], options].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(part), "{options:?}: {errors}");
    }
}

//! `qgemm run` on the CPU. Tests with a real model take SmolLM2 from `QGEMM_TEST_LANGUAGE_MODEL`, which
//! `cargo xtask test` sets; without it, they are skipped.

mod support;

use std::path::PathBuf;

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

#[test]
fn an_incomplete_model_is_refused_by_what_is_missing() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = model(folder.path());
    let output = qgemm(&["run", text(&path), "Hello", "--device", "cpu"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("the model does not state `llama."), "{errors}");
}

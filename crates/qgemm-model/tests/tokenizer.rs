//! Tokenizers beside llama.cpp's, token by token. The golden
//! file's first line says how it was made.

use std::path::{Path, PathBuf};

use qgemm_api::open_model;
use qgemm_model::Tokenizer;
use qgemm_testkit::skipped;

/// Strings with the tokens that llama.cpp gives them.
const SMOLLM2: &str = include_str!("data/smollm2_tokens.jsonl");

/// Strings of a golden file whose tokens differ, described.
fn differences(tokenizer: &Tokenizer, golden: &str) -> (usize, Vec<String>) {
    let lines = golden.lines().skip(1);
    let cases: Vec<(String, Vec<u32>)> = lines.map(|line| serde_json::from_str(line).expect("text and ids")).collect();
    let difference = |(text, expected): &(String, Vec<u32>)| {
        let got = tokenizer.encode(text).expect("encoded");
        (got != *expected).then(|| format!("{text:?}: expected {expected:?}, got {got:?}"))
    };
    (cases.len(), cases.iter().filter_map(difference).collect())
}

fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::open(&open_model(path).expect("a model"), path).expect("a tokenizer")
}

#[test]
fn tokens_of_smollm2_are_those_of_llama_cpp() {
    let path = std::env::var_os("QGEMM_TEST_LANGUAGE_MODEL").map(PathBuf::from).filter(|path| path.is_file());
    let Some(path) = path else {
        skipped(
            "tokens_of_smollm2_are_those_of_llama_cpp",
            "QGEMM_TEST_LANGUAGE_MODEL names no file with SmolLM2; `cargo xtask test` sets it",
        );
        return;
    };
    let (strings, differences) = differences(&tokenizer(&path), SMOLLM2);
    assert_eq!(strings, 1000);
    assert!(differences.is_empty(), "{} strings differ:\n{}", differences.len(), differences.join("\n"));
}

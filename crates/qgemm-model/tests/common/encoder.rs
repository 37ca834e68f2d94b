//! Small random BERT encoders as GGUF files and as safetensors
//! checkpoints, and their forward pass in f64.

use std::fs;
use std::path::{Path, PathBuf};

use qgemm_api::gguf::{GgufArray, GgufHeader, GgufScalar, GgufValue};
use qgemm_api::quantize;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use super::checkpoint::{Tensor, bytes, write_checkpoint};

pub const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 96;
const HEADS: usize = 4;
const LAYERS: usize = 2;
pub const POSITIONS: usize = 24;
const EPS: f64 = 1e-12;
/// Special tokens, words, and pieces within words.
const VOCABULARY: [&str; 18] = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "cat", "dog", "sat", "run", "on", "mat", ".", ",", "##s",
    "##ning", "##n",
];

/// Names in GGUF, and behind `encoder.layer.N.` or at the beginning in safetensors.
const NAMES: [(&str, &str); 12] = [
    ("token_embd_norm.", "embeddings.LayerNorm."),
    ("token_embd.", "embeddings.word_embeddings."),
    ("position_embd.", "embeddings.position_embeddings."),
    ("token_types.", "embeddings.token_type_embeddings."),
    ("blk.", "encoder.layer."),
    ("attn_q.", "attention.self.query."),
    ("attn_k.", "attention.self.key."),
    ("attn_v.", "attention.self.value."),
    ("attn_output_norm.", "attention.output.LayerNorm."),
    ("attn_output.", "attention.output.dense."),
    ("layer_output_norm.", "output.LayerNorm."),
    ("ffn_up.", "intermediate.dense."),
];

/// Random tensors, by their names in GGUF.
fn tensors() -> Vec<Tensor> {
    let mut rng = StdRng::seed_from_u64(5);
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], center: f32, width: f32| {
        let values = (0..shape.iter().product()).map(|_| center + rng.random_range(-width..width)).collect();
        all.push(Tensor { name, shape: shape.to_vec(), values });
    };
    add("token_embd.weight".into(), &[VOCABULARY.len(), HIDDEN], 0.0, 1.0);
    add("position_embd.weight".into(), &[POSITIONS, HIDDEN], 0.0, 0.5);
    add("token_types.weight".into(), &[2, HIDDEN], 0.0, 0.5);
    let layers = (0..LAYERS).map(|layer| format!("blk.{layer}."));
    for prefix in layers {
        for (part, n, k) in [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", HIDDEN, HIDDEN),
            ("attn_v", HIDDEN, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ] {
            add(format!("{prefix}{part}.weight"), &[n, k], 0.0, 0.3);
            add(format!("{prefix}{part}.bias"), &[n], 0.0, 0.3);
        }
        for part in ["attn_output_norm", "layer_output_norm"] {
            add(format!("{prefix}{part}.weight"), &[HIDDEN], 1.0, 0.5);
            add(format!("{prefix}{part}.bias"), &[HIDDEN], 0.0, 0.5);
        }
    }
    add("token_embd_norm.weight".into(), &[HIDDEN], 1.0, 0.5);
    add("token_embd_norm.bias".into(), &[HIDDEN], 0.0, 0.5);
    all
}

/// Writes the model as GGUF. `pooling` is llama.cpp's number.
pub fn write_gguf(folder: &Path, pooling: u32) -> PathBuf {
    let path = folder.join("encoder.gguf");
    let mut header = GgufHeader::new();
    let mut add = |key: &str, value: GgufValue| header.metadata(key, value).expect("a new key");
    add("general.architecture", "bert".into());
    for (key, value) in [
        ("block_count", LAYERS as u32),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", INTERMEDIATE as u32),
        ("attention.head_count", HEADS as u32),
        ("context_length", POSITIONS as u32),
        ("pooling_type", pooling),
    ] {
        add(&format!("bert.{key}"), value.into());
    }
    add("bert.attention.layer_norm_epsilon", GgufScalar::F32(EPS as f32).into());
    add("tokenizer.ggml.model", "bert".into());
    let phantom = |token: &&str| match token.strip_prefix("##") {
        Some(piece) => piece.to_owned(),
        None if token.starts_with('[') => (*token).to_owned(),
        None => format!("▁{token}"),
    };
    let tokens: Vec<String> = VOCABULARY.iter().map(phantom).collect();
    let types: Vec<u8> =
        VOCABULARY.iter().flat_map(|token| if token.starts_with('[') { 3u32 } else { 1 }.to_le_bytes()).collect();
    add("tokenizer.ggml.tokens", GgufValue::Array(GgufArray::Strings(tokens)));
    add("tokenizer.ggml.token_type", GgufValue::Array(GgufArray::Scalars { kind: 4, bytes: types.into() }));
    for (key, id) in [("unknown_token_id", 1u32), ("cls_token_id", 2), ("seperator_token_id", 3)] {
        add(&format!("tokenizer.ggml.{key}"), id.into());
    }
    let (all, format) = (tensors(), "f32".parse().expect("a format"));
    for tensor in &all {
        header.tensor(&tensor.name, &tensor.shape, format).expect("it fits");
    }
    let mut writer = header.write(fs::File::create(&path).expect("writable")).expect("writable");
    for tensor in &all {
        match tensor.shape[..] {
            [n, k] => {
                let (weight, _) = quantize(&tensor.values, n, k, format).expect("K suits");
                writer.tensor(weight.blocks()).expect("the right size");
            }
            _ => writer.tensor(&bytes(&tensor.values)).expect("the right size"),
        }
    }
    writer.finish().expect("complete");
    path
}

/// Writes the model as a folder of `sentence-transformers`.
/// Names begin with `prefix`.
pub fn write_safetensors(folder: &Path, prefix: &str, pooling: &str) {
    let mut all = tensors();
    for tensor in &mut all {
        let name = NAMES.iter().fold(tensor.name.clone(), |name, (from, to)| name.replace(from, to));
        tensor.name = format!("{prefix}{}", name.replace("ffn_down.", "output.dense."));
    }
    all.push(Tensor { name: format!("{prefix}pooler.dense.bias"), shape: vec![HIDDEN], values: vec![0.0; HIDDEN] });
    write_checkpoint(folder, all);
    let config = json!({
        "model_type": "bert", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS, "layer_norm_eps": EPS, "max_position_embeddings": POSITIONS, "hidden_act": "gelu",
        "position_embedding_type": "absolute",
    });
    fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    fs::create_dir_all(folder.join("1_Pooling")).expect("writable");
    let pooling = json!({ "word_embedding_dimension": HIDDEN, format!("pooling_mode_{pooling}"): true });
    fs::write(folder.join("1_Pooling/config.json"), pooling.to_string()).expect("writable");
    fs::write(folder.join("tokenizer.json"), tokenizer_json().to_string()).expect("writable");
}

fn tokenizer_json() -> serde_json::Value {
    let ids: serde_json::Map<_, _> =
        VOCABULARY.iter().map(|token| (*token).to_owned()).zip((0..).map(|id: u32| id.into())).collect();
    let special = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let entry = |id: usize| json!({ "id": VOCABULARY[id], "ids": [id], "tokens": [VOCABULARY[id]] });
    json!({
        "version": "1.0",
        // Files of sentence encoders state both; neither fits texts
        // without padding.
        "truncation": { "max_length": 4, "strategy": "LongestFirst", "stride": 0 },
        "padding": {
            "strategy": { "Fixed": 16 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "[PAD]",
        },
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": true,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special("[CLS]"), { "Sequence": { "id": "A", "type_id": 0 } }, special("[SEP]")],
            "pair": [special("[CLS]"), { "Sequence": { "id": "A", "type_id": 0 } }, special("[SEP]")],
            "special_tokens": { "[CLS]": entry(2), "[SEP]": entry(3) },
        },
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "vocab": ids, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    })
}

/// Rows of features, one for each token.
type Rows = Vec<Vec<f64>>;

/// Rows of a text behind the last layer.
pub fn rows(ids: &[u32]) -> Rows {
    let all = tensors();
    let values = |name: &str| -> Vec<f64> {
        let tensor = all.iter().find(|tensor| tensor.name == name).expect("a tensor");
        tensor.values.iter().map(|&v| f64::from(v)).collect()
    };
    let norm = |name: &str, x: Rows| -> Rows {
        let (gamma, beta) = (values(&format!("{name}.weight")), values(&format!("{name}.bias")));
        let row = |x: Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let parameters = gamma.iter().zip(&beta);
            x.iter().zip(parameters).map(|(v, (g, b))| (v - mean) / (variance + EPS).sqrt() * g + b).collect()
        };
        x.into_iter().map(row).collect()
    };
    let linear = |name: &str, x: &Rows| -> Rows {
        let (weight, bias) = (values(&format!("{name}.weight")), values(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| weight.chunks_exact(x.len()).zip(&bias).map(|(w, b)| dot(w, x) + b).collect();
        x.iter().map(row).collect()
    };
    let (words, positions, segments) =
        (values("token_embd.weight"), values("position_embd.weight"), values("token_types.weight"));
    let embedding = |(position, &id): (usize, &u32)| {
        let of = |i: usize| words[id as usize * HIDDEN + i] + positions[position * HIDDEN + i] + segments[i];
        (0..HIDDEN).map(of).collect()
    };
    let mut x = norm("token_embd_norm", ids.iter().enumerate().map(embedding).collect());
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let [q, k, v] = ["attn_q", "attn_k", "attn_v"].map(|part| linear(&name(part), &x));
        let output = linear(&name("attn_output"), &attention(&q, &k, &v));
        x = norm(&name("attn_output_norm"), sum(&x, &output));
        let mut up = linear(&name("ffn_up"), &x);
        up.iter_mut().flatten().for_each(|v| *v *= 0.5 * (1.0 + libm::erf(*v * std::f64::consts::FRAC_1_SQRT_2)));
        x = norm(&name("layer_output_norm"), sum(&x, &linear(&name("ffn_down"), &up)));
    }
    x
}

fn attention(q: &Rows, k: &Rows, v: &Rows) -> Rows {
    let width = HIDDEN / HEADS;
    let head = |row: &[f64], head: usize| row[head * width..][..width].to_vec();
    let of_token = |q: &Vec<f64>| {
        let of_head = |h: usize| {
            let weights: Vec<f64> =
                k.iter().map(|k| (dot(&head(q, h), &head(k, h)) / (width as f64).sqrt()).exp()).collect();
            let total: f64 = weights.iter().sum();
            let value = |i: usize| v.iter().zip(&weights).map(|(v, w)| v[h * width + i] * w / total).sum();
            (0..width).map(value).collect::<Vec<f64>>()
        };
        (0..HEADS).flat_map(of_head).collect()
    };
    q.iter().map(of_token).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sum(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

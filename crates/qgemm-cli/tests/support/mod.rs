//! Common parts of the command tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use qgemm_api::gguf::{GgufHeader, GgufScalar};
use qgemm_api::quantize;

pub fn qgemm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_qgemm")).args(arguments).output().expect("the command starts")
}

pub fn succeeds(arguments: &[&str]) -> String {
    let output = qgemm(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Llama model of one layer.
pub fn model(folder: &Path) -> PathBuf {
    let (hidden, inner) = (64, 96);
    let shapes = [
        ("token_embd", 80, hidden),
        ("blk.0.attn_q", hidden, hidden),
        ("blk.0.attn_k", 32, hidden),
        ("blk.0.attn_v", 32, hidden),
        ("blk.0.attn_output", hidden, hidden),
        ("blk.0.ffn_gate", inner, hidden),
        ("blk.0.ffn_up", inner, hidden),
        ("blk.0.ffn_down", hidden, inner),
    ];
    let path = folder.join("model.gguf");
    let format = "q8_0".parse().expect("a format");
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", "llama".into()).expect("a new key");
    let sizes = [
        ("block_count", 1),
        ("embedding_length", hidden),
        ("feed_forward_length", inner),
        ("context_length", 4096),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    for (name, size) in sizes {
        header.metadata(&format!("llama.{name}"), (size as u32).into()).expect("a new key");
    }
    header.metadata("llama.attention.layer_norm_rms_epsilon", GgufScalar::F32(1e-5).into()).expect("a new key");
    for (name, n, k) in shapes {
        header.tensor(&format!("{name}.weight"), &[n, k], format).expect("it fits");
    }
    let (norms, plain) = (["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"], "f32".parse().expect("a format"));
    for name in norms {
        header.tensor(&format!("{name}.weight"), &[hidden], plain).expect("it fits");
    }
    let mut writer = header.write(fs::File::create(&path).expect("writable")).expect("writable");
    for (_, n, k) in shapes {
        let (weight, _) = quantize(&vec![0.5; n * k], n, k, format).expect("K suits");
        writer.tensor(weight.blocks()).expect("the right size");
    }
    for _ in norms {
        writer.tensor(&1.0f32.to_le_bytes().repeat(hidden)).expect("the right size");
    }
    writer.finish().expect("complete");
    path
}

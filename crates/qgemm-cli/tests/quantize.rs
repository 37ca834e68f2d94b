//! `qgemm quantize` as users of llama.cpp know it: recipes, importance
//! matrices, quantized inputs, interrupted runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use qgemm_api::gguf::{GgufHeader, GgufValue};
use qgemm_api::{Format, HostWeight, Model, open_model, quantize_by_importance, quantize_matrix};
use serde_json::Value;

mod support;
use support::{model, qgemm, succeeds, text};

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7371).sin() * 0.8 + (i as f32 * 0.0113).cos() * 0.2).collect()
}

fn format(name: &str) -> Format {
    name.parse().expect("a format")
}

/// Model of two layers in f32. Its down projections are stacks of
/// three matrices.
fn plain(folder: &Path) -> PathBuf {
    let path = folder.join("plain.gguf");
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", "llama".into()).expect("a new key");
    header.metadata("general.file_type", 0u32.into()).expect("a new key");
    for (key, number) in [("block_count", 2u32), ("attention.head_count", 8), ("attention.head_count_kv", 2)] {
        header.metadata(&format!("llama.{key}"), number.into()).expect("a new key");
    }
    let tensors: [(&str, &[usize]); 6] = [
        ("token_embd.weight", &[8, 256]),
        ("output.weight", &[8, 256]),
        ("blk.1.attn_v.weight", &[8, 256]),
        ("blk.0.attn_v.weight", &[8, 256]),
        ("blk.0.ffn_down_exps.weight", &[3, 4, 256]),
        ("blk.0.attn_norm.weight", &[256]),
    ];
    for (name, shape) in &tensors {
        header.tensor(name, shape, format("f32")).expect("fits");
    }
    let mut writer = header.write(Vec::new()).expect("memory");
    for (_, shape) in tensors {
        let bytes: Vec<u8> = values(shape.iter().product()).iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.tensor(&bytes).expect("fits");
    }
    fs::write(&path, writer.finish().expect("complete")).expect("written");
    path
}

/// Importance matrix in the older format. Calls divide its sums by two.
fn importance(path: &Path, entries: &[(&str, Vec<f32>)]) {
    let mut file = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, sums) in entries {
        file.extend((name.len() as i32).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend(2i32.to_le_bytes());
        file.extend((sums.len() as i32).to_le_bytes());
        file.extend(sums.iter().flat_map(|sum| sum.to_le_bytes()));
    }
    file.extend(9i32.to_le_bytes());
    file.extend(5i32.to_le_bytes());
    file.extend(b"a.txt");
    fs::write(path, file).expect("written");
}

fn refused(arguments: &[&str]) -> String {
    let output = qgemm(arguments);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !errors.contains("panicked"), "{arguments:?}: {errors}");
    errors
}

fn formats(model: &Model) -> Vec<(&str, String)> {
    let kind = |info: &qgemm_api::TensorInfo| info.type_name.to_lowercase();
    model.tensors().iter().map(|info| (info.name.as_str(), kind(info))).collect()
}

fn number(model: &Model, key: &str) -> Option<u64> {
    model.metadata_value(key).and_then(GgufValue::as_u64)
}

#[test]
fn recipes_are_those_of_llama_cpp() {
    let folder = tempfile::tempdir().expect("writable");
    let (input, output) = (plain(folder.path()), folder.path().join("out.gguf"));
    let quantize = ["quantize", text(&input), text(&output), "--force"];
    let run = |more: &[&str]| {
        succeeds(&[&quantize, more].concat());
        open_model(&output).expect("a model")
    };
    let written = run(&["q4_k_m"]);
    let expected = [
        ("output.weight", "q6_k"),
        ("token_embd.weight", "q4_k"),
        ("blk.0.attn_norm.weight", "f32"),
        ("blk.0.attn_v.weight", "q4_k"),
        ("blk.0.ffn_down_exps.weight", "q4_k"),
        ("blk.1.attn_v.weight", "q6_k"),
    ];
    let expected = expected.map(|(name, format)| (name, format.to_owned()));
    assert_eq!(formats(&written), expected);
    assert_eq!(number(&written, "general.file_type"), Some(15));
    let keys: Vec<&str> = written.metadata().iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys[keys.len() - 2..], ["general.quantization_version", "general.file_type"]);

    let pure = run(&["Q4_K_M", "--pure", "--tensor-type", "Blk\\.[0-9]\\.attn=q8_0"]);
    let of = |model: &Model, name: &str| model.info(name).expect("there").type_name.to_lowercase();
    assert_eq!([of(&pure, "output"), of(&pure, "blk.0.attn_v")], ["q4_k", "q8_0"]);
    let options = ["--output-tensor-type", "q5_k", "--token-embedding-type", "f16"];
    let chosen = run(&[&["Q4_0"][..], &options].concat());
    assert_eq!([of(&chosen, "output"), of(&chosen, "token_embd")], ["q5_k", "f16"]);
    assert_eq!(of(&run(&["Q8_0", "--leave-output-tensor"]), "output"), "f32");

    for (more, why) in [
        (&["q4_km"][..], "Q4_K_M"),
        (&[], "--format"),
        (&["Q2_K_S"], "--imatrix"),
        (&["Q4_0", "--format", "q8_0"], "cannot be used with"),
        (&["Q4_0", "--tensor-type", "nothing=q8_0"], "`nothing` is found in no"),
        (&["Q4_0", "--tensor-type", "(=q8_0"], "unclosed group"),
        (&["Q4_0", "--tensor-type", "attn=nvfp4"], "GGUF does not have nvfp4"),
    ] {
        let errors = refused(&[&quantize, more].concat());
        assert!(errors.contains(why), "{more:?}: {errors}");
    }
}

#[test]
fn importances_weigh_columns_of_each_matrix() {
    let folder = tempfile::tempdir().expect("writable");
    let (input, output, file) =
        (plain(folder.path()), folder.path().join("out.gguf"), folder.path().join("importance.dat"));
    let sums: Vec<f32> = (0..3 * 256).map(|i| ((i * 37 % 101) as f32).powi(2)).collect();
    let stack = "blk.0.ffn_down_exps.weight";
    importance(&file, &[(stack, sums.clone()), ("blk.0.attn_v.weight", sums[..256].to_vec())]);
    let quantize = ["quantize", text(&input), text(&output), "--imatrix", text(&file), "--force"];
    let table: Value =
        serde_json::from_str(&succeeds(&[&quantize[..], &["Q4_K_S", "--json"]].concat())).expect("a table");
    let note = |name: &str| {
        table.as_array().expect("rows").iter().find(|row| row["name"] == name).expect("there")["note"].clone()
    };
    assert_eq!([note(stack), note("output.weight")], [Value::Null, "no importances".into()]);
    let written = open_model(&output).expect("a model");
    let halves: Vec<f32> = sums.iter().map(|sum| sum / 2.0).collect();
    for matrix in 0..3 {
        let of_stack = |values: &[f32]| values[matrix * 1024..][..1024].to_vec();
        let got = written.stacked_weight(stack, matrix).expect("there");
        let by = |importance: &[f32]| {
            let values = of_stack(&values(3 * 1024));
            quantize_by_importance(&values, 4, 256, got.format(), importance).expect("valid").weight
        };
        assert_eq!(got.blocks(), by(&halves[matrix * 256..][..256]).blocks(), "matrix {matrix}");
        assert_ne!(got.blocks(), by(&[1.0; 256]).blocks());
    }
    let keys = ["quantize.imatrix.entries_count", "quantize.imatrix.chunks_count", "general.file_type"];
    assert_eq!(keys.map(|key| number(&written, key)), [Some(2), Some(9), Some(14)]);
    assert_eq!(written.metadata_value("quantize.imatrix.dataset").and_then(GgufValue::as_str), Some("a.txt"));
    // A second run replaces what the first stated.
    let again = folder.path().join("again.gguf");
    succeeds(&["quantize", text(&output), text(&again), "--imatrix", text(&file), "Q8_0", "--allow-requantize"]);

    let cases = [
        ((stack, sums[..256].to_vec()), "expected 768 importances (K for each matrix), got 256"),
        (("blk.0.attn_v.weight", vec![-1.0; 256]), "finite numbers, 0 or more"),
        (("other.weight", vec![1.0; 256]), "none of its entries"),
    ];
    for (entry, why) in cases {
        importance(&file, &[entry]);
        let errors = refused(&[&quantize[..], &["Q4_K_S"]].concat());
        assert!(errors.contains(why), "{errors}");
    }
    for bytes in [&b""[..], &[1, 0, 0, 0, 255, 255, 255, 127], b"GGUF\x03\0\0\0"] {
        fs::write(&file, bytes).expect("written");
        assert!(refused(&[&quantize[..], &["Q4_K_S"]].concat()).contains("importance.dat"));
    }
}

#[test]
fn quantized_weights_are_quantized_again_on_request() {
    let folder = tempfile::tempdir().expect("writable");
    let (input, output) = (model(folder.path()), folder.path().join("out.gguf"));
    let quantize = ["quantize", text(&input), text(&output), "--force"];
    let errors = refused(&[&quantize[..], &["Q4_0"]].concat());
    assert!(errors.contains("blk.0.attn_k.weight") && errors.contains("--allow-requantize"), "{errors}");
    succeeds(&[&quantize[..], &["Q4_0", "--allow-requantize"]].concat());
    let [before, after] = [&input, &output].map(|path| open_model(path).expect("a model"));
    // Tensors that have their format already are copied.
    assert_eq!(after.blocks("token_embd").expect("there")[..], before.blocks("token_embd").expect("there")[..]);
    let weight = before.weight("blk.0.ffn_up").expect("there");
    let expected = weight.to_format(format("q4_0")).expect("valid").weight;
    assert_eq!(after.blocks("blk.0.ffn_up").expect("there")[..], *expected.blocks());
    succeeds(&[&quantize[..], &["Q8_0"]].concat());
}

/// Safetensors file of an FP8 layer with a scale a row, and a norm.
fn fp8(folder: &Path) -> (PathBuf, HostWeight) {
    let weight = quantize_matrix(&values(4 * 256), 4, 256, format("fp8_e4m3")).expect("valid").weight;
    let scales: Vec<u8> = weight.row_scale().expect("rows").iter().flat_map(|v| v.to_le_bytes()).collect();
    let codes = weight.blocks();
    let header = serde_json::json!({
        "model.layers.0.self_attn.v_proj.weight": {"dtype": "F8_E4M3", "shape": [4, 256], "data_offsets": [0, 1024]},
        "model.layers.0.self_attn.v_proj.weight_scale": {"dtype": "F32", "shape": [4, 1], "data_offsets": [1024, 1040]},
    });
    let header = header.to_string();
    let path = folder.join("model.safetensors");
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), codes, &scales].concat();
    fs::write(&path, file).expect("written");
    let config = r#"{"model_type": "llama", "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2,
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0":
        {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}}"#;
    fs::write(folder.join("config.json"), config).expect("written");
    (path, weight)
}

#[test]
fn quantized_checkpoints_become_gguf() {
    let folder = tempfile::tempdir().expect("writable");
    let (input, weight) = fp8(folder.path());
    let output = folder.path().join("out.gguf");
    let quantize = ["quantize", text(&input), text(&output), "Q4_K_S"];
    assert!(refused(&quantize).contains("--allow-requantize"));
    succeeds(&[&quantize[..], &["--allow-requantize"]].concat());
    // The first value projections have more bits.
    let expected = weight.to_format(format("q5_k")).expect("valid").weight;
    let written = open_model(&output).expect("a model");
    assert_eq!(written.blocks("model.layers.0.self_attn.v_proj").expect("there")[..], *expected.blocks());
}

/// Llama of one layer in f32, as `transformers` stores it. Weights are
/// numbered.
fn checkpoint(folder: &Path) -> PathBuf {
    let (hidden, kv, inner) = (64, 32, 96);
    let layer = |part: &str| format!("model.layers.0.{part}.weight");
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![80, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer("input_layernorm"), vec![hidden]),
        (layer("post_attention_layernorm"), vec![hidden]),
        (layer("self_attn.q_proj"), vec![hidden, hidden]),
        (layer("self_attn.k_proj"), vec![kv, hidden]),
        (layer("self_attn.v_proj"), vec![kv, hidden]),
        (layer("self_attn.o_proj"), vec![hidden, hidden]),
        (layer("mlp.gate_proj"), vec![inner, hidden]),
        (layer("mlp.up_proj"), vec![inner, hidden]),
        (layer("mlp.down_proj"), vec![hidden, inner]),
    ];
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let (begin, count) = (data.len(), shape.iter().product());
        data.extend((0..count).flat_map(|i: usize| (i as f32).to_le_bytes()));
        let info = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name, info);
    }
    let header = Value::Object(header).to_string();
    let path = folder.join("model.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).expect("written");
    let config = serde_json::json!({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": hidden, "intermediate_size": inner, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}});
    fs::write(folder.join("config.json"), config.to_string()).expect("written");
    path
}

#[test]
fn checkpoints_get_the_names_of_llama_cpp() {
    let folder = tempfile::tempdir().expect("writable");
    let (input, output) = (checkpoint(folder.path()), folder.path().join("out.gguf"));
    succeeds(&["quantize", text(&input), text(&output), "F32", "--convert"]);
    let written = open_model(&output).expect("a model");
    let [before, after] = [(open_model(&input).expect("a model"), &input), (written.clone(), &output)]
        .map(|(model, path)| qgemm_api::Network::read(&model, path).expect("llama"));
    assert!(before.hyperparameters().is_some());
    assert_eq!(before.hyperparameters(), after.hyperparameters());
    let row = |name: &str, row: usize| written.dense(name).expect("there").to_f32()[row * 64];
    // Neighbours were half a head of 16 rows apart.
    let rows = [0, 1, 2, 15, 16, 17].map(|at| row("blk.0.attn_q", at) / 64.0);
    assert_eq!(rows, [0.0, 8.0, 1.0, 15.0, 16.0, 24.0]);
    assert_eq!([row("blk.0.attn_k", 17), row("blk.0.attn_v", 17)].map(|value| value / 64.0), [24.0, 17.0]);
    let factors = written.dense("rope_freqs").expect("there").to_f32();
    assert_eq!((factors.len(), factors[0], factors[7]), (8, 1.0, 8.0));
    assert!(factors.is_sorted());
    succeeds(&["quantize", text(&input), text(&output), "Q4_K_M", "--convert", "--force"]);
    let errors = refused(&["quantize", text(&output), text(&folder.path().join("b.gguf")), "F16", "--convert"]);
    assert!(errors.contains("a GGUF file is not converted"), "{errors}");
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_run_is_continued() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    let (input, whole, output) = (plain(folder.path()), path("whole.gguf"), path("out.gguf"));
    succeeds(&["quantize", text(&input), text(&whole), "Q4_K_M"]);
    let quantize = ["quantize", text(&input), text(&output), "Q4_K_M", "--resume"];
    // Printing the first row fails, after its tensor is written.
    let full = File::create("/dev/full").expect("Linux has it");
    let interrupted = Command::new(env!("CARGO_BIN_EXE_qgemm")).args(quantize).stdout(full).status();
    assert!(!interrupted.expect("the command starts").success() && !output.exists());
    let journal = fs::read_to_string(path("out.gguf.journal")).expect("kept");
    assert_eq!(journal.lines().count(), 2, "{journal}");

    let other = refused(&["quantize", text(&input), text(&output), "Q5_K_M", "--resume"]);
    assert!(other.contains("other settings") && other.contains("out.gguf.journal"), "{other}");
    let partial = fs::read(path("out.gguf.partial")).expect("kept");
    assert!(partial.len() < fs::metadata(&whole).expect("there").len() as usize);
    // A line and a tensor that were cut off are made again.
    fs::write(path("out.gguf.journal"), format!("{journal}{{\"na")).expect("written");
    fs::write(path("out.gguf.partial"), [&partial[..], &[7; 100]].concat()).expect("written");
    let table: Value = serde_json::from_str(&succeeds(&[&quantize[..], &["--json"]].concat())).expect("a table");
    assert_eq!(table.as_array().map(Vec::len), Some(6));
    assert_eq!(fs::read(&output).expect("written"), fs::read(&whole).expect("written"));
    assert!(!path("out.gguf.journal").exists() && !path("out.gguf.partial").exists());

    // Files of others are not overwritten, nor continued with another input.
    fs::write(path("out.gguf.partial"), "notes").expect("written");
    assert!(refused(&[&quantize[..], &["--force"]].concat()).contains("has no journal"));
    fs::write(path("out.gguf.partial"), &partial).expect("written");
    fs::write(path("out.gguf.journal"), &journal).expect("written");
    fs::copy(&input, path("copy")).and_then(|_| fs::rename(path("copy"), &input)).expect("replaced");
    assert!(refused(&[&quantize[..], &["--force"]].concat()).contains("other inputs"));
}

//! Output files and pipes of commands: nothing that was not requested,
//! and nothing half-written.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qgemm"));
    command.args(arguments);
    command
}

fn qgemm(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command starts")
}

/// Standard error of a command that must fail without a panic.
fn refused(arguments: &[&str]) -> String {
    let output = qgemm(arguments);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !errors.contains("panicked"), "{arguments:?}: {errors}");
    errors
}

fn json(arguments: &[&str]) -> Value {
    let output = qgemm(&[arguments, &["--json"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?} prints no JSON: {e}"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable").flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Safetensors file of tensors: name, type, shape and bytes.
fn write_safetensors(path: &Path, tensors: &[(&str, &str, &[usize], Vec<u8>)]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert((*name).to_owned(), info);
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(path, file).expect("written");
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn row<'a>(table: &'a Value, name: &str) -> &'a Value {
    let rows = table.as_array().expect("a table is an array");
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} is missing in {table}"))
}

#[test]
fn quantize_replaces_only_what_it_may() {
    let folder = tempfile::tempdir().expect("writable");
    let output = folder.path().join("out.gguf");
    let quantize = ["quantize", SAMPLE, text(&output), "--format", "q8_0"];
    json(&quantize);
    let first = fs::read(&output).expect("written");
    assert!(refused(&quantize).contains("--force"));
    assert_eq!(fs::read(&output).expect("kept"), first);
    json(&[&quantize[..4], &["q4_0", "--force"]].concat());
    assert!(fs::read(&output).expect("written").len() < first.len());
    // The model itself is never replaced, under any name.
    let model = folder.path().join("model.safetensors");
    fs::copy(SAMPLE, &model).expect("copied");
    let hard = folder.path().join("same.gguf");
    fs::hard_link(&model, &hard).expect("linked");
    for to in [&model, &folder.path().join(".").join("model.safetensors"), &hard] {
        let errors = refused(&["quantize", text(&model), text(to), "--format", "q8_0", "--force"]);
        assert!(errors.contains("is the model that is read"), "{errors}");
    }
    assert_eq!(fs::read(&model).expect("kept"), fs::read(SAMPLE).expect("there"));
    assert_eq!(names(folder.path()), ["model.safetensors", "out.gguf", "same.gguf"]);
}

#[test]
fn outputs_are_checked_before_the_work() {
    let folder = tempfile::tempdir().expect("writable");
    let none = folder.path().join("none").join("out");
    for arguments in [
        &["quantize", SAMPLE, text(&none), "--format", "q8_0"][..],
        &["quantize", SAMPLE, text(folder.path()), "--format", "q8_0", "--force"],
        &["bench", "--device", "cpu", "--shape", "1x64x64", "--save", text(&none)],
        &[
            "bench",
            "--device",
            "cpu",
            "--shape",
            "1x64x64",
            "--sweep-m",
            "1",
            "--all-configs",
            "1",
            "--save-tuned",
            text(&none),
        ],
    ] {
        let errors = refused(arguments);
        assert!(errors.contains("folder"), "{errors}");
        assert!(qgemm(arguments).stdout.is_empty(), "{arguments:?} worked first");
    }
    assert!(names(folder.path()).is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn a_closed_or_full_standard_output_is_no_panic() {
    let inspect = ["inspect", SAMPLE];
    for arguments in [&inspect[..], &["inspect", SAMPLE, "--json"], &["devices"], &["support", "--device", "noop"]] {
        // Closed before the command starts, which might
        // otherwise finish printing first.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = command(arguments).stdout(writer).output().expect("it ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        let status = output.status;
        assert!(status.code() == Some(141) && !errors.contains("standard output"), "{arguments:?}: {status}, {errors}");
        let full = fs::File::create("/dev/full").expect("Linux has it");
        let output = command(arguments).stdout(full).output().expect("it ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && errors.contains("No space left"), "{arguments:?}: {errors}");
    }
    // A run whose table nobody reads leaves nothing half-written.
    let folder = tempfile::tempdir().expect("writable");
    let out = folder.path().join("out.gguf");
    let arguments = ["quantize", SAMPLE, text(&out), "--format", "q8_0"];
    let full = fs::File::create("/dev/full").expect("Linux has it");
    assert!(!command(&arguments).stdout(full).status().expect("it ends").success());
    assert!(names(folder.path()).is_empty());
}

#[test]
fn quantize_copies_what_is_no_weight() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (folder.path().join("m.safetensors"), folder.path().join("out.gguf"));
    let matrix = || floats((0..64 * 4).map(|i| (i as f32).sin()));
    let tiny = || floats((0..64 * 4).map(|i| if i < 64 { 1e-9 } else { 1.0 }));
    let ids: Vec<u8> = (0..4i64).flat_map(i64::to_le_bytes).collect();
    write_safetensors(
        &model,
        &[
            ("a.weight", "F32", &[4, 64], matrix()),
            ("embeddings.position_embeddings.weight", "F32", &[4, 64], matrix()),
            ("ids", "I64", &[1, 4], ids),
            ("mask", "U8", &[4], vec![1; 4]),
            ("router", "F32", &[4, 64], matrix()),
            ("tiny.weight", "F32", &[4, 64], tiny()),
        ],
    );
    let quantize = ["quantize", text(&model), text(&output), "--format", "q4_0", "--force"];
    let errors = refused(&quantize);
    assert!(errors.contains("mask") && errors.contains("--skip"), "{errors}");
    let table = json(&[&quantize[..], &["--skip", "mask"]].concat());
    for (name, to) in [
        ("a.weight", "q4_0"),
        ("embeddings.position_embeddings.weight", "f32"),
        ("ids", "I64"),
        ("router", "f32"),
        ("tiny.weight", "q4_0"),
    ] {
        assert_eq!(row(&table, name)["to"], to, "{name}");
    }
    let note = row(&table, "tiny.weight")["note"].as_str().expect("a note");
    assert!(note.contains("1 rows of 4 became zero"), "{note}");
    let read = json(&["inspect", text(&output)])["tensors"].clone();
    assert_eq!((read.as_array().map(Vec::len), &row(&read, "ids")["format"]), (Some(5), &Value::from("I64")));

    let table = json(&[&quantize[..], &["--skip", "mask", "--only", "r*,?.weight", "--keep", "a*"]].concat());
    let to: Vec<&str> = table.as_array().expect("rows").iter().filter_map(|row| row["to"].as_str()).collect();
    assert_eq!(to, ["f32", "f32", "I64", "q4_0", "f32"]);
    assert!(refused(&[&quantize[..], &["--keep", "b.*"]].concat()).contains("`b.*`"));
}

#[test]
fn quantize_keeps_the_metadata_of_a_gguf_file() {
    use qgemm_api::gguf::{GgufHeader, GgufValue};
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (folder.path().join("m.gguf"), folder.path().join("out.gguf"));
    let mut header = GgufHeader::new();
    for (key, value) in [("general.architecture", "llama"), ("general.name", "A model")] {
        header.metadata(key, value.into()).expect("a new key");
    }
    for (key, value) in [("general.file_type", 0u32), ("general.alignment", 64), ("llama.block_count", 1)] {
        header.metadata(key, value.into()).expect("a new key");
    }
    header.tensor("output.weight", &[4, 64], "f32".parse().expect("a format")).expect("fits");
    let mut writer = header.write(Vec::new()).expect("memory");
    writer.tensor(&floats((0..256).map(|i| i as f32))).expect("fits");
    fs::write(&model, writer.finish().expect("complete")).expect("written");
    json(&["quantize", text(&model), text(&output), "--format", "q8_0"]);
    let written = qgemm_api::open_model(&output).expect("a model");
    let value = |key: &str| written.metadata().iter().find(|(k, _)| k == key).map(|(_, value)| value.clone());
    assert_eq!(value("general.architecture"), Some("llama".into()));
    assert_eq!(value("general.name"), Some("A model".into()));
    for (key, number) in [
        ("general.file_type", 7),
        ("general.alignment", 64),
        ("llama.block_count", 1),
        ("general.quantization_version", 2),
    ] {
        assert_eq!(value(key).as_ref().and_then(GgufValue::as_u64), Some(number), "{key}");
    }
}

/// GGUF file of tensors: name, format, shape and bytes.
fn write_gguf(path: &Path, tensors: &[(&str, &str, &[usize], &[u8])]) {
    let mut header = qgemm_api::gguf::GgufHeader::new();
    header.metadata("general.file_type", 3u32.into()).expect("a new key");
    for (name, format, shape, _) in tensors {
        header.tensor(name, shape, format.parse().expect("a format")).expect("fits");
    }
    let mut writer = header.write(Vec::new()).expect("memory");
    for (_, _, _, bytes) in tensors {
        writer.tensor(bytes).expect("fits");
    }
    fs::write(path, writer.finish().expect("complete")).expect("written");
}

#[test]
fn quantize_copies_quantized_tensors_that_are_kept() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (folder.path().join("m.gguf"), folder.path().join("out.gguf"));
    // Scales with all bits set are NaN, which a copy preserves.
    let (blocks, stack) = (vec![0xff; 4 * 2 * 20], (0..3 * 2 * 20).map(|i| i as u8).collect::<Vec<u8>>());
    let plain = floats((0..64 * 4).map(|i| (i as f32).sin()));
    write_gguf(
        &model,
        &[
            ("blk.0.attn_q.weight", "q4_1", &[4, 64], &blocks),
            ("blk.0.ffn_up_exps.weight", "q4_1", &[3, 2, 32], &stack),
            ("output.weight", "f32", &[4, 64], &plain),
        ],
    );
    let quantize = ["quantize", text(&model), text(&output), "--format", "q8_0", "--force"];
    let errors = refused(&quantize);
    assert!(errors.contains("blk.0.attn_q.weight") && errors.contains("q4_1") && errors.contains("--keep"), "{errors}");
    let value = |model: &qgemm_api::Model, key: &str| {
        let value = model.metadata().iter().find(|(k, _)| k == key).map(|(_, value)| value.clone());
        value.as_ref().and_then(qgemm_api::gguf::GgufValue::as_u64)
    };
    for (keep, of_output, file_type) in [("*", "f32", 3), ("blk.*", "q8_0", 7)] {
        let table = json(&[&quantize[..], &["--keep", keep]].concat());
        assert_eq!(row(&table, "blk.0.attn_q.weight")["to"], "q4_1");
        assert_eq!(row(&table, "output.weight")["to"], of_output);
        let written = qgemm_api::open_model(&output).expect("a model");
        assert_eq!(&*written.blocks("blk.0.attn_q").expect("quantized"), blocks);
        assert_eq!(&*written.blocks("blk.0.ffn_up_exps").expect("quantized"), stack);
        assert_eq!(written.info("blk.0.ffn_up_exps").expect("listed").shape, [3, 2, 32]);
        assert_eq!(value(&written, "general.file_type"), Some(file_type), "--keep {keep}");
    }
    // If all tensors are kept, the file is unchanged.
    json(&[&quantize[..], &["--keep", "*"]].concat());
    let [before, after] = [&model, &output].map(|path| qgemm_api::open_model(path).expect("a model"));
    assert_eq!(before.tensors(), after.tensors());
}

#[test]
fn quantize_refuses_layers_that_it_cannot_read() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (folder.path().join("m.safetensors"), folder.path().join("out.gguf"));
    let plain = || ("plain.weight", "F32", &[4, 64][..], floats((0..64 * 4).map(|i| (i as f32).sin())));
    let packed = [
        ("a.weight_packed", "I32", &[4, 8][..], vec![0; 128]),
        ("a.weight_scale", "F32", &[4, 1], floats([1.0; 4])),
        ("a.weight_shape", "I64", &[2], [4i64, 64].iter().flat_map(|d| d.to_le_bytes()).collect()),
        plain(),
    ];
    let fp8 = [("a.weight", "F8_E4M3", &[4, 64][..], vec![0; 256]), plain()];
    let integers = [("a.weight", "I32", &[4, 64][..], vec![0; 1024]), plain()];
    let settings = r#"{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0":
        {"targets": ["Linear"], "weights": {"num_bits": BITS, "type": "TYPE"}}}}}"#;
    let cases = [
        (&packed[..], "6", "int", "compressed-tensors pack-quantized int6"),
        (&fp8, "8", "float", "a.weight_scale"),
        (&integers, "8", "int", "compressed-tensors"),
    ];
    for (tensors, bits, kind, format) in cases {
        write_safetensors(&model, tensors);
        let settings = settings.replace("BITS", bits).replace("TYPE", kind);
        fs::write(folder.path().join("config.json"), settings).expect("written");
        let quantize = ["quantize", text(&model), text(&output), "--format", "q8_0"];
        let errors = refused(&quantize);
        assert!(errors.contains("a.weight") && errors.contains(format) && errors.contains("--skip"), "{errors}");
        assert!(!output.exists());
        let table = json(&[&quantize[..], &["--skip", "a.weight", "--force"]].concat());
        assert_eq!(table.as_array().map(Vec::len), Some(1), "nothing of the layer is left: {table}");
        fs::remove_file(&output).expect("written");
        let listed = json(&["inspect", text(&model)])["tensors"].clone();
        let listed = row(&listed, "a.weight");
        assert!(listed["format"].as_str().is_some_and(|text| text.contains(format)), "{listed}");
    }
    // Integer tensors named as weights are no weights. They are copied on request.
    fs::remove_file(folder.path().join("config.json")).expect("written");
    write_safetensors(&model, &integers);
    let quantize = ["quantize", text(&model), text(&output), "--format", "q8_0"];
    assert!(refused(&quantize).contains("I32"));
    assert_eq!(row(&json(&[&quantize[..], &["--keep", "a.weight"]].concat()), "a.weight")["to"], "I32");
}

#[test]
fn names_of_a_file_cannot_act_on_the_terminal() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (folder.path().join("m.safetensors"), folder.path().join("out.gguf"));
    write_safetensors(&model, &[("evil\u{1b}[2J\u{9b}31m.weight", "F32", &[1, 3], floats([1.0; 3]))]);
    let inspect = qgemm(&["inspect", text(&model)]);
    let quantize = qgemm(&["quantize", text(&model), text(&output), "--format", "q4_0"]);
    assert!(!quantize.status.success(), "K = 3");
    for printed in [inspect.stdout, quantize.stderr, qgemm(&["inspect", text(&model), "--json"]).stdout] {
        let printed = String::from_utf8(printed).expect("text");
        assert!(printed.contains("evil") && printed.chars().all(|c| c == '\n' || !c.is_control()), "{printed:?}");
    }
}

#[test]
fn sizes_beyond_what_kernels_count_are_refused() {
    for command in ["verify", "bench"] {
        let errors = refused(&[command, "--device", "cpu", "--shape", "4294967296x32x32"]);
        assert!(errors.contains("4294967295"), "{errors}");
    }
}

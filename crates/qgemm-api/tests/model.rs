//! Model files: from a file to a result, and all errors of paths.

use std::fs;
use std::path::Path;

use qgemm_api::gguf::GgufHeader;
use qgemm_api::tuning::TunedTable;
use qgemm_api::{
    Context, Error, Format, FormatError, HalError, Model, ModelOptions, TensorKind, XPrecision, model_files,
    open_model, open_packed, quantize, read_model,
};

const N: usize = 3;
const K: usize = 64;

fn values() -> Vec<f32> {
    (0..N * K).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

fn write_gguf(path: &Path, format: &str) {
    let format: Format = format.parse().expect("a format");
    let (weight, _) = quantize(&values(), N, K, format).expect("K suits");
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", "test".into()).expect("a new key");
    header.tensor("blk.0.ffn_up.weight", &[N, K], format).expect("it fits");
    let mut writer = header.write(fs::File::create(path).expect("writable")).expect("writable");
    writer.tensor(weight.blocks()).expect("the right size");
    writer.finish().expect("complete");
}

/// Safetensors file with one f32 matrix.
fn write_safetensors(path: &Path, name: &str) {
    let data: Vec<u8> = values().iter().flat_map(|v| v.to_le_bytes()).collect();
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[{N},{K}],"data_offsets":[0,{}]}}}}"#, data.len());
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(path, bytes).expect("writable");
}

/// Message of each error in a chain.
fn chain(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
}

#[test]
fn no_error_says_what_its_source_says() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("writable");
        path
    };
    let ctx = Context::open("cpu").expect("always there");
    let no_json = TunedTable::from_json("{").expect_err("no table");
    let errors: Vec<Error> = vec![
        open_model("no-such-file.gguf").expect_err("is not there"),
        open_model(path("cut.gguf", b"GGUF")).expect_err("too short"),
        open_model(path("cut.safetensors", b"{")).expect_err("too short"),
        open_packed(path("weight.packed", b"no weight")).expect_err("none"),
        Context::open("cuda:99").expect_err("is not there"),
        "q4_9".parse::<Format>().map_err(Error::from).expect_err("no format"),
        no_json.into(),
        ctx.load_plan("{", &model_of(folder.path())).expect_err("no plan"),
    ];
    for error in errors {
        let texts = chain(&error);
        for (outer, inner) in texts.iter().zip(&texts[1..]) {
            assert!(!outer.contains(inner.as_str()), "{texts:?}");
        }
    }
}

/// Model in `folder`.
fn model_of(folder: &Path) -> Model {
    let path = folder.join("model.gguf");
    write_gguf(&path, "q8_0");
    open_model(&path).expect("a model")
}

#[test]
fn a_gguf_layer_runs() {
    let folder = tempfile::tempdir().expect("writable");
    write_gguf(&folder.path().join("model.gguf"), "q8_0");
    // The folder and the file are the same model.
    let model = open_model(folder.path()).expect("one model");
    let same = open_model(folder.path().join("model.gguf")).expect("a GGUF file");
    assert_eq!(model.tensors(), same.tensors());
    assert_eq!(model.tensors()[0].kind, TensorKind::Quantized("q8_0".parse().expect("a format")));

    let ctx = Context::open("cpu").expect("always there");
    let weight = ctx.load(&model.weight("blk.0.ffn_up").expect("it is there")).expect("memory");
    let got = ctx.linear(&weight, &[1.0; K], 1, XPrecision::Auto).expect("valid");
    for (row, &d) in values().chunks(K).zip(&got) {
        let sum: f32 = row.iter().sum();
        assert!((d - sum).abs() < 0.1, "expected about {sum}, got {d}");
    }
    assert!(matches!(
        model.weight("blk.0.ffn_upp.weight"),
        Err(FormatError::NoSuchTensor { near: Some(near), .. }) if near == "blk.0.ffn_up.weight"
    ));
}

#[test]
fn shards_make_one_model() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    write_safetensors(&path("a.safetensors"), "first.weight");
    write_safetensors(&path("b.safetensors"), "second.weight");
    let ambiguous = open_model(folder.path()).expect_err("two files, no index");
    assert!(ambiguous.to_string().contains("2 safetensors"), "{ambiguous}");
    let index = r#"{"weight_map":{"first.weight":"a.safetensors","second.weight":"b.safetensors"}}"#;
    fs::write(path("model.safetensors.index.json"), index).expect("writable");
    for (path, mark) in [(folder.path().into(), ""), (path("model.safetensors.index.json"), "\u{feff}")] {
        let as_python = format!(r#"{mark}{{"metadata":{{"total":NaN}},{}"#, &index[1..]);
        fs::write(folder.path().join("model.safetensors.index.json"), as_python).expect("writable");
        let model = open_model(path).expect("an index");
        let names: Vec<_> = model.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["first.weight", "second.weight"]);
        assert_eq!(model.dense("second").expect("plain").to_f32(), values());
    }
}

/// Writes part `number` of two of a split GGUF file, with a tensor of its own.
fn write_part(path: &Path, number: u32) {
    let (weight, _) = quantize(&values(), N, K, "q8_0".parse().expect("a format")).expect("K suits");
    let mut header = GgufHeader::new();
    for (key, value) in [("split.no", number), ("split.count", 2), ("split.tensors.count", 2)] {
        header.metadata(key, value.into()).expect("a new key");
    }
    header.tensor(&format!("blk.{number}.ffn_up.weight"), &[N, K], weight.format()).expect("it fits");
    let mut writer = header.write(fs::File::create(path).expect("writable")).expect("writable");
    writer.tensor(weight.blocks()).expect("the right size");
    writer.finish().expect("complete");
}

#[test]
fn any_part_of_a_split_gguf_file_stands_for_all() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let part = |number: u32| folder.path().join(format!("model-q8-{number:05}-of-00002.gguf"));
    write_part(&part(1), 0);
    let missing = open_model(part(1)).expect_err("a part is missing");
    assert!(chain(&missing).concat().contains("model-q8-00002-of-00002.gguf"), "{missing}");
    write_part(&part(2), 1);
    for path in [part(1), part(2), folder.path().to_owned()] {
        let model = open_model(&path).expect("a model");
        assert!((0..2).all(|i| model.weight(&format!("blk.{i}.ffn_up")).is_ok()), "{}", path.display());
    }
    let ctx = Context::open("cpu").expect("always there");
    let weight = open_model(part(2)).and_then(|model| ctx.load(&model.weight("blk.0.ffn_up")?)).expect("loads");
    assert_eq!((weight.n(), weight.k()), (N, K));
    // Another model beside them makes the folder ambiguous.
    write_gguf(&folder.path().join("other.gguf"), "q8_0");
    open_model(folder.path()).expect_err("two models");
}

#[test]
fn a_shard_opened_alone_knows_of_the_others() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let tensor = |name: &str, dtype: &str, bytes: &[u8]| {
        let count = if dtype == "F32" { bytes.len() / 4 } else { bytes.len() };
        let header =
            format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[1,{count}],"data_offsets":[0,{}]}}}}"#, bytes.len());
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), bytes].concat()
    };
    fs::write(path(shards[0]), tensor("a.weight", "F8_E4M3", &[0x38; 8])).expect("writable");
    fs::write(path(shards[1]), tensor("a.weight_scale_inv", "F32", &0.5f32.to_le_bytes())).expect("writable");
    let alone = || open_model(path(shards[0])).expect("a file");
    assert!(alone().weight("a").is_ok(), "plain FP8, as far as anybody knows");
    let index = path("model.safetensors.index.json");
    let map = format!(r#"{{"weight_map":{{"a.weight":"{}","a.weight_scale_inv":"{}"}}}}"#, shards[0], shards[1]);
    fs::write(&index, map).expect("writable");
    let config = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
    for config in ["{}", config] {
        fs::write(path("config.json"), config).expect("writable");
        let error = alone().weight("a").expect_err("its scale is elsewhere").to_string();
        assert!(error.contains(shards[1]) && error.contains("a.weight_scale_inv"), "{error}");
        for whole in [folder.path(), &index] {
            assert!(open_model(whole).expect("both shards").weight("a").is_ok());
        }
    }
    // An invalid index does not affect a file that is opened without it.
    fs::write(&index, "no JSON").expect("writable");
    assert!(matches!(alone().weight("a"), Err(FormatError::MissingTensor { shard: None, .. })));
    fs::remove_file(path("config.json")).expect("there");
    assert!(alone().weight("a").is_ok());
}

#[test]
fn settings_of_model_opt_stand_in_a_file_of_their_own() {
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("model.safetensors");
    let header = r#"{"a.weight":{"dtype":"F8_E4M3","shape":[1,8],"data_offsets":[0,8]}}"#;
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0x38; 8]].concat())
        .expect("writable");
    fs::write(folder.path().join("config.json"), r#"{"architectures": ["X"]}"#).expect("writable");
    assert!(open_model(&path).expect("a file").weight("a").is_ok());
    let settings = r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}"#;
    fs::write(folder.path().join("hf_quant_config.json"), settings).expect("writable");
    let error = open_model(&path).expect("a file").weight("a").expect_err("a scale is promised");
    assert!(matches!(error, FormatError::MissingTensor { .. }), "{error}");
}

#[test]
fn an_index_cannot_name_files_elsewhere() {
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("model.safetensors.index.json");
    for index in [
        r#"{"weight_map":{"w":"../a.safetensors"}}"#,
        r#"{"weight_map":{"w":"/etc/passwd"}}"#,
        r#"{"weight_map":{"w":""}}"#,
        r#"{"weight_map":{}}"#,
        r#"{"other":1}"#,
        "no JSON",
    ] {
        fs::write(&path, index).expect("writable");
        let error = open_model(&path).expect_err(index);
        assert!(matches!(error, Error::Format(FormatError::BadFile { .. })), "{index}: {error:?}");
    }
}

#[test]
fn settings_beside_the_file_are_read() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    write_safetensors(&path("model.safetensors"), "w");
    // A file that is read affects what is refused.
    let broken = r#"{"quantization_config": 7}"#;
    fs::write(path("quantize_config.json"), "[]").expect("writable");
    assert!(matches!(open_model(folder.path()), Err(Error::Format(FormatError::BadFile { .. }))));
    fs::write(path("quantize_config.json"), "{}").expect("writable");
    open_model(folder.path()).expect("no settings");
    fs::write(path("config.json"), r#"{"model_type":"bert"}"#).expect("writable");
    open_model(folder.path()).expect("no quantization");
    fs::write(path("config.json"), broken).expect("writable");
    assert!(matches!(open_model(folder.path()), Err(Error::Format(FormatError::BadFile { .. }))));
    fs::write(path("config.json"), "no JSON").expect("writable");
    assert!(matches!(open_model(folder.path()), Err(Error::Format(FormatError::BadFile { .. }))));
}

/// GPTQ layer of 8 × 32 weights, all codes and scales 0.
fn write_gptq(path: &Path) {
    let header = r#"{"l.qweight":{"dtype":"I32","shape":[4,8],"data_offsets":[0,128]},
        "l.scales":{"dtype":"F16","shape":[2,8],"data_offsets":[128,160]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + 160, 0);
    fs::write(path, bytes).expect("writable");
}

#[test]
fn settings_of_all_files_count() {
    const NAMES: [&str; 5] = [
        "config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
        "hf_quant_config.json",
    ];
    let config =
        |settings: &str| format!(r#"{{"model_type":"llama","limit":Infinity,"quantization_config":{settings}}}"#);
    let settings = r#"{"quant_method":"gptq","bits":4,"group_size":16,"sym":true}"#;
    for name in NAMES {
        let folder = tempfile::tempdir().expect("writable");
        let path = |name: &str| folder.path().join(name);
        write_gptq(&path("model.safetensors"));
        // Without settings the layer is not known to be symmetric, so its
        // zero points are required.
        fs::write(path("config.json"), config("null")).expect("writable");
        let error = open_model(folder.path()).and_then(|model| Ok(model.weight("l")?)).expect_err("no settings");
        assert!(error.to_string().contains("qzeros"), "{error}");

        fs::write(path(name), config(settings)).expect("writable");
        let weight = open_model(folder.path()).expect("a model").weight("l").expect("settings");
        assert_eq!((weight.n(), weight.k()), (8, 32), "{name}");

        // Another file contradicts it.
        let other = if name == "config.json" { "quantization_config.json" } else { "config.json" };
        fs::write(path(other), config(r#"{"bits":8}"#)).expect("writable");
        let model = open_model(folder.path()).expect("a model");
        let error = model.weight("l").expect_err("two widths").to_string();
        let named = |file: &str| error.contains(path(file).to_str().expect("UTF-8"));
        assert!(
            named(name) && named(other) && error.contains("`bits` is 4") && error.contains("`bits` is 8"),
            "{error}"
        );
    }
}

#[test]
fn what_is_no_model_is_an_error() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    assert!(matches!(open_model(path("absent.gguf")), Err(Error::Hal(HalError::File { .. }))));
    assert!(matches!(open_model(path("absent.index.json")), Err(Error::Io { .. })));
    assert!(matches!(open_model(folder.path()), Err(Error::Format(FormatError::BadFile { .. }))));
    for (name, bytes) in
        [("empty.gguf", &b""[..]), ("text.gguf", b"hello world, this is text"), ("cut.gguf", b"GGUF\x03")]
    {
        fs::write(path(name), bytes).expect("writable");
        assert!(matches!(open_model(path(name)), Err(Error::Format(_))), "{name}");
    }
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    write_safetensors(&path("a.safetensors"), "first.weight");
    let index = r#"{"weight_map":{"first.weight":"a.safetensors","second.weight":"b.safetensors"}}"#;
    fs::write(path("model.safetensors.index.json"), index).expect("writable");
    let mut cut = fs::read(path("a.safetensors")).expect("just written");
    cut.truncate(cut.len() - 1);
    fs::write(path("b.safetensors"), cut).expect("writable");
    write_gguf(&path("c.gguf"), "q8_0");
    let mut cut = fs::read(path("c.gguf")).expect("just written");
    cut.truncate(40);
    fs::write(path("c.gguf"), cut).expect("writable");
    for (open, named) in [("model.safetensors.index.json", "b.safetensors"), ("c.gguf", "c.gguf")] {
        let error = open_model(path(open)).expect_err("cut off").to_string();
        assert!(error.contains(path(named).to_str().expect("UTF-8")), "{error}");
    }
    fs::write(path("config.json"), r#"{"quantization_config": 7}"#).expect("writable");
    let error = open_model(path("a.safetensors")).expect_err("bad settings").to_string();
    assert!(error.contains(path("config.json").to_str().expect("UTF-8")), "{error}");
}

#[test]
fn a_model_that_is_read_does_not_mind_its_file() {
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, "w");
    assert_eq!(model_files(folder.path()).expect("one model"), std::slice::from_ref(&path));
    let model = read_model(folder.path(), ModelOptions::default()).expect("a model");
    fs::write(&path, "").expect("writable");
    assert_eq!(model.dense("w").expect("plain").to_f32(), values());
}

/// Error with its sources, as a program prints it.
#[cfg(unix)]
fn with_sources(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_sources(source)),
        None => error.to_string(),
    }
}

#[cfg(unix)]
#[test]
fn what_has_no_end_is_refused_at_once() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    write_safetensors(&path("model.safetensors"), "w");
    let pipe = |name: &str| {
        let made = std::process::Command::new("mkfifo").arg(path(name)).status().expect("mkfifo is everywhere");
        assert!(made.success());
    };
    pipe("pipe.gguf");
    symlink("/dev/zero", path("zeros.gguf")).expect("writable");
    symlink("/dev/zero", path("zeros.safetensors.index.json")).expect("writable");
    for name in ["pipe.gguf", "zeros.gguf", "zeros.safetensors.index.json"] {
        let error = with_sources(&open_model(path(name)).expect_err("no regular file"));
        assert!(error.contains("regular file") && error.contains(name), "{error}");
        assert!(read_model(path(name), ModelOptions::default()).is_err());
    }
    for make in [&pipe as &dyn Fn(&str), &|name| symlink("/dev/zero", path(name)).expect("writable")] {
        make("config.json");
        let error = with_sources(&open_model(path("model.safetensors")).expect_err("settings without an end"));
        assert!(error.contains("config.json"), "{error}");
        fs::remove_file(path("config.json")).expect("there");
    }
    let long = fs::File::create(path("config.json")).expect("writable");
    long.set_len(1 << 40).expect("sparse files");
    let error = with_sources(&open_model(path("model.safetensors")).expect_err("too long"));
    assert!(error.contains("at most"), "{error}");
}

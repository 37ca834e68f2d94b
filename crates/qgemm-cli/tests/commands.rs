//! Commands as a user runs them, on the CPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

fn qgemm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_qgemm")).args(arguments).output().expect("the command starts")
}

/// JSON output of a command that must succeed.
fn json(arguments: &[&str]) -> Value {
    let output = qgemm(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?} prints no JSON: {e}"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn rows(table: &Value) -> &[Value] {
    table.as_array().expect("a table is an array")
}

#[test]
fn devices_lists_the_cpu_and_every_format() {
    let both = json(&["devices", "--json"]);
    assert!(rows(&both["devices"]).iter().any(|d| d["device"] == "cpu" && d["found"]["memory_bytes"].is_u64()));
    assert!(rows(&both["formats"]).iter().any(|f| f["format"] == "q4_k" && f["bits_per_weight"] == 4.5));
}

#[test]
fn quantize_writes_a_gguf_that_inspect_reads() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let output: PathBuf = folder.path().join("out.gguf");
    let written = json(&["quantize", SAMPLE, text(&output), "--format", "q4_k", "--json"]);
    let read = json(&["inspect", text(&output), "--json"])["tensors"].clone();
    let find = |table: &Value, name: &str| {
        rows(table).iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} is missing")).clone()
    };
    // K = 1536 fits Q4_K. K = 384 falls back, and the table says so.
    assert_eq!(find(&written, "ffn_down.weight")["note"], Value::Null);
    assert!(find(&written, "ffn_up.weight")["note"].as_str().expect("a note").contains("384"));
    for (name, format) in [("ffn_down.weight", "q4_k"), ("ffn_up.weight", "q5_0"), ("ffn_up.bias", "f32")] {
        assert_eq!(find(&read, name)["format"], format);
    }
    assert_eq!(rows(&written).len(), rows(&read).len());
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1);
}

#[test]
fn loading_measures_what_the_host_packs() {
    let table = json(&["loading", "--device", "cpu", "--format", "q4_0", "q6_k", "--shape", "1x33x512", "--json"]);
    let formats: Vec<&Value> = rows(&table).iter().map(|row| &row["format"]).collect();
    assert_eq!(formats, ["q4_0", "q6_k"]);
    assert_eq!(rows(&table)[0]["bytes"], 33 * 512 / 32 * 18);
    assert!(rows(&table).iter().all(|row| row["milliseconds"].as_f64().is_some_and(|ms| ms > 0.0)));
    assert!(rows(&table).iter().all(|row| row["packing"].is_null()));
}

#[test]
fn a_format_that_gguf_lacks_leaves_no_file() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let output = folder.path().join("out.gguf");
    let result = qgemm(&["quantize", SAMPLE, text(&output), "--format", "int4_g128"]);
    assert!(!result.status.success());
    assert!(String::from_utf8_lossy(&result.stderr).contains("int4_g128"));
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0);
}

#[test]
fn verify_passes_on_the_cpu_and_repeats_a_seed() {
    let table = json(&["verify", "--device", "cpu", "--format", "q6_k", "--shape", "3x33x256", "--json"]);
    assert_eq!(rows(&table).len(), 3);
    for row in rows(&table) {
        assert_eq!(row["verdict"], "pass");
        let id = row["kernel_id"].as_str().expect("an identity");
        assert!(id.starts_with("gemm:") && id.contains("w=q6_k"), "{id}");
        assert!(row["worst_tile"].as_f64().expect("a number") <= row["limit"].as_f64().expect("a number"));
    }
    let seed = ["verify", "--device", "cpu", "--stress", "0", "--seed", "42", "--json"];
    assert_eq!(json(&seed)[0]["case"], json(&seed)[0]["case"]);
}

#[test]
fn verify_checks_conversions_too() {
    let table = json(&["verify", "--device", "cpu", "--op", "convert", "--shape", "3x40", "--json"]);
    // Nine pairs of types, row-major and transposed.
    assert_eq!(rows(&table).len(), 18);
    for row in rows(&table) {
        assert_eq!(row["verdict"], "pass", "{row}");
        assert!(row["kernel_id"].as_str().is_some_and(|id| id.starts_with("convert:")), "{row}");
    }
    let group = json(&["verify", "--device", "cpu", "--op", "convert", "--group", "convert_special", "--json"]);
    assert!(rows(&group).iter().all(|row| row["verdict"] == "pass"), "{group}");
    let seed = ["verify", "--device", "cpu", "--op", "convert", "--stress", "0", "--seed", "7", "--json"];
    assert_eq!(json(&seed)[0]["case"], json(&seed)[0]["case"]);
}

#[test]
fn verify_checks_routings_too() {
    let table = json(&["verify", "--device", "cpu", "--op", "routing", "--shape", "19x60x4", "--json"]);
    // Three types of logits with three scorings each, and ids.
    assert_eq!(rows(&table).len(), 10);
    for row in rows(&table) {
        assert_eq!(row["verdict"], "pass", "{row}");
        assert!(row["kernel_id"].as_str().is_some_and(|id| id.starts_with("routing:")), "{row}");
    }
    let seed = ["verify", "--device", "cpu", "--op", "routing", "--stress", "0", "--seed", "7", "--json"];
    assert_eq!(json(&seed)[0]["case"], json(&seed)[0]["case"]);
}

#[test]
fn bench_measures_routings() {
    let table = json(&["bench", "--device", "cpu", "--op", "routing", "--shape", "64x16x2", "--json"]);
    let formats: Vec<&str> = rows(&table).iter().filter_map(|row| row["format"].as_str()).collect();
    assert_eq!(formats, ["logits", "ids"]);
    assert!(rows(&table).iter().all(|row| row["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0)));
}

#[test]
fn verify_checks_matmuls_too() {
    let shape = ["verify", "--device", "cpu", "--op", "matmul", "--shape", "19x30x41", "--json"];
    // Four formats in four layouts, and codes with scales in theirs.
    let table = json(&shape);
    assert_eq!(rows(&table).len(), 17);
    let one = json(&[&shape[..], &["--layout", "tn", "--batch", "3"]].concat());
    assert!(
        rows(&one).len() == 4 && one[0]["case"].as_str().is_some_and(|case| case.contains("3x 19x30x41 tn")),
        "{one}"
    );
    for row in rows(&table).iter().chain(rows(&one)) {
        assert_eq!(row["verdict"], "pass", "{row}");
        assert!(row["kernel_id"].as_str().is_some_and(|id| id.starts_with("matmul:")), "{row}");
    }
    let seed = ["verify", "--device", "cpu", "--op", "matmul", "--stress", "0", "--seed", "7", "--json"];
    assert_eq!(json(&seed)[0]["case"], json(&seed)[0]["case"]);
}

#[test]
fn bench_measures_matmuls() {
    let of = ["bench", "--device", "cpu", "--op", "matmul", "--shape", "32x32x32", "--layout", "nt", "--json"];
    for (factors, stored) in [(&[][..], "f16"), (&["--factors", "e4m3"], "e4m3")] {
        let table = json(&[&of[..], factors].concat());
        assert!(rows(&table).len() == 1 && table[0]["format"] == "nt", "{table}");
        assert!(
            table[0]["x_dtype"] == stored && table[0]["flops"].as_f64().is_some_and(|flops| flops > 0.0),
            "{table}"
        );
    }
}

#[test]
fn verify_checks_quantizing_too() {
    let table = json(&["verify", "--device", "cpu", "--op", "quantize", "--shape", "3x70", "--json"]);
    // Ten formats from three types.
    assert_eq!(rows(&table).len(), 30);
    for row in rows(&table) {
        assert_eq!(row["verdict"], "pass", "{row}");
        assert!(row["kernel_id"].as_str().is_some_and(|id| id.starts_with("quantize:")), "{row}");
    }
    let one = [
        "verify",
        "--device",
        "cpu",
        "--op",
        "quantize",
        "--x-format",
        "mxfp4",
        "--group",
        "quantize_special",
        "--json",
    ];
    assert!(rows(&json(&one)).iter().all(|row| row["case"].as_str().is_some_and(|case| case.contains("->mxfp4"))));
}

#[test]
fn bench_measures_quantizing() {
    let command = ["bench", "--device", "cpu", "--op", "quantize", "--shape", "64x256", "--x-format", "q8_1", "--json"];
    let table = json(&command);
    assert_eq!(rows(&table).len(), 1);
    assert!(rows(&table).iter().all(|row| row["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0)));
}

#[test]
fn verify_checks_norms_too() {
    let table = json(&["verify", "--device", "cpu", "--op", "norm", "--shape", "3x40", "--json"]);
    // Nine pairs of types, two norms, without and with a residual.
    assert_eq!(rows(&table).len(), 36);
    for row in rows(&table) {
        assert_eq!(row["verdict"], "pass", "{row}");
        assert!(row["kernel_id"].as_str().is_some_and(|id| id.starts_with("norm:")), "{row}");
    }
    let seed = ["verify", "--device", "cpu", "--op", "norm", "--stress", "0", "--seed", "7", "--json"];
    assert_eq!(json(&seed)[0]["case"], json(&seed)[0]["case"]);
}

#[test]
fn appending_to_caches_is_verified_and_measured() {
    let table = json(&["verify", "--device", "cpu", "--op", "kv_append", "--shape", "3x4x2x64", "--json"]);
    // Three types into six formats, contiguous and paged, with
    // and without a Hadamard rotation.
    assert_eq!(rows(&table).len(), 72);
    assert!(rows(&table).iter().all(|row| row["verdict"] == "pass"), "{table}");
    let table = json(&["bench", "--device", "cpu", "--op", "kv_append", "--shape", "8x4x2x64", "--json"]);
    let formats: Vec<&str> = rows(&table).iter().filter_map(|row| row["format"].as_str()).collect();
    assert_eq!(formats, ["f16", "e4m3", "q8_0", "q4_0"]);
}

#[test]
fn indexers_are_verified_and_measured() {
    let table =
        json(&["verify", "--device", "cpu", "--op", "indexer", "--shape", "3x100x8x64", "2x1x70x4x32", "--json"]);
    // Three formats, contiguous and paged.
    assert_eq!(rows(&table).len(), 6);
    assert!(rows(&table).iter().all(|row| row["verdict"] == "pass"), "{table}");
    let table = json(&["bench", "--device", "cpu", "--op", "indexer", "--shape", "2x128x8x64", "--json"]);
    let shapes: Vec<&str> = rows(&table).iter().filter_map(|row| row["shape"].as_str()).collect();
    assert_eq!(shapes, ["2x128x8x64", "2x128x8x64 best 128", "2x128x8x64", "2x128x8x64 best 128"]);
    assert!(rows(&table).iter().all(|row| row["flops"].as_f64().is_some_and(|flops| flops > 0.0)), "{table}");
}

#[test]
fn bench_measures_norms() {
    let table = json(&["bench", "--device", "cpu", "--op", "norm", "--shape", "8x256", "--json"]);
    let formats: Vec<&str> = rows(&table).iter().filter_map(|row| row["format"].as_str()).collect();
    assert_eq!(formats, ["rms f16->f16", "rms f16->f16 residual", "rms f16->f16 gate", "layer f16->f16"]);
    assert!(rows(&table).iter().all(|row| row["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0)));
}

#[test]
fn bench_says_what_each_kernel_takes() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace.json");
    let shape = ["bench", "--device", "cpu", "--op", "norm", "--shape", "8x256", "--json"];
    let table = json(&[&shape[..], &["--profile", trace.to_str().expect("a name")]].concat());
    let runs = table[0]["profile"]["runs"].as_array().expect("a profile");
    assert!(runs.len() == 1 && runs[0]["operation"] == "norm", "{table}");
    assert_eq!(runs[0]["steps"][0]["kernel_id"], table[0]["kernel_id"]);
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).expect("written")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    // Four norms, each with a run and a kernel, and no overlap in time.
    assert_eq!(events.len(), 8);
    let at = |event: &serde_json::Value, what: &str| event[what].as_f64().expect("a number");
    let kernels: Vec<_> = events.iter().filter(|event| event["tid"] == 1).collect();
    assert!(
        kernels.windows(2).all(|pair| at(pair[0], "ts") + at(pair[0], "dur") <= at(pair[1], "ts") + 1e-3),
        "{trace}"
    );
    assert!(json(&shape)[0].get("profile").is_none());
}

#[test]
fn verify_lists_operations_and_groups() {
    let table = json(&["verify", "--list", "--json"]);
    let has = |op: &str, group: &str| rows(&table).iter().any(|row| row["op"] == op && row["group"] == group);
    assert!(has("gemm", "exact") && has("convert", "convert_gathered") && has("routing", "routing_ids"));
}

#[test]
fn bench_measures_conversions() {
    let table = json(&[
        "bench",
        "--device",
        "cpu",
        "--op",
        "convert",
        "--shape",
        "64x64",
        "--from",
        "f32",
        "--transposed",
        "--json",
    ]);
    let formats: Vec<&str> = rows(&table).iter().filter_map(|row| row["format"].as_str()).collect();
    assert_eq!(formats, ["f32->f32 transposed", "f32->f16 transposed", "f32->bf16 transposed"]);
    assert!(rows(&table).iter().all(|row| row["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0)));
}

#[test]
fn a_regression_against_the_baseline_fails() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = folder.path().join("baseline.json");
    let bench = ["bench", "--device", "cpu", "--format", "q8_0", "--shape", "1x64x64"];
    let saved = json(&[&bench[..], &["--save", text(&path), "--json"]].concat());
    assert_eq!(rows(&saved).len(), 1);
    // A baseline a thousand times as fast, and one a
    // thousand times as slow.
    let mut edited = saved.clone();
    let time = saved[0]["microseconds"].as_f64().expect("a time");
    for (factor, passes) in [(1e-3, false), (1e3, true)] {
        edited[0]["microseconds"] = (time * factor).into();
        std::fs::write(&path, edited.to_string()).expect("written");
        let result = qgemm(&[&bench[..], &["--baseline", text(&path)]].concat());
        assert_eq!(result.status.success(), passes, "{}", String::from_utf8_lossy(&result.stdout));
    }
}

#[test]
fn a_sweep_times_every_number_of_tokens() {
    let sweep =
        ["bench", "--device", "cpu", "--shape", "1x64x256", "--format", "q4_k", "--sweep-m", "1..3,40", "--json"];
    // Cliffs depend on the machine.
    let folder = tempfile::tempdir().expect("a writable folder");
    let tuned = folder.path().join("tuned.json");
    let output = qgemm(&[&sweep[..], &["--all-configs", "1000", "--save-tuned", text(&tuned)]].concat());
    let table: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let planned: Vec<_> = rows(&table).iter().filter(|row| row["planned"] == true).collect();
    assert_eq!(planned.iter().map(|row| row["m"].as_u64()).collect::<Vec<_>>(), [1, 2, 3, 40].map(Some));
    assert!(rows(&table).iter().any(|row| row["planned"] == false), "other configurations are timed, too");
    assert!(planned.iter().any(|row| row["behind_best"].as_f64().is_some_and(|share| share >= 0.0)));
    assert_eq!(output.status.success(), rows(&table).iter().all(|row| row["cliff"].is_null()));
    // The fastest config at 40 tokens is used then.
    let forty =
        ["bench", "--device", "cpu", "--shape", "40x64x256", "--format", "q4_k", "--tuned", text(&tuned), "--json"];
    let best = rows(&table).iter().filter(|row| row["m"] == 40).min_by(|a, b| {
        let time = |row: &Value| row["microseconds"].as_f64().expect("a time");
        time(a).total_cmp(&time(b))
    });
    let family = best.expect("a row")["family"].as_str().expect("a name").to_owned();
    assert!(json(&forty)[0]["kernel"].as_str().expect("a name").starts_with(&family));
}

#[test]
fn a_model_is_read_in_place_of_mapped() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let [mapped, read] = ["mapped.gguf", "read.gguf"].map(|name| folder.path().join(name));
    json(&["quantize", SAMPLE, text(&mapped), "--format", "q8_0", "--json"]);
    json(&["quantize", SAMPLE, text(&read), "--format", "q8_0", "--read", "--json"]);
    assert_eq!(std::fs::read(&mapped).expect("written"), std::fs::read(&read).expect("written"));
    assert_eq!(json(&["inspect", text(&mapped), "--json"]), json(&["inspect", text(&read), "--read", "--json"]));
}

#[test]
fn errors_say_each_cause_once() {
    let folder = tempfile::tempdir().expect("a writable folder");
    let path = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("writable");
        text(&path).to_owned()
    };
    let (no_json, no_model) = (path("table.json", b"{"), path("model.gguf", b"GGUF but cut off"));
    let cases: [Vec<&str>; 6] = [
        vec!["inspect", "no-such-file.gguf"],
        vec!["inspect", &no_model],
        vec!["quantize", SAMPLE, "no-such-folder/out.gguf", "--format", "q8_0"],
        vec!["bench", "--device", "cpu", "--shape", "1x32x32", "--tuned", &no_json],
        vec!["bench", "--device", "cpu", "--shape", "1x32x32", "--baseline", &no_json],
        vec!["plan", SAMPLE, "--batch", "1", "--device", "cpu", "--check", &no_json],
    ];
    for arguments in cases {
        let result = qgemm(&arguments);
        let errors = String::from_utf8_lossy(&result.stderr);
        assert!(!result.status.success(), "{arguments:?}");
        let line = errors.lines().last().expect("an error").trim_start_matches("error: ");
        let causes: Vec<&str> = line.split(": ").filter(|cause| cause.len() > 3).collect();
        for (i, cause) in causes.iter().enumerate() {
            assert!(!causes[..i].contains(cause), "{arguments:?} says `{cause}` twice: {line}");
        }
    }
}

#[test]
fn wrong_arguments_say_what_was_expected() {
    let cases: [(&[&str], &str); 16] = [
        (&["verify", "--device", "cpu", "--shape", "3x3"], "MxNxK"),
        (&["verify", "--device", "cpu", "--format", "q4_0", "--shape", "1x1x33"], "multiple"),
        (&["verify", "--device", "tpu:0"], "tpu"),
        (&["verify", "--device", "cpu", "--op", "dot"], "gemm, convert, experts, routing, matmul"),
        (&["verify", "--device", "cpu", "--op", "routing", "--shape", "3x3"], "TxExK"),
        (&["verify", "--device", "cpu", "--op", "quantize", "--x-format", "f16"], "codes and scales"),
        (&["bench", "--device", "cpu", "--op", "convert", "--x-format", "mxfp8"], "`--op quantize`"),
        (&["verify", "--device", "cpu", "--op", "convert", "--shape", "3x3x3"], "RxC"),
        (&["verify", "--device", "cpu", "--op", "norm", "--shape", "3"], "RxC"),
        (&["bench", "--device", "cpu", "--op", "norm", "--transposed"], "`--op convert`"),
        (&["verify", "--device", "cpu", "--op", "convert", "--group", "exact"], "convert_special"),
        (&["bench", "--device", "cpu", "--from", "f32"], "--op convert"),
        (&["bench", "--device", "cpu", "--layout", "tn"], "--op matmul"),
        (&["verify", "--device", "cpu", "--op", "matmul", "--shape", "1x1x1", "--layout", "up"], "nn, nt, tn or tt"),
        (&["bench", "--device", "cpu", "--op", "convert", "--row-factors", "--to", "f32"], "--to f16"),
        (&["inspect", "no-such-file.gguf"], "no-such-file.gguf"),
    ];
    for (arguments, part) in cases {
        let result = qgemm(arguments);
        let errors = String::from_utf8_lossy(&result.stderr);
        assert!(!result.status.success() && errors.contains(part), "{arguments:?}: {errors}");
    }
}

//! Concurrent processes that write the same file. Measurements of both are kept;
//! every other file is complete and from one of them.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use serde_json::Value;

mod support;
use support::{model, succeeds, text};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qgemm"));
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command starts")
}

/// Outputs of processes that start together.
fn together(processes: impl IntoIterator<Item = Child>) -> Vec<Output> {
    let running: Vec<Child> = processes.into_iter().collect();
    running.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn entries(path: &Path) -> Vec<Value> {
    let table: Value = serde_json::from_str(&fs::read_to_string(path).expect("it is there")).expect("JSON");
    table["tuned"].as_array().expect("entries").clone()
}

/// File names in a folder, without lock files, which stay.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| !name.ends_with(".lock")).collect();
    names.sort();
    names
}

#[test]
fn records_of_all_that_tune_at_once_survive() {
    let folder = tempfile::tempdir().expect("writable");
    let table = folder.path().join("tuned.json");
    let columns = ["64", "96", "128", "160", "192", "224"];
    let tune = |k: &str| {
        start(&[
            "tune",
            "--device",
            "cpu",
            "--format",
            "q8_0",
            "--shape",
            &format!("1x64x{k}"),
            "--budget",
            "4s",
            "--table",
            text(&table),
        ])
    };
    for output in together(columns.map(tune)) {
        assert!(output.status.success(), "{}", errors(&output));
    }
    let found = entries(&table);
    for k in columns {
        assert!(found.iter().any(|entry| entry["k"].as_u64() == k.parse().ok()), "K = {k} is missing: {found:?}");
    }
    assert_eq!(names(folder.path()), ["tuned.json"]);
    // The newer measurement of a problem wins: it is measured again,
    // after an absurdly fast entry.
    let fast = fs::read_to_string(&table).expect("it is there");
    let seconds: Vec<String> = found.iter().map(|entry| entry["seconds"].to_string()).collect();
    let stale = seconds
        .iter()
        .fold(fast, |text, seconds| text.replace(&format!("\"seconds\": {seconds}"), "\"seconds\": 100.0"));
    fs::write(&table, stale).expect("written");
    for output in together(["64", "64"].map(tune)) {
        assert!(output.status.success(), "{}", errors(&output));
    }
    let is_stale = |entry: &Value| entry["k"] == 64 && entry["seconds"] == 100.0;
    assert!(!entries(&table).iter().any(is_stale), "{:?} were measured again", entries(&table));
    assert!(entries(&table).iter().any(|entry| entry["k"] == 96), "others stay");
}

#[test]
fn tables_are_merged_whoever_writes_them() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    let tables: Vec<_> = ["64", "96", "128", "160"].map(|k| (k, path(&format!("{k}.json")))).into_iter().collect();
    for (k, table) in &tables {
        succeeds(&[
            "tune",
            "--device",
            "cpu",
            "--format",
            "q8_0",
            "--shape",
            &format!("1x64x{k}"),
            "--budget",
            "4s",
            "--table",
            text(table),
        ]);
    }
    let all = path("all.json");
    let imports = tables.iter().map(|(_, table)| start(&["tune", "--import", text(table), "--table", text(&all)]));
    let avoid = ["gemv", "gemm"].map(|why| {
        let kernel = entries(&tables[0].1)[0]["kernel"].as_str().expect("an identity").to_owned();
        start(&["tune", "--avoid", &kernel, "--why", why, "--on", why, "--table", text(&all)])
    });
    let sweep = ["--sweep-m", "1", "--all-configs", "1", "--save-tuned"];
    let bench =
        [&["bench", "--device", "cpu", "--format", "q8_0", "--shape", "1x64x192"][..], &sweep, &[text(&all)]].concat();
    for output in together(imports.chain(avoid).chain([start(&bench)])) {
        assert!(!errors(&output).contains("panicked") && output.status.code().is_some(), "{}", errors(&output));
    }
    let found = entries(&all);
    for k in ["64", "96", "128", "160", "192"] {
        assert!(found.iter().any(|entry| entry["k"].as_u64() == k.parse().ok()), "K = {k} is missing: {found:?}");
    }
    let table: Value = serde_json::from_str(&fs::read_to_string(&all).expect("there")).expect("JSON");
    assert_eq!(table["avoided"].as_array().map(Vec::len), Some(2), "{table}");
}

#[test]
fn a_table_that_cannot_be_locked_is_an_error_in_bounded_time() {
    let folder = tempfile::tempdir().expect("writable");
    let (table, other) = (folder.path().join("tuned.json"), folder.path().join("other.json"));
    succeeds(&[
        "tune",
        "--device",
        "cpu",
        "--format",
        "q8_0",
        "--shape",
        "1x64x64",
        "--budget",
        "4s",
        "--table",
        text(&other),
    ]);
    let import = ["tune", "--import", text(&other), "--table", text(&table)];
    // A process that hangs with the lock.
    let lock = File::create(folder.path().join("tuned.json.lock")).expect("writable");
    lock.lock().expect("nobody has it");
    let begin = Instant::now();
    let output = &together([start(&import)])[0];
    assert!(!output.status.success() && errors(output).contains("another process"), "{}", errors(output));
    assert!(begin.elapsed().as_secs() < 60 && !table.exists());
    drop(lock);
    succeeds(&import);
    // The lock's path is no file.
    let elsewhere = folder.path().join("elsewhere.json");
    fs::create_dir(folder.path().join("elsewhere.json.lock")).expect("made");
    let output = &together([start(&["tune", "--import", text(&other), "--table", text(&elsewhere)])])[0];
    assert!(
        !output.status.success() && errors(output).contains("elsewhere.json.lock: cannot lock"),
        "{}",
        errors(output)
    );
}

#[test]
fn other_files_are_one_of_those_that_were_written_and_whole() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, out) = (model(folder.path()), folder.path().join("out"));
    fs::create_dir(&out).expect("made");
    let path = |name: &str| out.join(name);
    let (plan, page, rows, weights) = (path("plan.json"), path("page.html"), path("rows.json"), path("weights.gguf"));
    let batches = ["1", "2", "3"];
    let mut running: Vec<Child> = Vec::new();
    for batch in batches {
        running.push(start(&["plan", text(&model), "--batch", batch, "--device", "cpu", "-o", text(&plan)]));
        running.push(start(&["report", "-o", text(&page)]));
        let shape = format!("{batch}x64x64");
        running.push(start(&[
            "bench",
            "--device",
            "cpu",
            "--format",
            "q8_0",
            "--shape",
            &shape,
            "--save",
            text(&rows),
        ]));
    }
    for output in together(running) {
        assert!(output.status.success(), "{}", errors(&output));
    }
    let read =
        |path: &Path| -> Value { serde_json::from_str(&fs::read_to_string(path).expect("there")).expect("whole") };
    assert!(batches.contains(&read(&plan)["model"]["batch"].to_string().as_str()));
    assert_eq!(read(&rows).as_array().map(Vec::len), Some(1));
    succeeds(&["plan", text(&model), "--batch", "1", "--device", "cpu", "--check", text(&plan)]);
    assert!(
        fs::read_to_string(&page).expect("there").ends_with("</html>\n")
            || fs::read_to_string(&page).expect("there").contains("</html>")
    );
    // Without --force, one of several wins and the others report it.
    let quantize = || start(&["quantize", SAMPLE, text(&weights), "--format", "q8_0"]);
    let outputs = together([quantize(), quantize(), quantize()]);
    assert_eq!(outputs.iter().filter(|output| output.status.success()).count(), 1);
    for output in outputs.iter().filter(|output| !output.status.success()) {
        assert!(errors(output).contains("there already") || errors(output).contains("exists"), "{}", errors(output));
    }
    succeeds(&["inspect", text(&weights)]);
    let forced = || start(&["quantize", SAMPLE, text(&weights), "--format", "q4_0", "--force"]);
    assert!(together([forced(), forced()]).iter().all(|output| output.status.success()));
    succeeds(&["inspect", text(&weights)]);
    assert_eq!(names(&out), ["page.html", "plan.json", "rows.json", "weights.gguf"]);
}

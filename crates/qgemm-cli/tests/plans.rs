//! Plans and tables from the command line.

mod support;

use std::fs;

use serde_json::{Value, json};
use support::{model, qgemm, succeeds, text};

fn parsed(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeds(arguments)).unwrap_or_else(|e| panic!("{arguments:?} prints no JSON: {e}"))
}

#[test]
fn explain_says_what_would_run_and_why() {
    let base = ["explain", "--device", "cpu", "--shape", "8x4096x4096", "--format", "q4_k"];
    let page = succeeds(&base);
    for part in ["kernel ", "why ", "expected ", "roof ", "tile ", "dispatch ", "reduction ", "candidates "] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
    let records = parsed(&[&base[..], &["--json"]].concat());
    let record = &records[0];
    let candidates = record["candidates"].as_array().expect("an array");
    let chosen: Vec<_> = candidates.iter().filter(|c| c["chosen"] == json!(true)).collect();
    assert!(chosen.len() == 1 && chosen[0]["kernel_id"] == record["kernel_id"], "{record}");
    let parts =
        ["memory", "math", "tiles", "fixup", "prologue", "launch"].map(|p| chosen[0]["cost"][p].as_f64().expect(p));
    let longest = parts.iter().copied().fold(0.0, f64::max);
    let bound = chosen[0]["bound"].as_str().expect("a name");
    assert_eq!(chosen[0]["cost"][bound].as_f64(), Some(longest));
    let share = record["roof"]["share"].as_f64().expect("it is planned");
    assert!(share > 0.0 && share <= 1.0, "{share}");
    for other in [["--op", "convert", "--shape", "64x128"], ["--op", "routing", "--shape", "16x64x4"]] {
        let record = &parsed(&[&["explain", "--device", "cpu", "--json"][..], &other].concat())[0];
        assert!(record["kernel_id"].is_string() && record["operation"] == other[1], "{record}");
    }
    let experts = ["explain", "--device", "cpu", "--json", "--op", "experts", "--shape", "16x64x64", "--gated"];
    assert!(parsed(&experts)[0]["problem"].as_str().expect("text").contains("32 experts"));
    let gradient =
        ["explain", "--device", "cpu", "--op", "gradient", "--shape", "8x4096x2048", "--format", "q4_k", "--json"];
    let record = &parsed(&gradient)[0];
    assert_eq!((&record["operation"], &record["shape"]["n"]), (&json!("gradient"), &json!(2048)));
    let unknown = qgemm(&["explain", "--device", "cpu", "--shape", "8x64x64", "--family", "nonesuch"]);
    let told = String::from_utf8_lossy(&unknown.stderr);
    assert!(!unknown.status.success() && told.contains("nonesuch") && told.contains("gemm"), "{told}");
}

#[test]
fn the_plan_of_a_rank_is_written_and_checked_without_it() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (model(folder.path()), folder.path().join("rank.json"));
    let base = ["plan", text(&model), "--batch", "4", "--device", "cpu"];
    let said = succeeds(&[&base[..], &["--tp", "2", "--rank", "1", "-o", text(&output)]].concat());
    // Sums of 4 x 64 behind attention and the feed-forward part, and 4 x 80 logits, in f32.
    assert!(said.contains("rank 1 of 2: 3 collectives"), "{said}");
    let plan: Value = serde_json::from_slice(&fs::read(&output).expect("written")).expect("JSON");
    assert_eq!(plan["runtime"]["ranks"], json!({ "rank": 1, "world": 2 }));
    assert!(succeeds(&[&base[..], &["--check", text(&output)]].concat()).contains("rank 1 of 2"));
    for (options, part) in [
        (&["--tp", "3"][..], "4 query heads of 2 KV heads"),
        (&["--tp", "2", "--rank", "2"], "rank = 2"),
        (&["--rank", "1"], "--tp"),
        (&["--expert-parallel"], "--tp"),
    ] {
        let refused = qgemm(&[&base[..], options].concat());
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && errors.contains(part), "{options:?}: {errors}");
    }
}

#[test]
fn plan_writes_what_it_checks() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, output) = (model(folder.path()), folder.path().join("plan.json"));
    let base = ["plan", text(&model), "--batch", "4", "--device", "cpu"];
    let said = succeeds(&[&base[..], &["-o", text(&output)]].concat());
    assert!(said.contains("llama, 1 layers, 4 tokens") && said.contains("arena"), "{said}");
    // Without a file, the plan is summarized or printed. Estimates
    // depend on the device's measured bandwidth.
    let summary = succeeds(&base);
    assert_eq!(summary.lines().last(), said.lines().last());
    let printed = parsed(&[&base[..], &["--json"]].concat());
    let written: Value = serde_json::from_slice(&fs::read(&output).expect("written")).expect("JSON");
    assert!(printed["memory"].is_object() && printed["memory"] == written["memory"], "{printed}");
    succeeds(&[&base[..], &["--check", text(&output)]].concat());
    let good = fs::read_to_string(&output).expect("written");
    let mut plan: Value = serde_json::from_str(&good).expect("JSON");
    plan["ops"][1]["weight"]["row_bytes"] = json!((64 / 32 + 1) * 34);
    fs::write(&output, plan.to_string()).expect("writable");
    let refused = qgemm(&[&base[..], &["--check", text(&output)]].concat());
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && errors.contains("row_bytes: expected 68, got 102"), "{errors}");
    let training = qgemm(&[&base[..], &["--train", "-o", text(&output)]].concat());
    assert!(training.status.success(), "{training:?}");
    let plan: Value = serde_json::from_slice(&fs::read(&output).expect("written")).expect("JSON");
    assert_eq!(
        (plan["phases"][1]["phase"].as_str(), plan["ops"].as_array().map(Vec::len)),
        (Some("backward"), Some(14 + 8 * 3))
    );
}

#[test]
fn tune_keeps_within_its_budget_and_its_table_is_followed() {
    let folder = tempfile::tempdir().expect("writable");
    let (table, copy) = (folder.path().join("new/tuned.json"), folder.path().join("copy.json"));
    let base = ["tune", "--device", "cpu", "--table", text(&table), "--json"];
    let shape = ["--shape", "8x256x256", "--format", "q8_0", "--budget", "300ms"];
    let start = std::time::Instant::now();
    let rows = parsed(&[&base[..], &shape].concat());
    // Random weights and program start are not the tuner's time.
    // The machine may be busy.
    assert!(start.elapsed().as_secs() < 30);
    assert_eq!((rows[0]["shape"].as_str(), rows.as_array().map(Vec::len)), (Some("8x256x256"), Some(1)));
    let explained = parsed(&[
        "explain",
        "--device",
        "cpu",
        "--shape",
        "8x256x256",
        "--format",
        "q8_0",
        "--tuned",
        text(&table),
        "--json",
    ]);
    assert_eq!(explained[0]["kernel_id"], rows[0]["kernel_id"]);
    assert!(explained[0]["why"].as_str().expect("text").starts_with("measured"), "{}", explained[0]["why"]);
    succeeds(&[&base[..], &["--export", text(&copy)]].concat());
    assert_eq!(fs::read(&copy).expect("written"), fs::read(&table).expect("written"));
    fs::remove_file(&table).expect("there");
    succeeds(&[&base[..], &["--import", text(&copy)]].concat());
    assert_eq!(fs::read(&copy).expect("there"), fs::read(&table).expect("written"));
    // The best kernel is avoided, then allowed again.
    let chosen = || {
        let explain = ["explain", "--device", "cpu", "--shape", "1x64x64", "--format", "q8_0", "--tuned", text(&table)];
        parsed(&[&explain[..], &["--json"]].concat())[0]["kernel_id"].as_str().expect("it has one").to_owned()
    };
    let first = chosen();
    let avoid = qgemm(&["tune", "--table", text(&table), "--avoid", &first, "--why", "a test says so"]);
    assert!(avoid.status.success(), "{avoid:?}");
    let second = chosen();
    assert_ne!(second, first);
    assert!(qgemm(&["tune", "--table", text(&table), "--allow", &first]).status.success());
    assert_eq!(chosen(), first);
    assert!(!qgemm(&["tune", "--table", text(&table), "--allow", &first]).status.success(), "it is not avoided");
    // Experts and matmul are measured and explained, too.
    for (op, shape) in [("experts", "8x64x64"), ("matmul", "64x64x64")] {
        let tune = ["tune", "--device", "cpu", "--op", op, "--shape", shape, "--budget", "2s", "--table", text(&table)];
        let row = &parsed(&[&tune[..], &["--x-dtype", "f32", "--json"]].concat())[0];
        let explain = ["explain", "--device", "cpu", "--op", op, "--shape", shape, "--x-dtype", "f32"];
        let explained = &parsed(&[&explain[..], &["--tuned", text(&table), "--json"]].concat())[0];
        assert_eq!(explained["kernel_id"], row["kernel_id"]);
        assert!(explained["why"].as_str().is_some_and(|why| why.starts_with("measured")), "{}", explained["why"]);
    }
    let wrong = qgemm(&["tune", "--budget", "2 parsecs"]);
    assert!(!wrong.status.success() && String::from_utf8_lossy(&wrong.stderr).contains("2s, 500ms or 3m"));
}

#[test]
fn what_is_prepared_is_planned_at_once() {
    let base = ["prepare", "--device", "cpu", "--shape", "1x64x64", "8x64x64", "--format", "q8_0"];
    let rows = parsed(&[&base[..], &["--json"]].concat());
    assert_eq!((rows[1]["shape"].as_str(), rows.as_array().map(Vec::len)), (Some("8x64x64"), Some(2)));
    assert!(rows[0]["kernel_id"].as_str().expect("text").starts_with("gemm:"), "{rows}");
    let said = qgemm(&[&base[..], &["--budget", "1m", "--memory", "600"]].concat());
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success() && text.contains("2 of 2 problems in "), "{text}");
}

#[test]
fn a_grid_says_how_good_the_choice_is() {
    let output = qgemm(&["bench", "--device", "cpu", "--grid", "2", "--budget", "2s", "--largest", "1", "--json"]);
    let grid: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let rows = grid["rows"].as_array().expect("rows");
    assert!(!rows.is_empty() && rows.len() <= 2 && grid["problems"] == json!(2), "{grid}");
    assert!(rows.iter().all(|row| row["behind_best"].as_f64().is_none_or(|behind| behind >= 0.0)));
    assert!((0.0..=1.0).contains(&grid["share_within"].as_f64().expect("a share")));
}

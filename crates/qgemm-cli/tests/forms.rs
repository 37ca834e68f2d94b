//! Printed tables: CSV, Markdown,
//! text in a terminal.

use std::process::{Command, Output};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

fn qgemm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_qgemm")).args(arguments).output().expect("the command starts")
}

fn succeeds(arguments: &[&str]) -> String {
    let output = qgemm(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn tables_are_csv_and_markdown_too() {
    let csv = succeeds(&["inspect", SAMPLE, "--csv"]);
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("name,format,readable,shape,bytes,bits_per_value"));
    assert!(lines.all(|line| line.contains(",\"[") || line.contains(",[")), "{csv}");
    let markdown = succeeds(&["inspect", SAMPLE, "--markdown"]);
    for part in [
        "| setting | value |\n| --- | --- |\n",
        "| tensor | shape | bytes | bits | format |\n| --- | --- | --: | --: | --- |\n",
    ] {
        assert!(markdown.contains(part), "{markdown}");
    }
    assert!(markdown.contains("ffn\\_up.weight"), "names are text: {markdown}");
    let bench = succeeds(&["bench", "--device", "cpu", "--op", "norm", "--shape", "4x64", "--csv"]);
    let title = bench.lines().next().expect("a title");
    assert!(
        ["device", "microseconds", "noise", "driver", "date", "commit", "command"]
            .iter()
            .all(|name| title.split(',').any(|t| t == *name)),
        "{title}"
    );
    let devices = succeeds(&["devices", "--csv"]);
    assert!(devices.starts_with("device,found.") || devices.starts_with("device,"), "{devices}");
}

#[test]
fn forms_are_refused_where_they_cannot_be() {
    let both = qgemm(&["inspect", SAMPLE, "--csv", "--json"]);
    assert!(String::from_utf8_lossy(&both.stderr).contains("one of --json, --csv and --markdown"));
    let explain = qgemm(&["explain", "--device", "cpu", "--shape", "1x64x64", "--csv"]);
    assert!(!explain.status.success());
    assert!(String::from_utf8_lossy(&explain.stderr).contains("prints no table"));
}

#[test]
fn pipes_get_whole_cells_and_terminals_lines_that_fit() {
    const COLUMNS: usize = 80;
    let whole = succeeds(&["inspect", SAMPLE]);
    assert!(!whole.contains('…'), "{whole}");
    // `script` gives the command a terminal.
    let inner = format!("stty rows 24 cols {COLUMNS}; '{}' devices", env!("CARGO_BIN_EXE_qgemm"));
    let Ok(output) = Command::new("script").args(["-qec", &inner, "/dev/null"]).output() else {
        qgemm_testkit::skipped("tables in a terminal", "there is no program `script`");
        return;
    };
    let shown = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    assert!(shown.contains("q4_k") && shown.contains('…'), "{shown}");
    let widest = shown.lines().max_by_key(|line| line.chars().count()).expect("lines");
    assert!(widest.chars().count() <= COLUMNS, "{widest}");
}

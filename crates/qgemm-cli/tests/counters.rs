//! `qgemm verify --counters` as a user runs it.

use std::process::{Command, Output};

use serde_json::Value;

fn verify(arguments: &[&str]) -> Output {
    let command = ["verify", "--counters", "--format", "q8_0", "--shape", "8x80x512"];
    Command::new(env!("CARGO_BIN_EXE_qgemm")).args(command).args(arguments).output().expect("the command starts")
}

/// Standard output of a command that must succeed. `None`, with a
/// note, without a C++ compiler.
fn verify_emulated(test: &str, arguments: &[&str]) -> Option<String> {
    let output = verify(&[&["--device", "emu:sm75"], arguments].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("C++ compiler") {
        qgemm_testkit::skipped(test, &errors);
        return None;
    }
    assert!(output.status.success(), "{errors}");
    Some(String::from_utf8(output.stdout).expect("tables are text"))
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("{name} in {row}"))
}

#[test]
fn kernels_are_counted_in_all_and_by_place() {
    let Some(text) = verify_emulated("kernels_are_counted_in_all_and_by_place", &["--json"]) else { return };
    let both: Value = serde_json::from_str(&text).expect("JSON");
    let (cases, kernels) = (both["cases"].as_array().expect("cases"), both["kernels"].as_array().expect("kernels"));
    // f32, f16 and bf16 activations have their own kernels, and one
    // kernel packs their weights.
    let (packing, kernels): (Vec<&Value>, Vec<&Value>) =
        kernels.iter().partition(|k| k["kernel"].as_str().is_some_and(|name| name.starts_with("pack:")));
    assert_eq!((cases.len(), kernels.len(), packing.len()), (3, 3, 1));
    assert!(cases.iter().all(|case| case["verdict"] == "pass"));
    for kernel in &kernels {
        // They use split-K and a workspace, with which they run twice.
        assert_eq!(number(kernel, "launches"), 2, "{kernel}");
        assert!(number(kernel, "blocks") >= 2, "{kernel}");
        assert!(number(kernel, "barriers") > 0, "{kernel}");
        let sites = kernel["sites"].as_array().expect("sites");
        for memory in ["shared", "global"] {
            let total = &kernel[memory];
            let here = || sites.iter().filter(|site| site["memory"] == memory);
            for name in ["requests", "units", "ideal"] {
                assert_eq!(here().map(|site| number(site, name)).sum::<u64>(), number(total, name), "{memory} {name}");
            }
            assert!(number(total, "units") >= number(total, "ideal") && number(total, "ideal") > 0, "{kernel}");
        }
        let place = |site: &Value| site["place"].as_str().expect("a place").to_owned();
        assert!(sites.iter().any(|site| place(site).starts_with("mainloop/x_tile.cuh:")), "{kernel}");
    }
    let f16 = kernels
        .iter()
        .find(|k| k["kernel"].as_str().is_some_and(|name| name.contains(",x=f16,")))
        .expect("one for f16");
    // Instructions of 16 rows, 8 tokens and 8 columns.
    assert!(number(&f16["mma"], "mma_m16n8k8_f16") >= 5 * 512 / 8, "{f16}");
}

/// INT8 products on the oldest chips. Their lanes read shared
/// memory without bank conflicts.
#[test]
fn products_of_bytes_have_no_bank_conflicts() {
    for (chip, format, x_format) in [
        ("emu:sm70", "q4_0", "q8_1"),
        ("emu:sm75", "q4_0", "q8_1"),
        ("emu:sm70", "q2_k", "q8_1"),
        ("emu:sm75", "q4_k", "q8_1"),
        ("emu:sm75", "int8_channel", "int8_token"),
    ] {
        let shape = ["--shape", "33x256x512", "--format", format, "--x-format", x_format];
        let command = [&["verify", "--counters", "--json", "--family", "gemm", "--device", chip], &shape[..]].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_qgemm")).args(command).output().expect("the command starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        if errors.contains("C++ compiler") {
            return qgemm_testkit::skipped("products_of_bytes_have_no_bank_conflicts", &errors);
        }
        assert!(output.status.success(), "{errors}");
        let both: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let kernels = both["kernels"].as_array().expect("kernels").iter();
        let of_bytes = |kernel: &&Value| kernel["kernel"].as_str().is_some_and(|name| name.contains("s8_two_stage"));
        let kernels: Vec<_> = kernels.filter(of_bytes).collect();
        assert!(!kernels.is_empty(), "{chip} {format}: {both}");
        for kernel in kernels {
            let shared = &kernel["shared"];
            assert_eq!(number(shared, "units"), number(shared, "ideal"), "{chip} {format}: {kernel}");
        }
    }
}

#[test]
fn the_table_names_places() {
    let Some(text) = verify_emulated("the_table_names_places", &[]) else { return };
    for part in ["wavefronts", "sectors", "barriers", "m16n8k8_f16 ", "entry/gemm_simt.cu:"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
}

#[test]
fn other_devices_do_not_count() {
    let output = verify(&["--device", "cpu"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("--counters") && errors.contains("emulated"), "{errors}");
}

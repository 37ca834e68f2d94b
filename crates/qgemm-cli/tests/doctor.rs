//! `qgemm doctor` on machines with and without faults.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn doctor(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qgemm"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("QGEMM_")) {
        command.env_remove(name);
    }
    command.arg("doctor").args(arguments).envs(variables.iter().copied()).output().expect("the command starts")
}

fn findings(output: &Output) -> Vec<Value> {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn find<'a>(findings: &'a [Value], subject: &str) -> &'a Value {
    findings.iter().find(|finding| finding["subject"] == subject).unwrap_or_else(|| panic!("{subject}: {findings:?}"))
}

#[test]
fn a_sound_machine_is_said_to_be_so() {
    let folder = tempfile::tempdir().expect("writable");
    let cache = folder.path().join("cache");
    let output = doctor(&[("QGEMM_CACHE", cache.to_str().expect("UTF-8"))], &["--json"]);
    let findings = findings(&output);
    for subject in
        ["program", "cpu", "threads", "nvidia driver", "nvrtc", "kernel cache", "wgpu", "emulator", "tuned table"]
    {
        let finding = find(&findings, subject);
        assert!(finding["status"] == "ok" || finding["advice"].is_string(), "{finding}");
    }
    assert!(find(&findings, "environment")["found"].as_str().is_some_and(|text| text.starts_with("QGEMM_CACHE=")));
    assert!(!cache.exists(), "looking changes nothing");
    let fails = findings.iter().any(|finding| finding["status"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(fails)), "{findings:?}");
}

#[test]
fn faults_are_failures_with_advice() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(path("tuned.json"), "no table").expect("writable");
    fs::write(path("k.qgk"), "no bundle").expect("writable");
    let variables = [
        ("QGEMM_NVRTC", path("absent")),
        ("QGEMM_TUNED", path("tuned.json")),
        ("QGEMM_KERNELS", path("k.qgk")),
        ("QGEMM_CASHE", path("x")),
    ];
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let output = doctor(&variables, &["--json"]);
    let findings = findings(&output);
    for (subject, status) in [("nvrtc", "fail"), ("tuned table", "fail"), ("bundle", "fail"), ("environment", "warn")] {
        let finding = find(&findings, subject);
        assert!(finding["status"] == status && finding["advice"].is_string(), "{finding}");
    }
    assert_eq!(output.status.code(), Some(1));
    let text = doctor(&variables, &[]);
    assert!(String::from_utf8_lossy(&text.stdout).lines().any(|line| line.starts_with("FAIL  nvrtc")), "{text:?}");
}

//! Signals while a file is written: nothing unfinished is left.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A checkpoint whose quantization takes seconds: `tensors` matrices of
/// zeros, in a file of holes.
fn checkpoint(path: &Path, tensors: usize) {
    const BYTES: usize = 1024 * 1024 * 4;
    let entry = |i: usize| {
        let (from, to) = (i * BYTES, (i + 1) * BYTES);
        format!("\"t{i}.weight\":{{\"dtype\":\"F32\",\"shape\":[1024,1024],\"data_offsets\":[{from},{to}]}}")
    };
    let header = format!("{{{}}}", (0..tensors).map(entry).collect::<Vec<_>>().join(","));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(path, &bytes).expect("written");
    let file = fs::OpenOptions::new().write(true).open(path).expect("it is there");
    file.set_len((bytes.len() + tensors * BYTES) as u64).expect("a file of holes");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn interrupted_and_terminated_runs_leave_nothing() {
    for (signal, existing) in [("INT", false), ("TERM", true)] {
        let folder = tempfile::tempdir().expect("writable");
        let (model, outputs) = (folder.path().join("m.safetensors"), folder.path().join("out"));
        checkpoint(&model, 64);
        fs::create_dir(&outputs).expect("writable");
        let output = outputs.join("m.gguf");
        if existing {
            fs::write(&output, "old").expect("written");
        }
        let mut quantize = Command::new(env!("CARGO_BIN_EXE_qgemm"));
        quantize.arg("quantize").arg(&model).arg(&output).args(["--format", "iq4_xs", "--force"]);
        let mut running = quantize.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts");
        let is_begun = || {
            let partial = names(&outputs).into_iter().find(|name| name.ends_with(".partial"));
            partial.is_some_and(|name| fs::metadata(outputs.join(name)).is_ok_and(|file| file.len() > 0))
        };
        let end = Instant::now() + Duration::from_secs(60);
        while !is_begun() {
            assert!(running.try_wait().expect("a child").is_none() && Instant::now() < end, "it ended too soon");
            thread::sleep(Duration::from_millis(2));
        }
        let sent = Command::new("kill").args([format!("-{signal}"), running.id().to_string()]).status();
        assert!(sent.expect("it is there").success());
        let status = running.wait().expect("a child");
        assert_eq!(status.code(), Some(130), "{signal}");
        let left = names(&outputs);
        assert_eq!(left, if existing { vec!["m.gguf".to_owned()] } else { Vec::new() }, "{signal}");
        if existing {
            assert_eq!(fs::read_to_string(&output).expect("text"), "old");
        }
    }
}

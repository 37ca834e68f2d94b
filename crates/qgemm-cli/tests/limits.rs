//! Endless inputs, and a system without threads: immediate errors.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

mod support;
use support::{model, succeeds, text};

/// Runs a command that must end soon.
fn ends(command: &mut Command) -> Output {
    let begin = Instant::now();
    let output = command.output().expect("the command starts");
    assert!(begin.elapsed() < Duration::from_secs(60), "{command:?} took {:?}", begin.elapsed());
    output
}

fn refused(arguments: &[&str]) -> String {
    // Opening a pipe would block forever.
    let output = ends(Command::new("timeout").args(["30", env!("CARGO_BIN_EXE_qgemm")]).args(arguments));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
    assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
    errors
}

#[test]
fn pipes_devices_folders_and_endless_files_are_refused_before_they_are_read() {
    let folder = tempfile::tempdir().expect("writable");
    let (model, page) = (model(folder.path()), folder.path().join("page.html"));
    let (pipe, sparse) = (folder.path().join("pipe"), folder.path().join("sparse"));
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("it is there").success());
    File::create(&sparse).and_then(|file| file.set_len(10 << 30)).expect("a file of holes");
    for (path, why) in [
        (pipe.as_path(), "regular file"),
        (Path::new("/dev/zero"), "regular file"),
        (folder.path(), "regular file"),
        (&sparse, "at most"),
    ] {
        let path = text(path);
        for option in ["--results", "--plan", "--verify", "--sweep", "--bench"] {
            let errors = refused(&["report", "--device", "noop", option, path, "-o", text(&page)]);
            assert!(errors.contains(why), "{option} {path}: {errors}");
        }
        for arguments in [
            &["plan", text(&model), "--batch", "1", "--device", "cpu", "--check", path][..],
            &["bench", "--device", "cpu", "--shape", "1x64x64", "--baseline", path],
            &["tune", "--device", "cpu", "--shape", "1x64x64", "--table", path],
            &["tune", "--import", path, "--table", text(&folder.path().join("new.json"))],
        ] {
            let errors = refused(arguments);
            assert!(errors.contains(why), "{arguments:?}: {errors}");
        }
    }
    assert!(!page.exists());
    // A plan of this very model is read.
    let plan = folder.path().join("plan.json");
    succeeds(&["plan", text(&model), "--batch", "1", "--device", "cpu", "-o", text(&plan)]);
    succeeds(&["report", "--device", "noop", "--plan", text(&plan), "-o", text(&page)]);
}

#[test]
fn no_memory_for_threads_is_an_error() {
    let folder = tempfile::tempdir().expect("writable");
    let model = model(folder.path());
    let output = folder.path().join("out.gguf");
    for arguments in [
        &["bench", "--device", "cpu", "--shape", "1x64x64"][..],
        &["quantize", text(&model), text(&output), "--format", "q4_0"],
        &["verify", "--device", "cpu", "--op", "norm"],
    ] {
        // Stacks of so many threads take 20 GB of addresses.
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v 2000000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_qgemm")]).args(arguments);
        let output = ends(command.env("RAYON_NUM_THREADS", "10000"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
        assert!(errors.contains("starting threads") && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
}

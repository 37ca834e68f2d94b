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
            let errors = refused(&["report", option, path, "-o", text(&page)]);
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
fn pipes_beside_a_model_are_refused() {
    let folder = tempfile::tempdir().expect("writable");
    let checkpoint = folder.path().join("m.safetensors");
    let header = r#"{"a.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    std::fs::write(&checkpoint, bytes).expect("written");
    for name in ["config.json", "tokenizer.json"] {
        let pipe = folder.path().join(name);
        assert!(Command::new("mkfifo").arg(&pipe).status().expect("it is there").success());
        let output =
            ends(Command::new("timeout").args(["30", env!("CARGO_BIN_EXE_qgemm"), "inspect"]).arg(&checkpoint));
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert!(printed.contains("regular file"), "{name}: {printed}");
        std::fs::remove_file(pipe).expect("it is there");
    }
    let bundle = folder.path().join("bundle");
    assert!(Command::new("mkfifo").arg(&bundle).status().expect("it is there").success());
    let output =
        ends(Command::new("timeout").args(["50", env!("CARGO_BIN_EXE_qgemm"), "doctor"]).env("QGEMM_KERNELS", bundle));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && printed.contains("not a regular file"), "{printed}");
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

#[test]
fn a_system_without_threads_is_an_error() {
    // Root may start any number of threads.
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let folder = tempfile::tempdir().expect("writable");
    // Others may not be able to read the folder of the build.
    let program = folder.path().join("qgemm");
    std::fs::copy(env!("CARGO_BIN_EXE_qgemm"), &program).expect("copied");
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), everybody).expect("ours");
    let limited =
        ["prlimit", "--nproc=3", text(&program), "verify", "--device", "cpu", "--op", "norm", "--shape", "1x64"];
    let other_user = ["setpriv", "--reuid", "54321", "--clear-groups"];
    let all: Vec<&str> = other_user.into_iter().filter(|_| is_root).chain(limited).collect();
    let mut command = Command::new(all[0]);
    let output = ends(command.args(&all[1..]).env("RAYON_NUM_THREADS", "64").env("HOME", folder.path()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("starting threads") && !errors.contains("panicked"), "{:?}: {errors}", output.status);
}

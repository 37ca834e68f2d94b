//! Disk cache shared by processes: this test starts
//! itself again as the others.

#![allow(clippy::print_stdout, reason = "the other processes report what they did")]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::{env, fs};

use qgemm_cuda::{KernelSpec, Target, build, manifest};
use qgemm_hal::Variant;

/// Marks a child process of the test, with this cache.
const CACHE: &str = "QGEMM_TEST_CACHE";
const TARGET: Target = Target::Ptx { arch: 80, specific: false };

/// Kernel that compiles quickly, with variants `n`.
fn kernel(n: u32) -> KernelSpec {
    let mut spec = manifest(Variant::Sm80).swap_remove(0);
    spec.prelude.push_str(&format!("#define NUMBER {n}\n"));
    spec
}

/// Obtains four kernels. Prints the number of compilations and
/// a hash of the results.
fn be_another_process(cache: &Path) {
    let mut compiled = 0;
    let mut images = Vec::new();
    for n in 0..4 {
        let built = build::compile(cache, &kernel(n), TARGET).unwrap();
        compiled += u32::from(built.compiled_in.is_some());
        images.extend(built.artifact.image);
    }
    println!("compiled {compiled} {}", qgemm_cuda::Sha256Hash::of(&images));
}

fn start(test: &str, cache: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CACHE, cache).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Number of compilations of the process, and the hash of its kernels.
fn report(output: Output) -> (u32, String) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said =
        text.split("compiled ").nth(1).and_then(|said| said.lines().next()).and_then(|said| said.split_once(' '));
    let Some((compiled, hash)) = said.filter(|_| output.status.success()) else {
        panic!("{}: {text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    };
    (compiled.parse().unwrap(), hash.to_owned())
}

/// Whether the compiler is available. Prints a note if not.
fn compiler(test: &str) -> bool {
    build::compiler().map_err(|why| qgemm_testkit::skipped(test, &why.to_string())).is_ok()
}

#[test]
fn processes_share_the_work_and_the_kernels() {
    const TEST: &str = "processes_share_the_work_and_the_kernels";
    if let Some(cache) = env::var_os(CACHE) {
        return be_another_process(Path::new(&cache));
    }
    if !compiler(TEST) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..6).map(|_| start(TEST, cache.path()).spawn().unwrap()).collect();
    let reports: Vec<_> = children.into_iter().map(|child| report(child.wait_with_output().unwrap())).collect();
    assert!(reports.iter().all(|(_, hash)| *hash == reports[0].1), "{reports:?}");
    assert_eq!(reports.iter().map(|(compiled, _)| compiled).sum::<u32>(), 4, "each kernel once: {reports:?}");
    let names = cache.path().read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let strays: Vec<String> = names.filter(|n| !n.ends_with(".qgc") && !n.ends_with(".version")).collect();
    assert!(strays.is_empty(), "{strays:?}");
}

/// Root may write everywhere, so the other process
/// runs as another user then.
#[cfg(unix)]
#[test]
fn a_folder_that_can_only_be_read_serves_what_it_has() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    const TEST: &str = "a_folder_that_can_only_be_read_serves_what_it_has";
    const NOBODY: u32 = 65534;
    if let Some(cache) = env::var_os(CACHE) {
        let cache = Path::new(&cache);
        assert!(fs::write(cache.join("new"), b"").is_err(), "the folder can be written");
        for n in 0..2 {
            let built = build::compile(cache, &kernel(n), TARGET).unwrap();
            assert!(built.compiled_in.is_none(), "kernel {n} was compiled");
        }
        // A missing kernel is compiled, and the failure to store it is reported.
        let error = build::compile(cache, &kernel(2), TARGET).unwrap_err();
        assert!(matches!(error, build::BuildError::Cache { .. }), "{error}");
        println!("compiled 0 done");
        return;
    }
    if !compiler(TEST) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    for n in 0..2 {
        build::compile(cache.path(), &kernel(n), TARGET).unwrap();
    }
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let mut other = start(TEST, cache.path());
    if fs::write(cache.path().join("new"), b"").is_ok() {
        fs::remove_file(cache.path().join("new")).unwrap();
        other.uid(NOBODY).gid(NOBODY);
    }
    match other.spawn() {
        Ok(child) => assert_eq!(report(child.wait_with_output().unwrap()).1, "done"),
        Err(why) => qgemm_testkit::skipped(TEST, &format!("the test cannot be started as another user: {why}")),
    }
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

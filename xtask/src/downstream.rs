//! Builds of other projects: fewer features, other systems,
//! other bindings of CUDA, and crates that share
//! dependencies with qgemm. Code is checked, not run.

/// Sets of backends. Their supersets are what the other steps build.
const FEATURES: [&str; 5] = ["", "cpu", "cuda", "wgpu", "cuda,wgpu"];

/// Oldest checked bindings of the driver API. A machine
/// without a toolkit gets the newest.
const OLDEST_CUDA: &str = "cudarc/cuda-12020";

/// Targets beside the machine's, and backends whose code differs there.
pub const TARGETS: [(&str, &str); 3] = [
    ("x86_64-pc-windows-msvc", "cpu,cuda,wgpu"),
    ("aarch64-apple-darwin", "cpu,cuda,wgpu"),
    ("aarch64-unknown-linux-gnu", "cpu,cuda"),
];

/// Program in `xtask/downstream` for CI.
pub const CUBECL: &str = "cubecl";
/// Program with twice as many dependencies, without a lockfile.
pub const CANDLE_AND_BURN: &str = "candle-burn";

/// Cargo arguments of the checks that need nothing but the workspace.
pub fn checks() -> Vec<Vec<String>> {
    let of_features = FEATURES.map(|features| check("qgemm-api", &["--no-default-features", "--features", features]));
    let of_bindings = check("qgemm-cuda", &["--features", OLDEST_CUDA]);
    of_features.into_iter().chain([of_bindings]).collect()
}

/// Cargo arguments of the check for a target.
pub fn check_target(target: &str, features: &str) -> Vec<String> {
    check("qgemm-api", &["--target", target, "--no-default-features", "--features", features])
}

/// Cargo arguments of a program's check. `target_folder` is the workspace's.
pub fn check_program(folder: &str, target_folder: &str) -> Vec<String> {
    let manifest = format!("xtask/downstream/{folder}/Cargo.toml");
    // CubeCL's build script downloads LLVM otherwise.
    let options = ["--config", "env.DOCS_RS='1'", "--manifest-path", &manifest, "--target-dir", target_folder];
    ["check"].iter().chain(&options).map(|&argument| argument.to_owned()).collect()
}

fn check(package: &str, options: &[&str]) -> Vec<String> {
    ["check", "--package", package].iter().chain(options).map(|&argument| argument.to_owned()).collect()
}

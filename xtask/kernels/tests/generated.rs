//! Generated files of the working tree are current.

use std::process::Command;

/// Runs a command of `cargo xtask`, which must succeed.
fn xtask(arguments: &[&str]) {
    let status = Command::new(env!("CARGO_BIN_EXE_xtask-kernels")).args(arguments).status();
    assert!(status.expect("the program starts").success(), "cargo xtask {}", arguments.join(" "));
}

#[test]
fn parameters_and_layouts_of_kernels() {
    xtask(&["codegen", "--check"]);
}

#[test]
fn the_list_of_kernels_that_spill() {
    xtask(&["spills", "--check"]);
}

#[test]
fn tables_of_results() {
    xtask(&["performance", "--check"]);
}

#[test]
fn numbers_of_kernels() {
    xtask(&["figures", "--check"]);
}

//! Parts that the commands of `cargo xtask` share: the workspace,
//! and packages from PyPI.

#![allow(clippy::print_stdout, reason = "commands print their results")]

pub mod pip;
pub mod workspace;

//! `experts`: MoE grouped GEMM as a sequence of stages.
//! [`stages`] puts them together: convert X, build the
//! expert lists, gather rows of X, multiply, combine.

mod combine;
mod convert;
mod family;
mod gather;
mod grid;
mod list;
mod planned;
mod product;
mod stage;
mod stage_kernel;
mod stages;

pub(super) use family::{FAMILIES, ask_registers, specs};
pub(super) use stages::sequence;

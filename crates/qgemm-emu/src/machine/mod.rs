//! The machine that runs a launch: one block after another, each thread on a stack of its own, every access checked.

mod async_copy;
mod block;
mod callbacks;
mod clock;
mod collective;
mod global;
mod launch;
mod shared;
mod stacks;

pub(crate) use callbacks::Runtime;
pub use global::{Access, Region};
pub(crate) use launch::{Launch, run};

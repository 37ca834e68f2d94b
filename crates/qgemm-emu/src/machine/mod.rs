//! The machine that runs a launch: CTAs one after
//! another, each thread with a separate stack,
//! every access checked.

mod async_copy;
mod atomic;
mod block;
mod callbacks;
mod clock;
mod collective;
mod delivery;
mod global;
mod launch;
mod mbarrier;
mod registers;
mod runtime;
mod shared;
mod stacks;
mod tensor_copy;
mod warpgroup;

pub use global::{Access, Region};
pub(crate) use launch::{Launch, run};
pub(crate) use runtime::Runtime;
pub use tensor_copy::{MOST_DIMENSIONS, Swizzle, TensorMap};

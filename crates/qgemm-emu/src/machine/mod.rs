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
mod shared;
mod stacks;
mod tensor_copy;
mod warpgroup;

pub(crate) use callbacks::Runtime;
pub use global::{Access, Region};
pub(crate) use launch::{Launch, run};
pub use tensor_copy::{MOST_DIMENSIONS, Swizzle, TensorMap};

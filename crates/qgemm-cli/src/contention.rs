//! Other work on this machine, which makes measurements slower: of the
//! cores (Linux), and of NVIDIA GPUs as `nvidia-smi` reports it.

mod cores;
mod gpus;

pub use cores::{Cores, load_average};
pub use gpus::{Gpu, gpus};

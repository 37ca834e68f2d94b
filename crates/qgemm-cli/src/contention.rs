//! Other work on this machine, which slows measurements:
//! on the cores (Linux), and on NVIDIA GPUs by `nvidia-smi`.

mod cores;
mod gpus;

pub use cores::{Cores, load_average};
pub use gpus::{Gpu, gpus};

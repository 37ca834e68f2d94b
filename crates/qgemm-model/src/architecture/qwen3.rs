//! Qwen3: heads of queries and keys are normalized.

use super::{Architecture, RotaryPairs, Window};

/// The architecture.
pub static QWEN3: Architecture = Architecture {
    name: "qwen3",
    gguf_rotary: RotaryPairs::Neox,
    qkv_bias: false,
    head_norms: true,
    window: Window::SomeLayers,
};

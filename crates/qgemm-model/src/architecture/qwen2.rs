//! Qwen2 and Qwen2.5: query, key and value have a bias.

use super::{Architecture, RotaryPairs, Window};

/// The architecture.
pub static QWEN2: Architecture = Architecture {
    name: "qwen2",
    gguf_rotary: RotaryPairs::Neox,
    qkv_bias: true,
    head_norms: false,
    window: Window::SomeLayers,
};

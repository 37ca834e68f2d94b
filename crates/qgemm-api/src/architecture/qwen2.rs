//! Qwen2 and Qwen2.5: query, key and value have a bias.

use super::description::{Architecture, Window};

/// The architecture.
pub static QWEN2: Architecture = Architecture {
    name: "qwen2",
    model_type: "qwen2",
    qkv_bias: true,
    window: Window::SomeLayers,
    ..Architecture::BASE
};

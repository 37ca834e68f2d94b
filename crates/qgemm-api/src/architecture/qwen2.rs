//! Qwen2 and Qwen2.5: query, key and value have a bias.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts, Window};
use super::names::HUGGING_FACE;

/// The architecture.
pub static QWEN2: Architecture = Architecture {
    name: "qwen2",
    model_type: "qwen2",
    names: &HUGGING_FACE,
    gguf_rotary: RotaryPairs::Neox,
    qkv_bias: true,
    head_norms: false,
    window: Window::SomeLayers,
    experts: Experts::None,
};

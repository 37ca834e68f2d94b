//! Qwen3: heads of queries and keys are normalized.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts, Window};
use super::names::HUGGING_FACE;

/// The architecture.
pub static QWEN3: Architecture = Architecture {
    name: "qwen3",
    model_type: "qwen3",
    names: &HUGGING_FACE,
    gguf_rotary: RotaryPairs::Neox,
    qkv_bias: false,
    head_norms: true,
    window: Window::SomeLayers,
    experts: Experts::None,
};

//! Qwen3 with layers of experts, as Qwen3-30B-A3B.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts, Window};
use super::names::HUGGING_FACE;

/// The architecture.
pub static QWEN3_MOE: Architecture = Architecture {
    name: "qwen3moe",
    model_type: "qwen3_moe",
    names: &HUGGING_FACE,
    gguf_rotary: RotaryPairs::Neox,
    qkv_bias: false,
    head_norms: true,
    window: Window::SomeLayers,
    experts: Experts::AsStated,
};

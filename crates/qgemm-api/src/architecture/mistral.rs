//! Mistral: Llama with a sliding window in its first version.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts, Window};
use super::names::HUGGING_FACE;

/// The architecture. GGUF files call it `llama`.
pub static MISTRAL: Architecture = Architecture {
    name: "mistral",
    model_type: "mistral",
    names: &HUGGING_FACE,
    gguf_rotary: RotaryPairs::Interleaved,
    qkv_bias: false,
    head_norms: false,
    window: Window::AllLayers,
    experts: Experts::None,
};

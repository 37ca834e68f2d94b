//! Mistral: Llama with a sliding window in its first version.

use super::{Architecture, RotaryPairs, Window};

/// The architecture. GGUF files call it `llama`.
pub static MISTRAL: Architecture = Architecture {
    name: "mistral",
    gguf_rotary: RotaryPairs::Interleaved,
    qkv_bias: false,
    head_norms: false,
    window: Window::AllLayers,
};

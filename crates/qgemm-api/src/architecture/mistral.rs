//! Mistral: Llama with a sliding window in its first version.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Window};

/// The architecture. GGUF files call it `llama`.
pub static MISTRAL: Architecture = Architecture {
    name: "mistral",
    model_type: "mistral",
    gguf_rotary: RotaryPairs::Interleaved,
    window: Window::AllLayers,
    ..Architecture::BASE
};

//! Llama 1 to 3, SmolLM2, TinyLlama and others of their form.
//! In GGUF files also Mistral.

use super::{Architecture, RotaryPairs, Window};

/// The architecture. Converters to GGUF permute rows of Q and K,
/// so rotary pairs are interleaved there.
pub static LLAMA: Architecture = Architecture {
    name: "llama",
    gguf_rotary: RotaryPairs::Interleaved,
    qkv_bias: false,
    head_norms: false,
    window: Window::None,
};

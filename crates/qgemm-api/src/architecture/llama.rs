//! Llama 1 to 3, SmolLM2, TinyLlama and others of their form.
//! In GGUF files also Mistral and Mixtral.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts};

/// The architecture. Converters to GGUF permute rows of Q and K,
/// so rotary pairs are interleaved there.
pub static LLAMA: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    gguf_rotary: RotaryPairs::Interleaved,
    experts: Experts::Renormalized,
    ..Architecture::BASE
};

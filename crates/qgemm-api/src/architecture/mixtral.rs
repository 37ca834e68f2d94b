//! Mixtral: Mistral with layers of experts.

use qgemm_hal::RotaryPairs;

use super::description::{Architecture, Experts, Window};
use super::names::MIXTRAL as NAMES;

/// The architecture. GGUF files call it `llama`.
pub static MIXTRAL: Architecture = Architecture {
    name: "mixtral",
    model_type: "mixtral",
    names: &NAMES,
    gguf_rotary: RotaryPairs::Interleaved,
    window: Window::AllLayers,
    experts: Experts::Renormalized,
    ..Architecture::BASE
};

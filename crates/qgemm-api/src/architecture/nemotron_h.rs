//! Nemotron-H: layers of Mamba-2, attention, or feed-forward parts of ReLU².

use qgemm_hal::Activation;

use super::description::{Architecture, LayerPattern, Recurrence};
use super::names::{GGUF_NEMOTRON_H, NEMOTRON_H as NAMES};

/// The architecture.
pub static NEMOTRON_H: Architecture = Architecture {
    name: "nemotron_h",
    model_type: "nemotron_h",
    gguf_names: &GGUF_NEMOTRON_H,
    names: &NAMES,
    layers: LayerPattern::OnePart,
    recurrence: Recurrence::Mamba2,
    rotary: false,
    activation: (Activation::ReluSquared, &["relu2"]),
    ..Architecture::BASE
};

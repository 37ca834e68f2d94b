//! Qwen3-Next: gated delta rule on three layers of four, gated attention, experts with a shared one.

use super::description::{Architecture, Experts, LayerPattern, Recurrence};
use super::names::{GGUF_QWEN3_NEXT, QWEN3_NEXT as NAMES};

/// The architecture.
pub static QWEN3_NEXT: Architecture = Architecture {
    name: "qwen3next",
    model_type: "qwen3_next",
    gguf_names: &GGUF_QWEN3_NEXT,
    names: &NAMES,
    ignored: &["mtp."],
    layers: LayerPattern::AllButEvery(4, "linear_attention"),
    recurrence: Recurrence::GatedDelta { tiled: false },
    rotary_share: 0.25,
    attention_gate: true,
    head_norms: true,
    gamma_offset: true,
    experts: Experts::WithShared,
    ..Architecture::BASE
};

//! Qwen3.5, text: dense Qwen3-Next. GGUF files order heads of values otherwise.

use super::description::{Architecture, Experts, Recurrence};
use super::names::{GGUF_QWEN35, QWEN35 as NAMES};
use super::qwen3next::QWEN3_NEXT;

/// The architecture.
pub static QWEN35: Architecture = Architecture {
    name: "qwen35",
    model_type: "qwen3_5_text",
    gguf_names: &GGUF_QWEN35,
    names: &NAMES,
    recurrence: Recurrence::GatedDelta { tiled: true },
    experts: Experts::None,
    ..QWEN3_NEXT
};

//! Qwen3 with layers of experts, as Qwen3-30B-A3B.

use super::description::{Architecture, Experts, Window};

/// The architecture.
pub static QWEN3_MOE: Architecture = Architecture {
    name: "qwen3moe",
    model_type: "qwen3_moe",
    head_norms: true,
    window: Window::SomeLayers,
    experts: Experts::AsStated,
    ..Architecture::BASE
};

//! Qwen3: heads of queries and keys are normalized.

use super::description::{Architecture, Window};

/// The architecture.
pub static QWEN3: Architecture = Architecture {
    name: "qwen3",
    model_type: "qwen3",
    head_norms: true,
    window: Window::SomeLayers,
    ..Architecture::BASE
};

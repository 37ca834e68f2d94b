//! Gemma 3 for text: Gemma with second norms, norms of heads, and windows on five layers of six.

use qgemm_hal::Activation;

use super::description::{Architecture, Window};
use super::names::{GEMMA3 as NAMES, GGUF_GEMMA3};

/// The architecture.
pub static GEMMA3: Architecture = Architecture {
    name: "gemma3",
    model_type: "gemma3_text",
    gguf_names: &GGUF_GEMMA3,
    names: &NAMES,
    window_rotary_base: Some(10_000.0),
    head_norms: true,
    window: Window::AllButEvery(6),
    // 27B.
    unstated_scale_layers: Some(62),
    post_norms: true,
    gamma_offset: true,
    scaled_embedding: true,
    activation: (Activation::GeluTanh, &["gelu_pytorch_tanh"]),
    ..Architecture::BASE
};

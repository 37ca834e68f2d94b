//! gpt-oss: sinks, biases, clamped SwiGLU, and windows on every other layer.

use qgemm_hal::{Activation, ClampedSwiglu};

use super::description::{Architecture, Experts, Window};
use super::names::{GGUF_GPT_OSS, GPT_OSS as NAMES};

/// The architecture. `config.json` calls its activation `silu`.
pub static GPT_OSS: Architecture = Architecture {
    name: "gpt-oss",
    model_type: "gpt_oss",
    gguf_names: &GGUF_GPT_OSS,
    names: &NAMES,
    yarn_truncate: false,
    qkv_bias: true,
    sinks: true,
    window: Window::AllButEvery(2),
    activation: (Activation::ClampedSwiglu(ClampedSwiglu::new(1.702, 1.0, 7.0)), &["silu"]),
    experts: Experts::Renormalized,
    ..Architecture::BASE
};

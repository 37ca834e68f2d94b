//! Gemma: a scaled embedding, GELU,
//! and gammas that are stored less 1.

use qgemm_hal::Activation;

use super::description::Architecture;

/// The architecture.
///
/// Its first files call tanh's approximation `gelu`.
pub static GEMMA: Architecture = Architecture {
    name: "gemma",
    model_type: "gemma",
    gamma_offset: true,
    scaled_embedding: true,
    activation: (Activation::GeluTanh, &["gelu_pytorch_tanh", "gelu"]),
    ..Architecture::BASE
};

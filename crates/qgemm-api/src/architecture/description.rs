//! [`Architecture`]: what differs among decoders of Llama's kind.

use qgemm_hal::RotaryPairs;

use super::names::{GGUF, TensorNames};

/// A decoder of Llama's kind: RMSNorm before each part, rotary embedding, SwiGLU. The fields are what differs.
#[derive(Debug)]
pub struct Architecture {
    /// `general.architecture` of GGUF files.
    pub name: &'static str,
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Names of tensors in safetensors.
    pub names: &'static TensorNames,
    /// Pairs of rotary features in GGUF files; checkpoints in safetensors always have NeoX's.
    pub gguf_rotary: RotaryPairs,
    /// Whether query, key and value must have a bias.
    pub qkv_bias: bool,
    /// Whether heads of queries and keys are normalized.
    pub head_norms: bool,
    /// Layers with a sliding window.
    pub window: Window,
    /// Layers of experts.
    pub experts: Experts,
}

impl Architecture {
    /// Names of tensors in a GGUF file, or in safetensors.
    pub fn names(&self, is_gguf: bool) -> &'static TensorNames {
        if is_gguf { &GGUF } else { self.names }
    }
}

/// Use of `sliding_window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// There is none.
    None,
    /// All layers have it, if it is stated.
    AllLayers,
    /// Some layers have it, if `use_sliding_window` is set.
    SomeLayers,
}

/// Layers of experts, and weights of a token's experts. They are a softmax over all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// There are none.
    None,
    /// Weights are scaled to a sum of 1.
    Renormalized,
    /// Weights are scaled to a sum of 1 if `norm_topk_prob` is set.
    AsStated,
}

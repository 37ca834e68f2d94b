//! [`Architecture`]: what differs among decoders of Llama's kind.

use qgemm_hal::{Activation, RotaryPairs};

use super::names::{GGUF, HUGGING_FACE, TensorNames};

/// A decoder of Llama's kind, as what differs from others.
///
/// All have an RMSNorm before each part, rotary embedding,
/// and gated feed-forward parts.
#[derive(Debug)]
pub struct Architecture {
    /// `general.architecture` of GGUF files.
    pub name: &'static str,
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Names of tensors in GGUF files.
    pub gguf_names: &'static TensorNames,
    /// Names of tensors in safetensors.
    pub names: &'static TensorNames,
    /// Pairs of rotary features in GGUF files; checkpoints in safetensors always have NeoX's.
    pub gguf_rotary: RotaryPairs,
    /// Frequency base of layers with a sliding window, unless
    /// the model states it. Other layers have the model's.
    pub window_rotary_base: Option<f64>,
    /// Whether YaRN's ramp begins and ends at whole pairs, unless the model states it.
    pub yarn_truncate: bool,
    /// Whether query, key and value must have a bias.
    pub qkv_bias: bool,
    /// Whether heads of queries and keys are normalized.
    pub head_norms: bool,
    /// Whether each query head has a sink: a logit in the softmax denominator.
    pub sinks: bool,
    /// Layers with a sliding window.
    pub window: Window,
    /// Layers of the model whose GGUF file states no score scale,
    /// although it is that of hidden features by heads.
    pub unstated_scale_layers: Option<usize>,
    /// Whether parts have a second norm, before their result is added.
    pub post_norms: bool,
    /// Whether gamma is 1 more than the tensor in safetensors. Converters to GGUF add it.
    pub gamma_offset: bool,
    /// Whether the embedding is scaled by the root of its features.
    pub scaled_embedding: bool,
    /// Activation of the gate, and its names in `config.json`.
    pub activation: (Activation, &'static [&'static str]),
    /// Layers of experts.
    pub experts: Experts,
}

impl Architecture {
    /// Fields of llama, which others differ from.
    pub const BASE: Self = Self {
        name: "",
        model_type: "",
        gguf_names: &GGUF,
        names: &HUGGING_FACE,
        gguf_rotary: RotaryPairs::Neox,
        window_rotary_base: None,
        yarn_truncate: true,
        qkv_bias: false,
        head_norms: false,
        sinks: false,
        window: Window::None,
        unstated_scale_layers: None,
        post_norms: false,
        gamma_offset: false,
        scaled_embedding: false,
        activation: (Activation::Silu, &["silu"]),
        experts: Experts::None,
    };

    /// Names of tensors in a GGUF file, or in safetensors.
    pub fn names(&self, is_gguf: bool) -> &'static TensorNames {
        if is_gguf { self.gguf_names } else { self.names }
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
    /// All layers but every n-th have it. The model may state another n, or list the layers.
    AllButEvery(usize),
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

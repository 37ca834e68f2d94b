//! [`Architecture`]: what differs among decoders.

use qgemm_hal::{Activation, RotaryPairs};

use super::names::{GGUF, HUGGING_FACE, TensorNames};

/// A decoder, as what differs from others.
///
/// All have an RMSNorm before each part of a layer: a token mixer
/// and a feed-forward part, or one of them.
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
    /// Tensors that no step needs begin like this.
    pub ignored: &'static [&'static str],
    /// Parts of each layer.
    pub layers: LayerPattern,
    /// Token mixer of layers without attention.
    pub recurrence: Recurrence,
    /// Whether queries and keys have a rotary embedding.
    pub rotary: bool,
    /// Share of a head's features that are rotated, unless the model states it.
    pub rotary_share: f64,
    /// Whether attention's result has a gate, whose projection alternates with that of the
    /// queries, head by head.
    pub attention_gate: bool,
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
        ignored: &[],
        layers: LayerPattern::Attention,
        recurrence: Recurrence::None,
        rotary: true,
        rotary_share: 1.0,
        attention_gate: false,
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

/// Parts of each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPattern {
    /// Attention and a feed-forward part.
    Attention,
    /// A mixer and a feed-forward part. Layers without heads of keys and values have a
    /// recurrent mixer; `layer_types` has this name for them.
    ByHeads(&'static str),
    /// A mixer and a feed-forward part. All layers but every n-th have a recurrent mixer. The model
    /// may state another n, or list the layers by this name.
    AllButEvery(usize, &'static str),
    /// One part: a letter of `hybrid_override_pattern`. In GGUF files the heads of keys and values
    /// and the features of the feed-forward part say which.
    OnePart,
}

/// Token mixer of layers without attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recurrence {
    /// There is none.
    None,
    /// Short convolution between two gates.
    ShortConv,
    /// Gated delta rule. `tiled` says whether heads of values share key heads by `h % key_heads` in
    /// GGUF files.
    GatedDelta {
        /// See above.
        tiled: bool,
    },
    /// Mamba-2.
    Mamba2,
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
    /// As [`Experts::AsStated`], beside a shared expert with a gate of its own.
    WithShared,
}

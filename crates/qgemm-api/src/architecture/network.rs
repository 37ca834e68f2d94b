//! [`Network`]: the tensors of a model by what reads them, and its numbers.

use std::ops::Range;

use qgemm_formats::model::{Model, TensorInfo, TensorKind};
use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;

use super::hyperparameters::Hyperparameters;
use super::recurrence::LinearNumbers;
use super::rotary::RotarySettings;

/// Layers of a model with their tensors and numbers, from the tables of contents of its files.
///
/// ```no_run
/// use qgemm_api::{Network, open_model};
///
/// let model = open_model("model.gguf")?;
/// let network = Network::read(&model, "model.gguf")?;
/// println!("{} of {} layers", network.architecture(), network.layers());
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Network {
    pub(crate) architecture: &'static str,
    /// Features of a token between layers.
    pub(crate) hidden: usize,
    pub(crate) layers: Vec<LayerTensors>,
    /// Rows by token. None in encoders, which add up rows of several tables.
    pub(crate) embedding: Option<Matrix>,
    /// Product that makes logits, if any.
    pub(crate) head: Option<Matrix>,
    /// Whether norms precede the products of their part (pre-norm).
    pub(crate) pre_norm: bool,
    /// Activation of the feed-forward part.
    pub(crate) activation: Activation,
    /// Factor of the embedding.
    pub(crate) embedding_scale: f32,
    /// Factor of attention's scores, where it is not the root of `1 / head_dim`.
    pub(crate) score_scale: Option<f32>,
    pub(crate) heads: Heads,
    /// Rotary embedding, if there is one; an error is the reason why it is the caller's.
    pub(crate) rotary: Option<Result<RotarySettings, String>>,
    /// Rotary embedding of layers with a window, where it differs.
    pub(crate) window_rotary: Option<RotarySettings>,
    /// Tensor of the divisors of rotary frequencies, if there is one.
    pub(crate) rotary_factors: Option<String>,
    /// Epsilon of norms.
    pub(crate) eps: f32,
    /// Norm before the head, or after the embeddings of an encoder.
    pub(crate) outer_norm: NormTensors,
    /// Context length of the model, if stated.
    pub(crate) context: Option<usize>,
    /// Numbers of a decoder.
    pub(crate) numbers: Option<Hyperparameters>,
    /// Hash of names, kinds, shapes and sizes of all tensors.
    pub(crate) fingerprint: String,
    pub(crate) weight_bytes: WeightBytes,
}

/// Head counts and dimensions of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Tensors of a norm.
#[derive(Clone, Debug)]
pub(crate) struct NormTensors {
    pub gamma: (String, DType),
    pub beta: Option<(String, DType)>,
    /// Whether gamma is 1 more than the tensor.
    pub gamma_offset: bool,
}

/// Parts of a layer, each with the norm at it.
#[derive(Clone, Debug)]
pub(crate) struct LayerTensors {
    /// Token mixer.
    pub mixer: Option<(NormTensors, Mixer)>,
    pub feed_forward: Option<(NormTensors, FeedForward)>,
    /// Norms of the results of both parts, before they are added.
    pub post_norms: Option<[NormTensors; 2]>,
}

/// Token mixer of a layer.
#[derive(Clone, Debug)]
pub(crate) enum Mixer {
    Attention(AttentionTensors),
    ShortConv(ConvTensors),
    Linear(LinearTensors),
}

impl Mixer {
    /// Whether the mixer has a recurrent state.
    pub fn recurs(&self) -> bool {
        !matches!(self, Self::Attention(_))
    }

    /// Output projection.
    pub fn output(&self) -> &Matrix {
        match self {
            Self::Attention(attention) => &attention.o,
            Self::ShortConv(conv) => &conv.o,
            Self::Linear(linear) => &linear.o,
        }
    }

    /// Beginning of the names of its operations.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attention(_) => "attn",
            Self::ShortConv(_) => "conv",
            Self::Linear(_) => "linear",
        }
    }
}

/// Tensors of a short convolution between two gates (LFM2).
#[derive(Clone, Debug)]
pub(crate) struct ConvTensors {
    /// Input gate, output gate and input, in this order of rows.
    pub input: Matrix,
    pub conv: Kernel,
    pub o: Matrix,
}

/// Kernel of a short convolution.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub tensor: String,
    pub bias: Option<String>,
    /// Taps.
    pub width: usize,
}

/// Tensors of linear attention.
#[derive(Clone, Debug)]
pub(crate) struct LinearTensors {
    pub form: LinearForm,
    /// Queries, keys and values, in the order of `form`.
    pub qkv: Matrix,
    /// Gate of the result.
    pub gate: Matrix,
    /// Logits of β.
    pub beta: Option<Matrix>,
    /// Summand of the time step.
    pub step: Matrix,
    pub conv: Kernel,
    /// Logarithm of the decay rate, and whether the tensor has the negative rate instead.
    pub a_log: (String, bool),
    pub dt_bias: String,
    /// Factor of values in the result.
    pub skip: Option<String>,
    pub norm: NormTensors,
    pub o: Matrix,
    pub numbers: LinearNumbers,
}

/// Kind of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinearForm {
    /// Gated delta rule. Channels are queries, keys, values.
    GatedDelta { tiled: bool },
    /// Mamba-2. Channels are values (x), keys (B), queries (C).
    Mamba2,
}

/// Tensors of attention.
#[derive(Clone, Debug)]
pub(crate) struct AttentionTensors {
    pub q: Matrix,
    /// Gate of the result.
    pub gate: Option<Matrix>,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    /// Norms of query and key heads.
    pub head_norms: Option<[NormTensors; 2]>,
    /// Sinks of the query heads.
    pub sinks: Option<String>,
    /// Keys that a query attends to at most.
    pub window: Option<usize>,
}

/// Feed-forward part of a layer.
#[expect(clippy::large_enum_variant, reason = "a model has tens of layers")]
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    /// `down(activation(up))`, with an optional gate.
    Dense { gate: Option<Matrix>, up: Matrix, down: Matrix },
    /// Router and its experts.
    Experts(ExpertTensors),
}

/// Tensors of a layer of experts.
#[derive(Clone, Debug)]
pub(crate) struct ExpertTensors {
    pub router: Matrix,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
    pub experts: usize,
    pub top_k: usize,
    /// Whether the weights of a token's experts are scaled to a sum of 1.
    pub renormalized: bool,
    pub shared: Option<SharedExpert>,
    /// Experts whose weights the device has: all, or a rank's.
    pub local: Range<usize>,
}

/// Shared expert of a layer, which processes every token.
#[derive(Clone, Debug)]
pub(crate) struct SharedExpert {
    /// Row whose product's sigmoid is the weight of the expert.
    pub weight: Matrix,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// Rows of a tensor: `first..first + count` of every `every` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub first: usize,
    pub count: usize,
    pub every: usize,
}

/// Weight of the model. For experts, the weight of one.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Tensor name. For experts with their own tensors, that of the first. Gate and up of one
    /// name are a stack of alternating rows.
    pub tensor: String,
    /// Rows of the tensor, one range after the other. Empty for all in their order.
    pub rows: Vec<Rows>,
    pub format: Format,
    pub n: usize,
    pub k: usize,
    pub row_scale: bool,
    pub k_order: bool,
    pub bias: Option<(String, DType)>,
}

impl Network {
    /// Name of the architecture.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether a layer has a recurrent state, which lives across steps and cannot be
    /// rewound.
    pub fn recurs(&self) -> bool {
        self.layers.iter().any(|layer| layer.mixer.as_ref().is_some_and(|(_, mixer)| mixer.recurs()))
    }

    /// Rows of the embedding: tokens of the vocabulary. None in encoders.
    pub fn vocabulary(&self) -> Option<usize> {
        self.embedding.as_ref().map(|embedding| embedding.n)
    }

    /// Sizes and constants of a decoder. None for encoders.
    pub fn hyperparameters(&self) -> Option<&Hyperparameters> {
        self.numbers.as_ref()
    }

    /// Average bytes of weights that a step of `tokens` tokens reads, in the checkpoint's
    /// formats.
    ///
    /// An embedding counts if it is tied to the head. Experts count as often as a router
    /// that is balanced chooses them.
    pub fn weight_bytes(&self, tokens: usize) -> f64 {
        self.weight_bytes.of_step(tokens)
    }
}

/// Bytes of a checkpoint's tensors, by what reads them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightBytes {
    /// Read by every step.
    pub shared: usize,
    /// Bytes of all experts.
    pub experts: usize,
    /// Share of the experts that a token does not choose.
    pub idle: f64,
}

impl WeightBytes {
    /// Average bytes that a step of `tokens` tokens reads. Tokens
    /// choose their experts evenly and independently.
    fn of_step(self, tokens: usize) -> f64 {
        self.shared as f64 + self.experts as f64 * (1.0 - self.idle.powf(tokens as f64))
    }
}

/// Fingerprint: hash of names, kinds, shapes and sizes of all tensors.
pub(crate) fn fingerprint(model: &Model) -> String {
    let mut lines: Vec<String> = model.tensors().iter().map(line).collect();
    lines.sort();
    let mut hash = hmac_sha256::Hash::new();
    lines.iter().for_each(|line| hash.update(line.as_bytes()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn line(tensor: &TensorInfo) -> String {
    let kind = match &tensor.kind {
        TensorKind::Quantized(format) => format.name,
        TensorKind::Dense(dtype) => dtype.name(),
        TensorKind::Opaque(_) => "opaque",
    };
    format!("{}\0{kind}\0{:?}\0{}\n", tensor.name, tensor.shape, tensor.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_the_experts_of_its_tokens() {
        let bytes = WeightBytes { shared: 100, experts: 800, idle: 0.75 };
        assert_eq!(bytes.of_step(1), 300.0);
        assert_eq!(bytes.of_step(2), 100.0 + 800.0 * (1.0 - 0.75 * 0.75));
        assert!(bytes.of_step(1000) > 899.9);
        assert_eq!(WeightBytes { experts: 0, ..bytes }.of_step(5), 100.0);
    }
}

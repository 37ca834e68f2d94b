//! MoE layer description ([`Moe`]): everything besides the experts' products.

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};

use crate::gemm::Problem;
use crate::quantization::Quantization;
use crate::routing::Routing;
use crate::weight::Weight;

/// Description of a [`MoeLayer`](super::MoeLayer), built in
/// [`Context::moe_layer`](crate::Context::moe_layer).
#[derive(Clone, Debug)]
pub struct Moe {
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) x_dtype: DType,
    pub(super) x_quantization: Option<Quantization>,
    pub(super) d_dtype: DType,
    pub(super) activation: Activation,
    pub(super) routing: Option<Routing>,
    pub(super) shared: Option<(Weight, Weight)>,
    pub(super) last_is_shared: bool,
    /// First local expert, and number of all experts.
    pub(super) local: Option<(usize, usize)>,
    pub(super) residual: Option<DType>,
    pub(super) biases: [Option<DType>; 2],
    pub(super) x_precision: XPrecision,
    pub(super) batch_invariant: bool,
}

impl Moe {
    pub(super) fn new(experts: usize, top_k: usize) -> Self {
        Self {
            experts,
            top_k,
            x_dtype: DType::F32,
            x_quantization: None,
            d_dtype: DType::F32,
            activation: Activation::Silu,
            routing: None,
            shared: None,
            last_is_shared: false,
            local: None,
            residual: None,
            biases: [None; 2],
            x_precision: XPrecision::default(),
            batch_invariant: false,
        }
    }

    /// Element type of X and of the intermediate activations. f32 by default.
    pub fn x_dtype(mut self, dtype: DType) -> Self {
        self.x_dtype = dtype;
        self
    }

    /// Quantization of X, with `K` columns and any number of rows. [`Moe::x_dtype`] is then
    /// the type of the intermediate activations only.
    pub fn x_quantization(mut self, quantization: &Quantization) -> Self {
        self.x_quantization = Some(quantization.clone());
        self
    }

    /// Applies the layer's X to `p`.
    pub(super) fn of_x(&self, p: Problem) -> Problem {
        match &self.x_quantization {
            Some(quantization) => p.x_quantization(quantization),
            None => p.x_dtype(self.x_dtype),
        }
    }

    /// Allowed rounding of activations in all products; see
    /// [`Problem::x_precision`](crate::Problem::x_precision).
    pub fn x_precision(mut self, precision: XPrecision) -> Self {
        self.x_precision = precision;
        self
    }

    /// Makes the bits of a token independent of the other tokens; see
    /// [`Problem::batch_invariant`](crate::Problem::batch_invariant).
    pub fn batch_invariant(mut self, on: bool) -> Self {
        self.batch_invariant = on;
        self
    }

    /// Applies the layer's precision to `p`.
    pub(super) fn arithmetic(&self, p: Problem) -> Problem {
        p.x_precision(self.x_precision).batch_invariant(self.batch_invariant)
    }

    /// Element type of D. f32 by default.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = dtype;
        self
    }

    /// Activation after the first products. SiLU by default. Gated
    /// pairs apply it to the gate.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Routes from logits of type `dtype`, by the [`Routing`] that `describe` builds.
    /// Otherwise ids and weights are given.
    pub fn routed(mut self, dtype: DType, describe: impl FnOnce(Routing) -> Routing) -> Self {
        self.routing = Some(describe(Routing::from_logits(1, self.experts, self.top_k, dtype)));
        self
    }

    /// Makes the last expert a shared one: every token uses it with weight 1,
    /// besides its `top_k` others.
    ///
    /// It runs in the launches of the other experts and must have their shape;
    /// [`Moe::shared`] takes other shapes. Only for [routed](Moe::routed) layers, whose
    /// logits exclude it. Given ids can contain the shared expert themselves.
    pub fn last_is_shared(mut self) -> Self {
        self.last_is_shared = true;
        self
    }

    /// Expert parallelism: the layer has the experts from `first` on of `experts` in all, as
    /// [`HostExperts::shard_experts`](crate::HostExperts::shard_experts) cuts them.
    ///
    /// Logits cover all experts. D is the weighted sum over a token's local experts, and 0 for a token
    /// that has none. The D of all ranks add up to the layer's result, so exactly one rank adds a
    /// residual, or a shared expert of another shape. Biases are those of local experts. Only for
    /// [routed](Moe::routed) layers.
    pub fn local(mut self, first: usize, experts: usize) -> Self {
        self.local = Some((first, experts));
        self
    }

    /// Slots per token.
    pub(super) fn slots(&self) -> usize {
        self.top_k.saturating_add(self.last_is_shared.into())
    }

    /// Adds a shared expert with its own weights: up (or a gated pair) and down, which cost
    /// one launch each. [`Moe::last_is_shared`] costs none.
    pub fn shared(mut self, up: &Weight, down: &Weight) -> Self {
        self.shared = Some((up.clone(), down.clone()));
        self
    }

    /// Adds biases of all experts' up, concatenated, as in
    /// [`Problem::bias`](crate::Problem::bias).
    pub fn up_bias(mut self, dtype: DType) -> Self {
        self.biases[0] = Some(dtype);
        self
    }

    /// Adds biases of all experts' down, concatenated.
    pub fn down_bias(mut self, dtype: DType) -> Self {
        self.biases[1] = Some(dtype);
        self
    }

    /// Adds a residual of this type.
    pub fn residual(mut self, dtype: DType) -> Self {
        self.residual = Some(dtype);
        self
    }
}

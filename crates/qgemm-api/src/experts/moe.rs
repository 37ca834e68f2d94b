//! [`Moe`]: what a layer of experts computes beside its products.

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};

use crate::gemm::Problem;
use crate::quantization::Quantization;
use crate::routing::Routing;
use crate::weight::Weight;

/// What a [`MoeLayer`](super::MoeLayer) computes beside its products with the experts; stated in [`Context::moe_layer`](crate::Context::moe_layer).
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
    pub(super) residual: Option<DType>,
    pub(super) biases: [Option<DType>; 2],
    pub(super) x_precision: XPrecision,
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
            residual: None,
            biases: [None; 2],
            x_precision: XPrecision::default(),
        }
    }

    /// The type of X, and of what the first products pass on to the second. f32 when not given.
    pub fn x_dtype(mut self, dtype: DType) -> Self {
        self.x_dtype = dtype;
        self
    }

    /// X is what this quantization writes, of `K` columns and any number of rows, and [`Moe::x_dtype`] the type of what the first products pass on alone.
    pub fn x_quantization(mut self, quantization: &Quantization) -> Self {
        self.x_quantization = Some(quantization.clone());
        self
    }

    /// `p`, of X as the layer has it.
    pub(super) fn of_x(&self, p: Problem) -> Problem {
        match &self.x_quantization {
            Some(quantization) => p.x_quantization(quantization),
            None => p.x_dtype(self.x_dtype),
        }
    }

    /// What activations of all products may be rounded to, as [`Problem::x_precision`](crate::Problem::x_precision) says.
    pub fn x_precision(mut self, precision: XPrecision) -> Self {
        self.x_precision = precision;
        self
    }

    /// The type of D. f32 when not given.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = dtype;
        self
    }

    /// What the first products go through: SiLU when not given. Of gated pairs, the gate does.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Chooses experts from logits of type `dtype`, as `describe` says of a [`Routing`]. Else ids and weights are given.
    pub fn routed(mut self, dtype: DType, describe: impl FnOnce(Routing) -> Routing) -> Self {
        self.routing = Some(describe(Routing::from_logits(1, self.experts, self.top_k, dtype)));
        self
    }

    /// The last expert is one that every token goes to, beside the `top_k` that are chosen of the others, with weight 1. It is multiplied
    /// in the launches of the others, and must be like them; one of another size, [`Moe::shared`] adds. Only of a layer that is
    /// [routed](Moe::routed), with logits for the others alone; with given ids, give its own among them.
    pub fn last_is_shared(mut self) -> Self {
        self.last_is_shared = true;
        self
    }

    /// Slots of a token.
    pub(super) fn slots(&self) -> usize {
        self.top_k.saturating_add(self.last_is_shared.into())
    }

    /// Adds the products of an expert that every token goes to: a pair of gate and up or one weight, and a down, each of which takes a
    /// launch of its own. [`Moe::last_is_shared`] takes none.
    pub fn shared(mut self, up: &Weight, down: &Weight) -> Self {
        self.shared = Some((up.clone(), down.clone()));
        self
    }

    /// Adds biases of this type to the products of the experts' up, those of all experts one after the other, as
    /// [`Problem::bias`](crate::Problem::bias) has them.
    pub fn up_bias(mut self, dtype: DType) -> Self {
        self.biases[0] = Some(dtype);
        self
    }

    /// The same of down.
    pub fn down_bias(mut self, dtype: DType) -> Self {
        self.biases[1] = Some(dtype);
        self
    }

    /// Adds a residual of this type to the sum.
    pub fn residual(mut self, dtype: DType) -> Self {
        self.residual = Some(dtype);
        self
    }
}

//! Weights of a decoder on the device, and how products with them round.

use std::collections::HashSet;

use qgemm_api::{
    Buffer, BufferRef, Context, DType, FusedWeight, GatherRows, HostWeight, Linear, Model, Stream, Weight, Workspace,
    XPrecision,
};

use crate::architecture::{Architecture, TensorNames};
use crate::error::Error;
use crate::feed_forward::FeedForward;
use crate::hyperparameters::Hyperparameters;
use crate::loader::Loader;
use crate::rotary::{RotaryEmbedding, RotarySettings};

/// Arithmetic of a model.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Type of activations between operations. The residual stream and logits are f32.
    pub activations: DType,
    /// Permission to round X of products further.
    pub x_precision: XPrecision,
    /// Logits of a session do not depend on the other sessions of a step.
    pub batch_invariant: bool,
}

impl Default for Precision {
    fn default() -> Self {
        Self { activations: DType::F16, x_precision: XPrecision::default(), batch_invariant: false }
    }
}

/// A decoder that is loaded.
pub struct Decoder {
    /// Its sizes.
    pub numbers: Hyperparameters,
    /// Its arithmetic.
    pub precision: Precision,
    /// Token embedding. A model with tied weights has the head's memory here.
    pub embedding: Weight,
    /// Rotary embedding.
    pub rotary: RotaryEmbedding,
    /// Its layers.
    pub layers: Vec<Layer>,
    /// Norm before the head.
    pub output_norm: Buffer,
    /// Output head: logits in f32.
    pub head: Projection,
}

/// A layer of a decoder.
pub struct Layer {
    /// Gamma of the norm before attention.
    pub attention_norm: Buffer,
    /// Query, key and value projections.
    pub qkv: Qkv,
    /// Gammas of the heads of queries and keys.
    pub head_norms: Option<[Buffer; 2]>,
    /// Keys that a query attends to at most.
    pub window: Option<usize>,
    /// Output projection; adds to the residual stream.
    pub attention_output: Projection,
    /// Gamma of the norm before the feed-forward part.
    pub ffn_norm: Buffer,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
}

/// A product with its bias.
pub struct Projection {
    /// The product.
    pub linear: Linear,
    /// Its bias in f32.
    pub bias: Option<Buffer>,
}

/// Query, key and value projections.
pub struct Qkv {
    /// The weight, with a segment each.
    pub weight: FusedWeight,
    /// Bias of all segments.
    pub bias: Option<Buffer>,
}

impl Projection {
    /// The product of `m` rows of X. `gamma` is that of its norm, if it has one.
    ///
    /// # Errors
    /// A device error.
    pub fn run<'a>(
        &'a self,
        stream: &Stream,
        m: usize,
        x: impl Into<BufferRef<'a>>,
        d: &'a mut Buffer,
        gamma: Option<&'a Buffer>,
        workspace: &'a mut Workspace,
    ) -> Result<(), Error> {
        let mut args = self.linear.args(x.into(), d).workspace(workspace);
        (args.bias, args.gamma) = (self.bias.as_ref().map(Buffer::view), gamma.map(Buffer::view));
        Ok(self.linear.run(stream, m, args)?)
    }
}

impl Decoder {
    /// Loads the weights of `model`.
    ///
    /// # Errors
    /// When a tensor is missing, has another shape or is not part of the architecture; a device error.
    pub fn load(
        ctx: &Context,
        model: &Model,
        (architecture, names): (&'static Architecture, &'static TensorNames),
        numbers: Hyperparameters,
        (rotary, positions): (RotarySettings, usize),
        precision: Precision,
    ) -> Result<Self, Error> {
        let used = HashSet::new();
        let mut loader = Loader { ctx, model, architecture, names, numbers: &numbers, precision, used };
        let vocabulary = loader.model.info(names.embedding)?.shape.first().copied().unwrap_or(0);
        let embedding = ctx.load(&loader.matrix(names.embedding, vocabulary, numbers.hidden)?)?;
        // Only what depends on the weight can fail: a table that no kernel reads is refused at once.
        ctx.plan_gather_rows(&GatherRows::new(&embedding, 1))?;
        let layers = (0..numbers.layers).map(|i| loader.layer(i)).collect::<Result<_, Error>>()?;
        let output_norm = loader.gamma(names.output_norm, numbers.hidden)?;
        // Without a head, the embedding is the head, too.
        let head = match loader.has(names.head) {
            true => ctx.load(&loader.matrix(names.head, vocabulary, numbers.hidden)?)?,
            false => embedding.clone(),
        };
        let head = loader.normed(&head, DType::F32, None)?;
        let factors = match loader.has(names.rotary_factors) {
            true => Some(loader.vector(names.rotary_factors, rotary.pairs())?),
            false => None,
        };
        loader.check_all_used()?;
        let rotary = rotary.embedding(ctx, factors.as_deref(), positions)?;
        Ok(Self { numbers, precision, embedding, rotary, layers, output_norm, head })
    }

    /// Tokens of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.embedding.n()
    }
}

impl Loader<'_> {
    fn layer(&mut self, index: usize) -> Result<Layer, Error> {
        let names = self.names;
        let prefix = format!("{}{index}.", names.layer);
        let name = |part: &str| format!("{prefix}{part}");
        let &Hyperparameters { hidden, heads, head_dim, .. } = self.numbers;
        let head_norms = match self.architecture.head_norms {
            true => {
                let [q, k] = names.head_norms.map(|part| self.gamma(&name(part), head_dim));
                Some([q?, k?])
            }
            false => None,
        };
        Ok(Layer {
            attention_norm: self.gamma(&name(names.attention_norm), hidden)?,
            qkv: self.qkv(names.qkv.map(name))?,
            head_norms,
            window: self.numbers.window_of(index),
            attention_output: self.residual(&name(names.attention_output), heads * head_dim)?,
            ffn_norm: self.gamma(&name(names.ffn_norm), hidden)?,
            feed_forward: self.feed_forward(&prefix)?,
        })
    }

    /// Query, key and value as segments of one X.
    fn qkv(&mut self, names: [String; 3]) -> Result<Qkv, Error> {
        let &Hyperparameters { hidden, heads, kv_heads, head_dim, .. } = self.numbers;
        let features = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
        let mut parts = Vec::new();
        for (name, n) in names.iter().zip(features) {
            let weight = self.matrix(name, n, hidden)?;
            let bias = self.bias(name, n)?;
            if bias.is_none() && self.architecture.qkv_bias {
                self.model.info(&format!("{name}.bias"))?;
            }
            parts.push((weight, bias));
        }
        let weights: Vec<&HostWeight> = parts.iter().map(|(weight, _)| weight).collect();
        let weight = self.ctx.load_fused(&weights)?;
        let has_bias = parts.iter().any(|(_, bias)| bias.is_some());
        let of_part =
            |((_, bias), n): (&(HostWeight, Option<Vec<f32>>), usize)| bias.clone().unwrap_or_else(|| vec![0.0; n]);
        let bias: Vec<f32> = parts.iter().zip(features).flat_map(of_part).collect();
        let bias = has_bias.then(|| self.ctx.upload(&bias)).transpose()?;
        Ok(Qkv { weight, bias })
    }
}

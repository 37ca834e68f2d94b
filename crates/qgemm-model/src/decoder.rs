//! Weights of a decoder on the device.

use std::collections::HashSet;

use qgemm_api::{Buffer, Context, DType, FusedWeight, GatherRows, HostWeight, Model, Weight};

use crate::architecture::{Architecture, TensorNames};
use crate::error::Error;
use crate::feed_forward::FeedForward;
use crate::hyperparameters::Hyperparameters;
use crate::loader::Loader;
use crate::precision::Precision;
use crate::projection::Projection;
use crate::rotary::{RotaryEmbedding, RotarySettings};
use crate::tensors::Tensors;

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

/// Query, key and value projections.
pub struct Qkv {
    /// The weight, with a segment each.
    pub weight: FusedWeight,
    /// Bias of all segments.
    pub bias: Option<Buffer>,
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
        let tensors = Tensors { ctx, model, architecture: architecture.name, precision, used: HashSet::new() };
        let mut loader = Loader { tensors, architecture, names, numbers: &numbers };
        let vocabulary = model.info(names.embedding)?.shape.first().copied().unwrap_or(0);
        let embedding = ctx.load(&loader.tensors.matrix(names.embedding, vocabulary, numbers.hidden)?)?;
        // Only what depends on the weight can fail: a table that no kernel reads is refused at once.
        ctx.plan_gather_rows(&GatherRows::new(&embedding, 1))?;
        let layers = (0..numbers.layers).map(|i| loader.layer(i)).collect::<Result<_, Error>>()?;
        let output_norm = loader.tensors.device_vector(names.output_norm, numbers.hidden)?;
        // Without a head, the embedding is the head, too.
        let head = match loader.tensors.has(names.head) {
            true => ctx.load(&loader.tensors.matrix(names.head, vocabulary, numbers.hidden)?)?,
            false => embedding.clone(),
        };
        let head = loader.normed(&head, DType::F32, None)?;
        let factors = match loader.tensors.has(names.rotary_factors) {
            true => Some(loader.tensors.vector(names.rotary_factors, rotary.pairs())?),
            false => None,
        };
        loader.tensors.check_all_used()?;
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
                let [q, k] = names.head_norms.map(|part| self.tensors.device_vector(&name(part), head_dim));
                Some([q?, k?])
            }
            false => None,
        };
        Ok(Layer {
            attention_norm: self.tensors.device_vector(&name(names.attention_norm), hidden)?,
            qkv: self.qkv(names.qkv.map(name))?,
            head_norms,
            window: self.numbers.window_of(index),
            attention_output: self.tensors.residual(&name(names.attention_output), [hidden, heads * head_dim])?,
            ffn_norm: self.tensors.device_vector(&name(names.ffn_norm), hidden)?,
            feed_forward: self.feed_forward(&prefix)?,
        })
    }

    /// Query, key and value as segments of one X.
    fn qkv(&mut self, names: [String; 3]) -> Result<Qkv, Error> {
        let &Hyperparameters { hidden, heads, kv_heads, head_dim, .. } = self.numbers;
        let features = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
        let mut parts = Vec::new();
        for (name, n) in names.iter().zip(features) {
            let weight = self.tensors.matrix(name, n, hidden)?;
            let bias = self.tensors.bias(name, n)?;
            if bias.is_none() && self.architecture.qkv_bias {
                self.tensors.model.info(&format!("{name}.bias"))?;
            }
            parts.push((weight, bias));
        }
        let weights: Vec<&HostWeight> = parts.iter().map(|(weight, _)| weight).collect();
        let weight = self.tensors.ctx.load_fused(&weights)?;
        let has_bias = parts.iter().any(|(_, bias)| bias.is_some());
        let of_part =
            |((_, bias), n): (&(HostWeight, Option<Vec<f32>>), usize)| bias.clone().unwrap_or_else(|| vec![0.0; n]);
        let bias: Vec<f32> = parts.iter().zip(features).flat_map(of_part).collect();
        let bias = has_bias.then(|| self.tensors.ctx.upload(&bias)).transpose()?;
        Ok(Qkv { weight, bias })
    }
}

//! Weights of an encoder on the device.

use std::collections::HashSet;

use qgemm_api::{
    Buffer, Context, DType, EncoderNames, EncoderNumbers, FusedWeight, GatherRows, Model, NormFunction, Weight,
    quantize,
};

use crate::error::Error;
use crate::precision::Precision;
use crate::projection::Projection;
use crate::tensors::{Tensors, with_bias};

/// An encoder that is loaded.
pub struct EncoderWeights {
    /// Word embeddings.
    pub words: Weight,
    /// Position embeddings, with that of the first segment added.
    pub positions: Weight,
    /// Norm of the sum of embeddings.
    pub norm: LayerNorm,
    /// Its layers.
    pub layers: Vec<EncoderLayer>,
}

/// A layer of an encoder. Norms follow attention and the feed-forward part.
pub struct EncoderLayer {
    /// Query, key and value.
    pub qkv: FusedWeight,
    /// Bias of all three, f32.
    pub qkv_bias: Buffer,
    /// Output projection of attention; adds to the residual stream.
    pub attention_output: Projection,
    /// Norm behind attention.
    pub attention_norm: LayerNorm,
    /// Up projection, with the activation.
    pub up: Projection,
    /// Down projection; adds to the residual stream.
    pub down: Projection,
    /// Norm behind the feed-forward part.
    pub ffn_norm: LayerNorm,
}

/// Gamma and beta of a LayerNorm, f32.
pub struct LayerNorm {
    /// Factors.
    pub gamma: Buffer,
    /// Offsets.
    pub beta: Buffer,
}

impl LayerNorm {
    /// LayerNorm with gamma and beta.
    pub fn function(eps: f32) -> NormFunction {
        NormFunction::layer(eps).gamma(DType::F32).beta(DType::F32)
    }
}

impl EncoderWeights {
    /// Loads the weights of `model`.
    ///
    /// # Errors
    /// When a tensor is missing, has another shape or is not part of the architecture; a device error.
    pub fn load(
        ctx: &Context,
        model: &Model,
        names: &'static EncoderNames,
        numbers: &EncoderNumbers,
        precision: Precision,
    ) -> Result<Self, Error> {
        let tensors = Tensors { ctx, model, architecture: "bert", precision, used: HashSet::new() };
        let prefix = if tensors.has(&format!("{}{}", names.prefix, names.words)) { names.prefix } else { "" };
        let mut loader = Loader { tensors, names, numbers, prefix };
        let weights = loader.all()?;
        let heads: Vec<String> = names.heads.iter().map(|head| format!("{prefix}{head}")).chain(own(names)).collect();
        let is_head = |name: &&String| heads.iter().any(|head| name.starts_with(head.as_str()));
        let unread: Vec<String> = model.tensors().iter().map(|tensor| &tensor.name).filter(is_head).cloned().collect();
        loader.tensors.used.extend(unread);
        loader.tensors.check_all_used()?;
        Ok(weights)
    }
}

/// Heads without the prefix.
fn own(names: &EncoderNames) -> impl Iterator<Item = String> {
    names.heads.iter().map(|head| (*head).to_owned())
}

/// Reads the weights of an encoder.
struct Loader<'a> {
    tensors: Tensors<'a>,
    names: &'static EncoderNames,
    numbers: &'a EncoderNumbers,
    prefix: &'static str,
}

impl Loader<'_> {
    fn all(&mut self) -> Result<EncoderWeights, Error> {
        let (names, numbers, prefix) = (self.names, self.numbers, self.prefix);
        let (ctx, model) = (self.tensors.ctx, self.tensors.model);
        let name = |part: &str| format!("{prefix}{part}");
        let vocabulary = model.info(&name(names.words))?.shape.first().copied().unwrap_or(0);
        let words = ctx.load(&self.tensors.matrix(&name(names.words), vocabulary, numbers.hidden)?)?;
        ctx.plan_gather_rows(&GatherRows::new(&words, 1))?;
        Ok(EncoderWeights {
            words,
            positions: self.positions()?,
            norm: self.norm(&name(names.norm))?,
            layers: (0..numbers.layers).map(|i| self.layer(i)).collect::<Result<_, Error>>()?,
        })
    }

    /// Position embeddings in f32. Every text is a first segment, so its embedding is added here.
    fn positions(&mut self) -> Result<Weight, Error> {
        let (names, &EncoderNumbers { hidden, positions, .. }) = (self.names, self.numbers);
        let name = |part: &str| format!("{}{part}", self.prefix);
        let (place, segment) = (name(names.positions), name(names.segments));
        let mut rows = self.tensors.matrix(&place, positions, hidden)?.dequantize()?;
        if self.tensors.has(&segment) {
            let segments = self.tensors.model.info(&segment)?.shape.first().copied().unwrap_or(0);
            let first: Vec<f32> = self.tensors.matrix(&segment, segments, hidden)?.dequantize()?;
            rows.chunks_exact_mut(hidden).for_each(|row| row.iter_mut().zip(&first).for_each(|(v, s)| *v += s));
        }
        let (rows, _) = quantize(&rows, positions, hidden, DType::F32.name().parse()?)?;
        Ok(self.tensors.ctx.load(&rows)?)
    }

    fn layer(&mut self, index: usize) -> Result<EncoderLayer, Error> {
        let (names, &EncoderNumbers { hidden, intermediate, .. }) = (self.names, self.numbers);
        let prefix = format!("{}{}{index}.", self.prefix, names.layer);
        let name = |part: &str| format!("{prefix}{part}");
        let (mut parts, mut bias) = (Vec::new(), Vec::new());
        for part in names.qkv.map(name) {
            parts.push(self.tensors.matrix(&part, hidden, hidden)?);
            bias.extend(self.tensors.vector(&format!("{part}.bias"), hidden)?);
        }
        let ctx = self.tensors.ctx;
        Ok(EncoderLayer {
            qkv: ctx.load_fused(&parts.iter().collect::<Vec<_>>())?,
            qkv_bias: ctx.upload(&bias)?,
            attention_output: self.tensors.residual(&name(names.attention_output), [hidden, hidden])?,
            attention_norm: self.norm(&name(names.attention_norm))?,
            up: self.up(&name(names.up))?,
            down: self.tensors.residual(&name(names.down), [hidden, intermediate])?,
            ffn_norm: self.norm(&name(names.ffn_norm))?,
        })
    }

    fn up(&mut self, name: &str) -> Result<Projection, Error> {
        let (precision, &EncoderNumbers { hidden, intermediate, activation, .. }) =
            (self.tensors.precision, self.numbers);
        let weight = self.tensors.matrix(name, intermediate, hidden)?;
        let bias = self.tensors.bias(name, intermediate)?;
        let ctx = self.tensors.ctx;
        let linear = ctx.layer(&ctx.load(&weight)?, |p| {
            let p = with_bias(precision.of(p.x_dtype(DType::F32)), bias.is_some());
            p.d_dtype(precision.activations).activation(activation)
        })?;
        self.tensors.projection(linear, bias)
    }

    fn norm(&mut self, name: &str) -> Result<LayerNorm, Error> {
        let hidden = self.numbers.hidden;
        let mut part = |part: &str| self.tensors.device_vector(&format!("{name}.{part}"), hidden);
        Ok(LayerNorm { gamma: part("weight")?, beta: part("bias")? })
    }
}

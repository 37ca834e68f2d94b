//! Weights of a decoder on the device, and how products with them round.

use std::collections::HashSet;

use qgemm_api::{
    Activation, Buffer, Context, DType, FormatError, FusedWeight, GatherRows, HostWeight, Linear, Model, NormFunction,
    Problem, Weight, XPrecision, quantize,
};

use crate::architecture::{Architecture, TensorNames};
use crate::error::Error;
use crate::hyperparameters::Hyperparameters;
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
    /// Output projection; adds to the residual stream.
    pub attention_output: Projection,
    /// Gamma of the norm before the feed-forward part.
    pub ffn_norm: Buffer,
    /// Gate and up as one gated pair.
    pub gate_up: Projection,
    /// Down projection; adds to the residual stream.
    pub down: Projection,
}

/// A product with its bias.
pub struct Projection {
    /// The product.
    pub linear: Linear,
    /// Its bias in f32.
    pub bias: Option<Buffer>,
}

/// Query, key and value projections.
pub enum Qkv {
    /// One weight.
    Fused {
        /// The weight, with a segment each.
        weight: FusedWeight,
        /// Bias of all segments.
        bias: Option<Buffer>,
    },
    /// Three weights, where formats or column orders differ.
    Separate(Box<[Projection; 3]>),
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
        let mut loader = Loader { ctx, model, architecture, names, numbers, precision, used: HashSet::new() };
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
        let head = Projection { linear: loader.linear(&head, |p| p.d_dtype(DType::F32), true)?, bias: None };
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

/// Tensors of checkpoints that no product needs: constants, and scales of quantized caches.
const IGNORED: &[&str] = &[".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".masked_bias"];

/// Reads tensors, and remembers which.
struct Loader<'a> {
    ctx: &'a Context,
    model: &'a Model,
    architecture: &'static Architecture,
    names: &'static TensorNames,
    numbers: Hyperparameters,
    precision: Precision,
    used: HashSet<String>,
}

impl Loader<'_> {
    fn layer(&mut self, index: usize) -> Result<Layer, Error> {
        let (names, numbers) = (self.names, self.numbers);
        let name = |part: &str| format!("{}{index}.{part}", names.layer);
        let Hyperparameters { hidden, intermediate, heads, head_dim, .. } = numbers;
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
            attention_output: self.residual(&name(names.attention_output), heads * head_dim)?,
            ffn_norm: self.gamma(&name(names.ffn_norm), hidden)?,
            gate_up: self.gate_up(&name(names.gate), &name(names.up))?,
            down: self.residual(&name(names.down), intermediate)?,
        })
    }

    /// A product that adds to the residual stream.
    fn residual(&mut self, name: &str, k: usize) -> Result<Projection, Error> {
        let hidden = self.numbers.hidden;
        let weight = self.matrix(name, hidden, k)?;
        let bias = self.bias(name, hidden)?;
        let linear = self.linear(
            &self.ctx.load(&weight)?,
            |p| with_bias(p.x_dtype(self.precision.activations).d_dtype(DType::F32).residual_in_d(), bias.is_some()),
            false,
        )?;
        self.projection(linear, bias)
    }

    /// Query, key and value: one weight if their formats permit.
    fn qkv(&mut self, names: [String; 3]) -> Result<Qkv, Error> {
        let Hyperparameters { hidden, heads, kv_heads, head_dim, .. } = self.numbers;
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
        let [q, k, v] = &parts[..] else { unreachable!("three names") };
        match self.ctx.load_fused(&[&q.0, &k.0, &v.0]) {
            Ok(weight) => {
                let has_bias = parts.iter().any(|(_, bias)| bias.is_some());
                let of_part = |((_, bias), n): (&(HostWeight, Option<Vec<f32>>), usize)| {
                    bias.clone().unwrap_or_else(|| vec![0.0; n])
                };
                let bias: Vec<f32> = parts.iter().zip(features).flat_map(of_part).collect();
                let bias = has_bias.then(|| self.ctx.upload(&bias)).transpose()?;
                Ok(Qkv::Fused { weight, bias })
            }
            Err(qgemm_api::Error::Format(FormatError::PartMismatch { .. } | FormatError::PartEndsInScale { .. })) => {
                let part = |(weight, bias): &(HostWeight, Option<Vec<f32>>)| {
                    let weight = self.ctx.load(weight)?;
                    let linear = self.linear(&weight, |p| with_bias(p, bias.is_some()), true)?;
                    self.projection(linear, bias.clone())
                };
                Ok(Qkv::Separate(Box::new([part(q)?, part(k)?, part(v)?])))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Gate and up as a gated pair. If their formats differ, both become f16.
    fn gate_up(&mut self, gate: &str, up: &str) -> Result<Projection, Error> {
        let Hyperparameters { hidden, intermediate, .. } = self.numbers;
        let weights = [self.matrix(gate, intermediate, hidden)?, self.matrix(up, intermediate, hidden)?];
        let biases = [self.bias(gate, intermediate)?, self.bias(up, intermediate)?];
        let weight = match self.ctx.load_gated(&weights[0], &weights[1]) {
            Err(qgemm_api::Error::Format(FormatError::PairMismatch { what, .. })) => {
                tracing::warn!(gate, up, what, "gate and up differ: both are loaded in f16");
                let plain = |weight: &HostWeight| {
                    let format = DType::F16.name().parse()?;
                    Ok::<_, Error>(quantize(&weight.dequantize()?, intermediate, hidden, format)?.0)
                };
                self.ctx.load_gated(&plain(&weights[0])?, &plain(&weights[1])?)?
            }
            loaded => loaded?,
        };
        let has_bias = biases.iter().any(Option::is_some);
        let bias = biases.into_iter().flat_map(|bias| bias.unwrap_or_else(|| vec![0.0; intermediate]));
        let bias: Option<Vec<f32>> = has_bias.then(|| bias.collect());
        let describe = self.normed(self.precision.activations);
        let linear = self.ctx.layer(&weight, |p| with_bias(describe(p), has_bias).activation(Activation::Silu))?;
        self.projection(linear, bias)
    }

    fn projection(&self, linear: Linear, bias: Option<Vec<f32>>) -> Result<Projection, Error> {
        let bias = bias.map(|bias| self.ctx.upload(&bias)).transpose()?;
        Ok(Projection { linear, bias })
    }

    /// A product of the residual stream, normalized, if `normed`; else as `describe` says.
    fn linear(
        &self,
        weight: &Weight,
        describe: impl FnOnce(Problem) -> Problem,
        normed: bool,
    ) -> Result<Linear, Error> {
        let Precision { activations, x_precision, batch_invariant } = self.precision;
        let before = self.normed(activations);
        Ok(self.ctx.layer(weight, |p| {
            let problem = if normed { before(p) } else { p.x_precision(x_precision).batch_invariant(batch_invariant) };
            describe(problem)
        })?)
    }

    /// States that a product's X is the residual stream, normalized.
    fn normed(&self, d: DType) -> impl Fn(Problem) -> Problem + use<> {
        let (precision, eps) = (self.precision, self.numbers.eps);
        move |p| normed_problem(p, precision, eps).d_dtype(d)
    }

    fn has(&self, name: &str) -> bool {
        !name.is_empty() && self.model.info(name).is_ok()
    }

    /// A weight of N output and K input features.
    fn matrix(&mut self, name: &str, n: usize, k: usize) -> Result<HostWeight, Error> {
        self.check_shape(name, &[n, k])?;
        Ok(self.model.weight(name)?)
    }

    /// The gamma of an RMSNorm, on the device.
    fn gamma(&mut self, name: &str, len: usize) -> Result<Buffer, Error> {
        let gamma = self.vector(name, len)?;
        Ok(self.ctx.upload(&gamma)?)
    }

    fn bias(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, Error> {
        let name = format!("{name}.bias");
        if self.has(&name) { Ok(Some(self.vector(&name, len)?)) } else { Ok(None) }
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.check_shape(name, &[len])?;
        Ok(self.model.dense(name)?.to_f32())
    }

    fn check_shape(&mut self, name: &str, expected: &[usize]) -> Result<(), Error> {
        let info = self.model.info(name)?;
        self.used.insert(info.name.clone());
        match info.shape == expected {
            true => Ok(()),
            false => Err(Error::WrongShape {
                tensor: info.name.clone(),
                expected: expected.to_vec(),
                got: info.shape.clone(),
            }),
        }
    }

    /// Checks that the architecture explains every tensor.
    fn check_all_used(&self) -> Result<(), Error> {
        let is_ignored =
            |name: &str| IGNORED.iter().any(|ending| name.strip_suffix(".weight").unwrap_or(name).ends_with(ending));
        let unexpected = |name: &&String| !self.used.contains(*name) && !is_ignored(name);
        match self.model.tensors().iter().map(|tensor| &tensor.name).find(unexpected) {
            Some(tensor) => {
                Err(Error::UnexpectedTensor { tensor: tensor.clone(), architecture: self.architecture.name })
            }
            None => Ok(()),
        }
    }
}

/// The problem with X normalized: the residual stream in f32, rounded once to the type of activations.
pub fn normed_problem(problem: Problem, precision: Precision, eps: f32) -> Problem {
    problem
        .x_dtype(DType::F32)
        .norm(NormFunction::rms(eps).gamma(DType::F32))
        .normed_dtype(precision.activations)
        .x_precision(precision.x_precision)
        .batch_invariant(precision.batch_invariant)
}

fn with_bias(problem: Problem, has_bias: bool) -> Problem {
    if has_bias { problem.bias(DType::F32) } else { problem }
}

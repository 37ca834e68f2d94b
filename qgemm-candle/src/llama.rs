//! [`Llama`]: candle's `quantized_llama` with qgemm's layers.

use std::io::{Read, Seek};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Error, IndexOp, Module, Result, Tensor, bail};
use qgemm_api::{Activation, HostExperts, HostWeight, Rotary};

use crate::context::Context;
use crate::experts::Experts;
use crate::fused::FusedLinear;
use crate::kv_cache::{KvCache, KvCacheSize};
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::weights::host_weight;

/// Maximum tokens of a sequence in one step. It bounds the memory of a prompt.
const STEP_TOKENS: usize = 2048;

/// Arithmetic and room of a [`Llama`].
#[derive(Clone, Copy, Debug)]
pub struct LlamaOptions {
    /// Type of activations between products. The residual stream and logits are f32.
    pub dtype: DType,
    /// Tokens of a sequence at most.
    pub capacity: usize,
    /// Sequences of a batch.
    pub sequences: usize,
}

impl LlamaOptions {
    /// One sequence of up to `capacity` tokens, in f16 on CUDA and in f32 on the CPU.
    pub fn new(device: &Device, capacity: usize) -> Self {
        Self { dtype: if device.is_cuda() { DType::F16 } else { DType::F32 }, capacity, sequences: 1 }
    }
}

/// Decoder of the Llama architecture from a GGUF file, as
/// `candle_transformers::models::quantized_llama::ModelWeights`.
///
/// A layer takes six launches for one token:
///
/// - the products of Q, K and V with their norm;
/// - the append with its rotary embedding;
/// - attention;
/// - the output projection with its residual;
/// - the gated pair with its norm;
/// - the down projection with its residual.
#[derive(Debug)]
pub struct Llama {
    embeddings: Tensor,
    layers: Vec<Layer>,
    cache: KvCache,
    output: Linear,
}

#[derive(Debug)]
struct Layer {
    qkv: FusedLinear,
    attention_output: Linear,
    feed_forward: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Gated {
        gate_up: Linear,
        down: Linear,
    },
    /// Gate and up of different formats.
    Split {
        gate_up: FusedLinear,
        down: Linear,
    },
    Experts {
        norm: RmsNorm,
        router: Linear,
        experts: Experts,
    },
}

impl Llama {
    /// Reads the weights of a GGUF file and packs them for the context's device.
    ///
    /// # Errors
    /// When metadata or a tensor is missing or unfit, or the device is out of memory.
    pub fn from_gguf<R: Read + Seek>(
        ctx: &Context,
        content: &Content,
        reader: &mut R,
        options: LlamaOptions,
    ) -> Result<Self> {
        let numbers = Numbers::read(content)?;
        let mut loader = Loader { ctx, content, reader, numbers, dtype: options.dtype };
        let embeddings = content.tensor(loader.reader, "token_embd.weight", ctx.device())?.dequantize(ctx.device())?;
        let output = match content.tensor_infos.contains_key("output.weight") {
            true => loader.weight("output.weight")?,
            false => loader.weight("token_embd.weight")?,
        };
        let output = Linear::new(ctx, &output)?;
        let output = output.with_norm(&loader.gamma("output_norm.weight")?, numbers.eps, options.dtype)?;
        let layers = (0..numbers.layers).map(|i| loader.layer(i)).collect::<Result<_>>()?;
        let size = KvCacheSize {
            layers: numbers.layers,
            sequences: options.sequences,
            capacity: options.capacity,
            heads: numbers.heads,
            kv_heads: numbers.kv_heads,
            head_dim: numbers.head_dim,
        };
        let rotary = Rotary::interleaved(numbers.rotary_dim).base(numbers.rotary_base);
        let cache = KvCache::new(ctx, size, options.dtype, Some(rotary))?;
        Ok(Self { embeddings, layers, cache, output })
    }

    /// Logits `[sequences, vocabulary]` of the last token, of tokens `[sequences, tokens]`
    /// behind `position` earlier ones. Many tokens take several steps.
    ///
    /// # Errors
    /// When the cache has no room for the tokens, there are none, or their shape is another.
    pub fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        let (_, count) = tokens.dims2()?;
        let mut last = None;
        for start in (0..count).step_by(STEP_TOKENS) {
            let step = tokens.narrow(1, start, STEP_TOKENS.min(count - start))?;
            last = Some(self.step(&step, position + start)?);
        }
        match last {
            Some(x) => self.output.forward(&x),
            None => bail!("expected tokens, got none"),
        }
    }

    /// Runs the layers on at most [`STEP_TOKENS`] tokens, and returns the residual stream
    /// of the last token.
    fn step(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        let (sequences, count) = tokens.dims2()?;
        let hidden = self.embeddings.dim(1)?;
        self.cache.begin(position, count)?;
        let mut x = self.embeddings.index_select(&tokens.flatten_all()?, 0)?.reshape((sequences, count, hidden))?;
        for (i, layer) in self.layers.iter().enumerate() {
            let attention = self.cache.attention(i, &layer.qkv.forward(&x)?)?;
            x = layer.attention_output.forward_add(&attention, &x)?;
            x = layer.feed_forward.forward(&x)?;
        }
        x.i((.., count - 1, ..))
    }
}

impl FeedForward {
    /// The layer and its residual `x`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gated { gate_up, down } => down.forward_add(&gate_up.forward(x)?, x),
            Self::Split { gate_up, down } => {
                let both = gate_up.forward(x)?;
                down.forward_add(&(both.get(0)?.silu()? * both.get(1)?)?, x)
            }
            Self::Experts { norm, router, experts } => {
                let normed = norm.forward(x)?;
                experts.forward_add(&normed, &router.forward(&normed)?, x)
            }
        }
    }
}

/// Sizes of the model.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    rotary_base: f64,
    eps: f64,
    experts: usize,
    top_k: usize,
}

impl Numbers {
    fn read(content: &Content) -> Result<Self> {
        let get = |key: &str| content.metadata.get(&format!("llama.{key}"));
        let count = |key: &str| match get(key).map(Value::to_u32) {
            Some(Ok(count)) if count > 0 => Ok(count as usize),
            Some(_) => bail!("llama.{key}: expected a number above 0, got {:?}", get(key)),
            None => bail!("llama.{key} is missing: expected a GGUF file of the architecture llama"),
        };
        let heads = count("attention.head_count")?;
        let eps = "attention.layer_norm_rms_epsilon";
        let Some(eps) = get(eps) else { bail!("llama.{eps} is missing") };
        let base = get("rope.freq_base").map_or(Ok(10_000.0), Value::to_f32)?;
        let experts = get("expert_count").map_or(Ok(0), Value::to_u32)? as usize;
        Ok(Self {
            layers: count("block_count")?,
            heads,
            kv_heads: count("attention.head_count_kv")?,
            head_dim: count("embedding_length")? / heads,
            rotary_dim: count("rope.dimension_count")?,
            rotary_base: base.into(),
            eps: eps.to_f32()?.into(),
            experts,
            top_k: if experts > 0 { count("expert_used_count")? } else { 0 },
        })
    }
}

/// Weights of a file, as layers of a context.
struct Loader<'l, R> {
    ctx: &'l Context,
    content: &'l Content,
    reader: &'l mut R,
    numbers: Numbers,
    dtype: DType,
}

impl<R: Read + Seek> Loader<'_, R> {
    fn weight(&mut self, name: &str) -> Result<HostWeight> {
        host_weight(&self.content.tensor(self.reader, name, &Device::Cpu)?)
    }

    fn gamma(&mut self, name: &str) -> Result<Tensor> {
        self.content.tensor(self.reader, name, &Device::Cpu)?.dequantize(&Device::Cpu)
    }

    fn layer(&mut self, i: usize) -> Result<Layer> {
        let name = |role: &str| format!("blk.{i}.{role}.weight");
        let [q, k, v] = [self.weight(&name("attn_q"))?, self.weight(&name("attn_k"))?, self.weight(&name("attn_v"))?];
        let norm = self.gamma(&name("attn_norm"))?;
        let qkv = FusedLinear::new(self.ctx, &[&q, &k, &v])?.with_norm(&norm, self.numbers.eps, self.dtype)?;
        let attention_output = Linear::new(self.ctx, &self.weight(&name("attn_output"))?)?;
        Ok(Layer {
            qkv: qkv.with_output(self.dtype),
            attention_output: attention_output.with_output(DType::F32),
            feed_forward: self.feed_forward(name)?,
        })
    }

    fn feed_forward(&mut self, name: impl Fn(&str) -> String) -> Result<FeedForward> {
        let norm = self.gamma(&name("ffn_norm"))?;
        let (ctx, dtype, eps) = (self.ctx, self.dtype, self.numbers.eps);
        if self.numbers.experts > 1 {
            let router = Linear::new(ctx, &self.weight(&name("ffn_gate_inp"))?)?.with_output(DType::F32);
            let norm = RmsNorm::new(ctx, &norm, eps, dtype)?;
            return Ok(FeedForward::Experts { norm, router, experts: self.experts(name)? });
        }
        let [gate, up] = [self.weight(&name("ffn_gate"))?, self.weight(&name("ffn_up"))?];
        let down = Linear::new(ctx, &self.weight(&name("ffn_down"))?)?.with_output(DType::F32);
        if gate.format() != up.format() {
            let gate_up = FusedLinear::new(ctx, &[&gate, &up])?.with_norm(&norm, eps, dtype)?.with_output(dtype);
            return Ok(FeedForward::Split { gate_up, down });
        }
        let gate_up = Linear::gated(ctx, &gate, &up, Activation::Silu)?.with_norm(&norm, eps, dtype)?;
        Ok(FeedForward::Gated { gate_up: gate_up.with_output(dtype), down })
    }

    fn experts(&mut self, name: impl Fn(&str) -> String) -> Result<Experts> {
        let mut of_all = |role: &str| -> Result<Vec<HostWeight>> {
            let stacked = name(&format!("{role}_exps"));
            if self.content.tensor_infos.contains_key(&stacked) {
                return crate::weights::host_experts(&self.content.tensor(self.reader, &stacked, &Device::Cpu)?);
            }
            (0..self.numbers.experts).map(|e| self.weight(&name(&format!("{role}.{e}")))).collect()
        };
        let (gate, up, down) = (of_all("ffn_gate")?, of_all("ffn_up")?, of_all("ffn_down")?);
        let pairs: Vec<_> = gate.into_iter().zip(up).collect();
        let up = HostExperts::gated(&pairs).map_err(Error::wrap)?;
        let down = HostExperts::new(&down).map_err(Error::wrap)?;
        let f32 = qgemm_api::DType::F32;
        Experts::new(self.ctx, &up, &down, self.numbers.top_k, [self.dtype, DType::F32], |moe| {
            moe.routed(f32, |routing| routing.renormalized()).residual(f32)
        })
    }
}

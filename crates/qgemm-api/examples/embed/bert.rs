//! A sentence encoder of BERT's kind: its linear layers are qgemm's, what lies between them is plain Rust.
//!
//! Sentences are not padded: the tokens of all of them are the rows of one matrix, so that each linear layer is one product.

use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use qgemm_api::{
    Activation, Args, Buffer, Context, DType, Format, Model, Problem, Weight, XPrecision, open_model, quantize,
};
use serde::Deserialize;

use crate::wordpiece::WordPiece;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What the encoder reads of `config.json`.
#[derive(Deserialize)]
pub struct Settings {
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    pub num_hidden_layers: usize,
    pub max_position_embeddings: usize,
    pub layer_norm_eps: f32,
    pub hidden_act: String,
}

impl Settings {
    /// Reads the `config.json` of a checkpoint.
    ///
    /// # Errors
    /// When it is not there, or describes another kind of model.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let settings: Self = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let (size, heads) = (settings.hidden_size, settings.num_attention_heads);
        if settings.hidden_act != "gelu" || heads == 0 || !size.is_multiple_of(heads) {
            return Err(format!("{}: expected GELU and heads that divide {size}", path.display()).into());
        }
        Ok(settings)
    }
}

/// How linear layers are computed.
#[derive(Clone, Copy)]
pub struct Choice {
    pub format: Format,
    pub x_precision: XPrecision,
}

/// A model that is loaded.
pub struct Encoder {
    ctx: Context,
    settings: Settings,
    tokenizer: WordPiece,
    words: Vec<f32>,
    positions: Vec<f32>,
    segment: Vec<f32>,
    norm: Norm,
    layers: Vec<Layer>,
    linear_time: Duration,
}

struct Layer {
    /// Query, key and value: one weight, because they read the same X.
    qkv: Linear,
    attention: Linear,
    attention_norm: Norm,
    up: Linear,
    down: Linear,
    norm: Norm,
}

impl Encoder {
    /// Opens the checkpoint in `folder`, quantizes its linear layers as chosen and loads them.
    ///
    /// # Errors
    /// When a file is missing or not what it should be, or the device refuses.
    pub fn open(ctx: &Context, folder: &Path, choice: Choice) -> Result<Self> {
        let settings = Settings::open(folder)?;
        let model = open_model(folder)?;
        let dense = |name: &str| Ok::<_, Box<dyn Error>>(model.dense(name)?.to_f32());
        let load = Loader { ctx, model: &model, choice };
        let layer = |i: usize| {
            let (attention, layer) = (format!("encoder.layer.{i}.attention"), format!("encoder.layer.{i}"));
            let qkv = ["query", "key", "value"].map(|name| format!("{attention}.self.{name}"));
            Ok::<_, Box<dyn Error>>(Layer {
                qkv: load.linear(&qkv, Activation::Identity)?,
                attention: load.linear(&[format!("{attention}.output.dense")], Activation::Identity)?,
                attention_norm: Norm::open(&model, &format!("{attention}.output.LayerNorm"), &settings)?,
                up: load.linear(&[format!("{layer}.intermediate.dense")], Activation::GeluErf)?,
                down: load.linear(&[format!("{layer}.output.dense")], Activation::Identity)?,
                norm: Norm::open(&model, &format!("{layer}.output.LayerNorm"), &settings)?,
            })
        };
        Ok(Self {
            tokenizer: WordPiece::open(&folder.join("vocab.txt"))?,
            words: dense("embeddings.word_embeddings.weight")?,
            positions: dense("embeddings.position_embeddings.weight")?,
            segment: dense("embeddings.token_type_embeddings.weight")?,
            norm: Norm::open(&model, "embeddings.LayerNorm", &settings)?,
            layers: (0..settings.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            ctx: ctx.clone(),
            settings,
            linear_time: Duration::ZERO,
        })
    }

    /// How long linear layers took since the encoder was opened, copies to the device and back included.
    pub fn linear_time(&self) -> Duration {
        self.linear_time
    }

    /// The tokens of a text.
    pub fn tokens(&self, text: &str) -> Vec<usize> {
        self.tokenizer.encode(text, self.settings.max_position_embeddings)
    }

    /// A vector of length 1 for each sentence.
    ///
    /// # Errors
    /// When the device fails.
    pub fn embed(&mut self, sentences: &[&str]) -> Result<Vec<Vec<f32>>> {
        let size = self.settings.hidden_size;
        let (mut x, mut rows) = (Vec::new(), Vec::new());
        for sentence in sentences {
            let start = x.len() / size;
            for (position, id) in self.tokens(sentence).into_iter().enumerate() {
                let row = |table: &[f32], i: usize| table[i * size..][..size].to_vec();
                let (word, place) = (row(&self.words, id), row(&self.positions, position));
                x.extend(
                    word.iter().zip(&place).zip(&self.segment).map(|((word, place), segment)| word + place + segment),
                );
            }
            rows.push(start..x.len() / size);
        }
        self.norm.apply(&mut x);
        let mut time = Duration::ZERO;
        for layer in &self.layers {
            let mut linear = |linear: &Linear, x: &[f32], residual: Option<&[f32]>| {
                let start = Instant::now();
                let y = linear.run(&self.ctx, x, residual);
                time += start.elapsed();
                y
            };
            let qkv = linear(&layer.qkv, &x, None)?;
            let heads = attention(&qkv, &rows, size, self.settings.num_attention_heads);
            x = linear(&layer.attention, &heads, Some(&x))?;
            layer.attention_norm.apply(&mut x);
            let up = linear(&layer.up, &x, None)?;
            x = linear(&layer.down, &up, Some(&x))?;
            layer.norm.apply(&mut x);
        }
        self.linear_time += time;
        Ok(rows.into_iter().map(|rows| pooled(&x[rows.start * size..rows.end * size], size)).collect())
    }
}

/// Makes linear layers of a checkpoint's tensors.
struct Loader<'a> {
    ctx: &'a Context,
    model: &'a Model,
    choice: Choice,
}

impl Loader<'_> {
    /// The layers called `names`, which read the same X, as one.
    fn linear(&self, names: &[String], activation: Activation) -> Result<Linear> {
        let (mut values, mut bias, mut n, mut k) = (Vec::new(), Vec::new(), 0, 0);
        for name in names {
            let weight = self.model.dense(&format!("{name}.weight"))?;
            let &[rows, columns] = &weight.shape[..] else {
                return Err(format!("{name}: expected a matrix, got {:?}", weight.shape).into());
            };
            values.extend(weight.to_f32());
            bias.extend(self.model.dense(&format!("{name}.bias"))?.to_f32());
            (n, k) = (n + rows, columns);
        }
        // Where K is no whole number of the format's blocks, llama.cpp's fallback is used.
        let (host, _) = quantize(&values, n, k, self.choice.format)?;
        let bias = self.ctx.upload(&bias)?;
        Ok(Linear { weight: self.ctx.load(&host)?, bias, activation, x_precision: self.choice.x_precision })
    }
}

/// `activation(X·Wᵀ + bias) + residual`.
struct Linear {
    weight: Weight,
    bias: Buffer,
    activation: Activation,
    x_precision: XPrecision,
}

impl Linear {
    fn run(&self, ctx: &Context, x: &[f32], residual: Option<&[f32]>) -> Result<Vec<f32>> {
        let m = x.len() / self.weight.k();
        let mut problem =
            Problem::new(&self.weight, m).x_precision(self.x_precision).bias(DType::F32).activation(self.activation);
        if residual.is_some() {
            problem = problem.residual(DType::F32);
        }
        // Known from the second time on. An engine with attention of its own on the device keeps the buffers, too.
        let plan = ctx.plan(&problem)?;
        let x = ctx.upload(x)?;
        let residual = residual.map(|residual| ctx.upload(residual)).transpose()?;
        let mut d = ctx.allocate(m * self.weight.n() * DType::F32.bytes())?;
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let mut args = Args::new(&x, &self.weight, &mut d).bias(&self.bias).workspace(&mut workspace);
        args.residual = residual.as_ref().map(Into::into);
        plan.run(&ctx.default_stream(), args)?;
        Ok(ctx.download(&d)?)
    }
}

/// LayerNorm.
struct Norm {
    gamma: Vec<f32>,
    beta: Vec<f32>,
    epsilon: f32,
}

impl Norm {
    fn open(model: &Model, name: &str, settings: &Settings) -> Result<Self> {
        let values = |part: &str| Ok::<_, Box<dyn Error>>(model.dense(&format!("{name}.{part}"))?.to_f32());
        Ok(Self { gamma: values("weight")?, beta: values("bias")?, epsilon: settings.layer_norm_eps })
    }

    fn apply(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.gamma.len()) {
            let count = row.len() as f32;
            let mean = row.iter().sum::<f32>() / count;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / count;
            let scale = 1.0 / (variance + self.epsilon).sqrt();
            for ((v, gamma), beta) in row.iter_mut().zip(&self.gamma).zip(&self.beta) {
                *v = (*v - mean) * scale * gamma + beta;
            }
        }
    }
}

/// Every token looks at all tokens of its sentence. Rows of `qkv` hold query, key and value, each of `size` numbers.
fn attention(qkv: &[f32], sentences: &[Range<usize>], size: usize, heads: usize) -> Vec<f32> {
    let width = size / heads;
    let scale = 1.0 / (width as f32).sqrt();
    let part = |token: usize, part: usize, head: usize| &qkv[(token * 3 + part) * size + head * width..][..width];
    let mut out = vec![0.0; qkv.len() / 3];
    for sentence in sentences {
        for token in sentence.clone() {
            for head in 0..heads {
                let query = part(token, 0, head);
                let score = |other| query.iter().zip(part(other, 1, head)).map(|(q, k)| q * k).sum::<f32>() * scale;
                let scores: Vec<f32> = sentence.clone().map(score).collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f32 = weights.iter().sum();
                let row = &mut out[token * size + head * width..][..width];
                for (other, weight) in sentence.clone().zip(&weights) {
                    row.iter_mut().zip(part(other, 2, head)).for_each(|(d, v)| *d += weight / sum * v);
                }
            }
        }
    }
    out
}

/// The mean of a sentence's rows, scaled to length 1.
fn pooled(rows: &[f32], size: usize) -> Vec<f32> {
    let mut sum = vec![0.0; size];
    for row in rows.chunks_exact(size) {
        sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
    }
    let length = sum.iter().map(|v| v * v).sum::<f32>().sqrt();
    sum.iter().map(|v| v / length).collect()
}

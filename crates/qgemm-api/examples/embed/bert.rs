//! BERT sentence encoder. qgemm computes linear layers, attention and norms.
//! Activations stay on the device throughout.
//!
//! Sentences are packed without padding: all tokens are rows of one matrix, so each
//! linear layer is one product. Attention takes the sentence borders as offsets.

use std::error::Error;
use std::fs;
use std::path::Path;

use qgemm_api::{
    Activation, Args, Attention, AttentionArgs, Buffer, Context, DType, Format, Keys, KvStrides, Model, Norm, NormArgs,
    NormFunction, Problem, Queries, Weight, XPrecision, open_model, quantize,
};
use serde::Deserialize;

use crate::wordpiece::WordPiece;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Relevant settings of `config.json`.
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
    /// When it does not exist, or describes another kind of model.
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

/// Arithmetic of linear layers.
#[derive(Clone, Copy)]
pub struct Choice {
    pub format: Format,
    pub x_precision: XPrecision,
}

/// Loaded model.
pub struct Encoder {
    ctx: Context,
    settings: Settings,
    tokenizer: WordPiece,
    words: Vec<f32>,
    positions: Vec<f32>,
    segment: Vec<f32>,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

struct Layer {
    /// Query, key and value as one weight, because they share X.
    qkv: Linear,
    attention: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

impl Encoder {
    /// Opens the checkpoint in `folder`, quantizes its linear layers by
    /// `choice` and loads them.
    ///
    /// # Errors
    /// When a file is missing or invalid, or on a device error.
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
                attention_norm: load.norm(&format!("{attention}.output.LayerNorm"), &settings)?,
                up: load.linear(&[format!("{layer}.intermediate.dense")], Activation::GeluErf)?,
                down: load.linear(&[format!("{layer}.output.dense")], Activation::Identity)?,
                norm: load.norm(&format!("{layer}.output.LayerNorm"), &settings)?,
            })
        };
        Ok(Self {
            tokenizer: WordPiece::open(&folder.join("vocab.txt"))?,
            words: dense("embeddings.word_embeddings.weight")?,
            positions: dense("embeddings.position_embeddings.weight")?,
            segment: dense("embeddings.token_type_embeddings.weight")?,
            norm: load.norm("embeddings.LayerNorm", &settings)?,
            layers: (0..settings.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            ctx: ctx.clone(),
            settings,
        })
    }

    /// Token ids of a text.
    pub fn tokens(&self, text: &str) -> Vec<usize> {
        self.tokenizer.encode(text, self.settings.max_position_embeddings)
    }

    /// Unit-length embedding of each sentence.
    ///
    /// # Errors
    /// When the device fails.
    pub fn embed(&self, sentences: &[&str]) -> Result<Vec<Vec<f32>>> {
        let (ctx, size) = (&self.ctx, self.settings.hidden_size);
        let (mut x, mut ends) = (Vec::new(), vec![0]);
        for sentence in sentences {
            for (position, id) in self.tokens(sentence).into_iter().enumerate() {
                let row = |table: &[f32], i: usize| table[i * size..][..size].to_vec();
                let (word, place) = (row(&self.words, id), row(&self.positions, position));
                x.extend(
                    word.iter().zip(&place).zip(&self.segment).map(|((word, place), segment)| word + place + segment),
                );
            }
            ends.push(x.len() / size);
        }
        let offsets = Offsets::upload(ctx, &ends)?;
        let mut x = ctx.upload(&x)?;
        self.norm.apply(ctx, &mut x)?;
        for layer in &self.layers {
            let qkv = layer.qkv.run(ctx, &x, None)?;
            let heads = self.attention(&qkv, &offsets)?;
            x = layer.attention.run(ctx, &heads, Some(&x))?;
            layer.attention_norm.apply(ctx, &mut x)?;
            let up = layer.up.run(ctx, &x, None)?;
            x = layer.down.run(ctx, &up, Some(&x))?;
            layer.norm.apply(ctx, &mut x)?;
        }
        let x: Vec<f32> = ctx.download(&x)?;
        Ok(ends.windows(2).map(|ends| pooled(&x[ends[0] * size..ends[1] * size], size)).collect())
    }

    /// Attention of every token to all tokens of its sentence. Rows of `qkv` are query,
    /// key and value, concatenated.
    fn attention(&self, qkv: &Buffer, offsets: &Offsets) -> Result<Buffer> {
        let Settings { hidden_size: size, num_attention_heads: heads, .. } = self.settings;
        let &Offsets { sentences, tokens, longest, ref on_device } = offsets;
        let (queries, keys) = (Queries::offsets(sentences, tokens, longest), Keys::offsets(tokens, longest));
        let (row, head) = (3 * size as u64, (size / heads) as u64);
        let strides = KvStrides { page: 0, token: row, head };
        let attention = Attention::new(DType::F32, heads, heads, size / heads, queries, keys)
            .q_strides(row, head)
            .k_strides(strides)
            .v_strides(strides);
        let plan = self.ctx.plan_attention(&attention)?;
        let mut d = self.ctx.allocate(tokens * size * DType::F32.bytes())?;
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let part = |part: usize| qkv.slice(part * size * DType::F32.bytes()..qkv.len());
        let mut args = AttentionArgs::new(part(0)?, part(1)?, part(2)?, &mut d);
        (args.q_offsets, args.kv_offsets) = (Some(on_device.view()), Some(on_device.view()));
        args.workspace = Some(&mut workspace);
        plan.run(&self.ctx.default_stream(), args)?;
        Ok(d)
    }
}

/// Sentence borders.
struct Offsets {
    sentences: usize,
    tokens: usize,
    longest: usize,
    on_device: Buffer,
}

impl Offsets {
    /// Uploads the ends of sentences. The first end is 0.
    fn upload(ctx: &Context, ends: &[usize]) -> Result<Self> {
        let words = ends.iter().map(|&end| u32::try_from(end)).collect::<std::result::Result<Vec<u32>, _>>()?;
        Ok(Self {
            sentences: ends.len() - 1,
            tokens: ends[ends.len() - 1],
            longest: ends.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0),
            on_device: ctx.upload(&words)?,
        })
    }
}

/// Loader of linear layers.
struct Loader<'a> {
    ctx: &'a Context,
    model: &'a Model,
    choice: Choice,
}

impl Loader<'_> {
    /// Loads the layers `names`, which share X, as one weight.
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
        // If K is no multiple of the block, llama.cpp's fallback is used.
        let (host, _) = quantize(&values, n, k, self.choice.format)?;
        let bias = self.ctx.upload(&bias)?;
        Ok(Linear { weight: self.ctx.load(&host)?, bias, activation, x_precision: self.choice.x_precision })
    }

    fn norm(&self, name: &str, settings: &Settings) -> Result<LayerNorm> {
        let values = |part: &str| Ok::<_, Box<dyn Error>>(self.model.dense(&format!("{name}.{part}"))?.to_f32());
        let upload = |part: &str| Ok::<_, Box<dyn Error>>(self.ctx.upload(&values(part)?)?);
        let function = NormFunction::layer(settings.layer_norm_eps).gamma(DType::F32).beta(DType::F32);
        Ok(LayerNorm { columns: settings.hidden_size, function, gamma: upload("weight")?, beta: upload("bias")? })
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
    fn run(&self, ctx: &Context, x: &Buffer, residual: Option<&Buffer>) -> Result<Buffer> {
        let m = x.len() / (self.weight.k() * DType::F32.bytes());
        let mut problem =
            Problem::new(&self.weight, m).x_precision(self.x_precision).bias(DType::F32).activation(self.activation);
        if residual.is_some() {
            problem = problem.residual(DType::F32);
        }
        // Cached after the first call. An engine would keep the buffers, too; these are freed
        // after the work that uses them.
        let plan = ctx.plan(&problem)?;
        let mut d = ctx.allocate(m * self.weight.n() * DType::F32.bytes())?;
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let mut args = Args::new(x, &self.weight, &mut d).bias(&self.bias).workspace(&mut workspace);
        args.residual = residual.map(Into::into);
        plan.run(&ctx.default_stream(), args)?;
        Ok(d)
    }
}

/// LayerNorm of rows with this many columns.
struct LayerNorm {
    columns: usize,
    function: NormFunction,
    gamma: Buffer,
    beta: Buffer,
}

impl LayerNorm {
    /// Normalizes rows in place.
    fn apply(&self, ctx: &Context, x: &mut Buffer) -> Result<()> {
        let rows = x.len() / (self.columns * DType::F32.bytes());
        let norm = Norm::new(rows, self.columns, DType::F32, self.function).d_in_place();
        let args = NormArgs::in_place(x).gamma(&self.gamma).beta(&self.beta);
        Ok(ctx.plan_norm(&norm)?.run(&ctx.default_stream(), args)?)
    }
}

/// Mean of a sentence's rows, scaled to unit length.
fn pooled(rows: &[f32], size: usize) -> Vec<f32> {
    let mut sum = vec![0.0; size];
    for row in rows.chunks_exact(size) {
        sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
    }
    let length = sum.iter().map(|v| v * v).sum::<f32>().sqrt();
    sum.iter().map(|v| v / length).collect()
}

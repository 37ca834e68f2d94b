//! Model architectures: products, norms and tensor names of a layer.

use qgemm_formats::model::{Model, TensorInfo, TensorKind, strict_json};
use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::numbers::{Heads, Numbers};
use super::rotary::PlannedRotary;
use crate::error::Error;

/// Supported architectures.
pub(super) const SERVED: &[&str] = &["llama", "mistral", "qwen2", "qwen3", "qwen3moe", "bert"];

/// Tensor names of a layer.
struct Names {
    /// Name parts before and after the layer number.
    prefixes: &'static [&'static str],
    q: &'static str,
    k: &'static str,
    v: &'static str,
    o: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    router: &'static str,
    /// Experts' weights. `{e}` is the expert id if each expert has its own tensor.
    gates: &'static str,
    ups: &'static str,
    downs: &'static str,
    /// Output head. Without one, the embedding is tied to the head.
    head: &'static str,
    /// Embedding.
    embedding: &'static str,
    /// Norms of a layer: at attention, and at the feed-forward part.
    norms: [&'static str; 2],
    /// Norms of query and key heads.
    head_norms: [&'static str; 2],
    /// Final norm of a decoder, or first norm of an encoder.
    outer_norms: &'static [&'static str],
}

const GGUF: Names = Names {
    prefixes: &["blk."],
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    o: "attn_output",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    router: "ffn_gate_inp",
    gates: "ffn_gate_exps",
    ups: "ffn_up_exps",
    downs: "ffn_down_exps",
    head: "output",
    embedding: "token_embd",
    norms: ["attn_norm", "ffn_norm"],
    head_norms: ["attn_q_norm", "attn_k_norm"],
    outer_norms: &["output_norm"],
};

const GGUF_ENCODER: Names =
    Names { norms: ["attn_output_norm", "layer_output_norm"], outer_norms: &["token_embd_norm"], ..GGUF };

const DECODER: Names = Names {
    prefixes: &["model.layers."],
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    o: "self_attn.o_proj",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    router: "mlp.gate",
    gates: "mlp.experts.{e}.gate_proj",
    ups: "mlp.experts.{e}.up_proj",
    downs: "mlp.experts.{e}.down_proj",
    head: "lm_head",
    embedding: "model.embed_tokens",
    norms: ["input_layernorm", "post_attention_layernorm"],
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    outer_norms: &["model.norm"],
};

const ENCODER: Names = Names {
    prefixes: &["encoder.layer.", "bert.encoder.layer."],
    q: "attention.self.query",
    k: "attention.self.key",
    v: "attention.self.value",
    o: "attention.output.dense",
    gate: "",
    up: "intermediate.dense",
    down: "output.dense",
    norms: ["attention.output.LayerNorm", "output.LayerNorm"],
    outer_norms: &["embeddings.LayerNorm", "bert.embeddings.LayerNorm"],
    ..DECODER
};

/// Products of a model.
pub(super) struct Network {
    pub architecture: &'static str,
    pub layers: Vec<LayerTensors>,
    /// Rows by token. None in encoders, which add up rows of several tables.
    pub embedding: Option<Matrix>,
    /// Product that makes logits, if any.
    pub head: Option<Matrix>,
    /// Whether norms precede the products of their part (pre-norm).
    pub pre_norm: bool,
    /// Activation of the feed-forward part.
    pub activation: Activation,
    pub heads: Heads,
    /// Rotary embedding. None in encoders; an error has the reason why it is the caller's.
    pub rotary: Option<Result<PlannedRotary, String>>,
    /// Epsilon of norms.
    pub eps: f32,
    /// Norm before the head, or after the embeddings of an encoder.
    pub outer_norm: NormTensors,
    /// Keys that a query sees at most, if the model limits them.
    pub window: Option<usize>,
    /// Context length of the model, if stated.
    pub context: Option<usize>,
}

/// Tensors of a norm.
#[derive(Clone)]
pub(super) struct NormTensors {
    pub gamma: (String, DType),
    pub beta: Option<(String, DType)>,
}

/// Products of a layer.
pub(super) struct LayerTensors {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    /// Norms at attention and at the feed-forward part.
    pub norms: [NormTensors; 2],
    /// Norms of query and key heads.
    pub head_norms: Option<[NormTensors; 2]>,
    pub feed_forward: FeedForward,
}

/// Feed-forward part of a layer.
pub(super) enum FeedForward {
    /// `down(activation(up))`, with an optional gate.
    Dense { gate: Option<Matrix>, up: Matrix, down: Matrix },
    /// Router and `experts` experts, `top_k` per token.
    Experts { router: Matrix, gate: Matrix, up: Matrix, down: Matrix, experts: usize, top_k: usize },
}

/// Weight of the model. For experts, the weight of one.
#[derive(Clone)]
pub(super) struct Matrix {
    /// Tensor name. For experts with their own tensors, that of the first.
    pub tensor: String,
    pub format: Format,
    pub n: usize,
    pub k: usize,
    pub row_scale: bool,
    pub k_order: bool,
    pub bias: Option<(String, DType)>,
}

/// Finds the products of `model`. `config` is the text of its `config.json`.
///
/// # Errors
/// [`Error::UnknownArchitecture`], [`Error::IncompleteModel`], or a
/// missing or unreadable tensor.
pub(super) fn network(model: &Model, config: Option<&str>) -> Result<Network, Error> {
    let is_gguf = !model.metadata().is_empty();
    let config: Value = match config {
        Some(text) if !is_gguf => {
            serde_json::from_str(&strict_json(text)).map_err(|error| incomplete(format!("config.json: {error}")))?
        }
        _ => Value::Null,
    };
    let value = |key: &str| model.metadata().iter().find(|(name, _)| name == key).map(|(_, value)| value);
    let stated = match is_gguf {
        true => value("general.architecture").and_then(|v| v.as_str()).unwrap_or_default().to_owned(),
        false => config["model_type"].as_str().unwrap_or_default().replace('_', ""),
    };
    let Some(&architecture) = SERVED.iter().find(|name| **name == stated) else {
        return Err(Error::UnknownArchitecture { architecture: stated, served: SERVED });
    };
    let is_encoder = architecture == "bert";
    let names = match (is_gguf, is_encoder) {
        (true, true) => &GGUF_ENCODER,
        (true, false) => &GGUF,
        (false, true) => &ENCODER,
        (false, false) => &DECODER,
    };
    let numbers = match is_gguf {
        true => Numbers::Gguf { model, architecture },
        false => Numbers::Config(config),
    };
    let top_k = numbers.top_k();
    let mut reader = Reader { model, is_gguf, names, prefix: "", known: Vec::new() };
    let prefix = names.prefixes.iter().find(|prefix| model.info(&format!("{prefix}0.{}", names.q)).is_ok());
    reader.prefix = prefix.ok_or_else(|| {
        incomplete(format!("no tensor `{}0.{}.weight`, which {architecture} has", names.prefixes[0], names.q))
    })?;
    let mut layers = Vec::new();
    while reader.has(layers.len(), names.q) {
        layers.push(reader.layer(layers.len(), top_k)?);
    }
    let (embedding, head) = match is_encoder {
        true => (None, None),
        false => {
            let embedding = reader.matrix(names.embedding.to_owned(), "embedding")?.0;
            let head = match model.info(names.head) {
                Ok(_) => reader.matrix(names.head.to_owned(), "head")?.0,
                Err(_) => embedding.clone(),
            };
            (Some(embedding), Some(head))
        }
    };
    let outer = names.outer_norms.iter().find(|name| model.info(name).is_ok()).unwrap_or(&names.outer_norms[0]);
    let (outer_norm, eps) = (reader.norm(outer)?, numbers.eps(is_encoder)?);
    let heads = numbers.heads(layers.first().map_or(0, |layer| layer.q.n))?;
    let rotary = (!is_encoder).then(|| numbers.rotary(heads.head_dim));
    check_heads(&heads, &layers)?;
    if architecture.starts_with("qwen3") && layers.iter().any(|layer| layer.head_norms.is_none()) {
        return Err(incomplete(format!("expected the tensors {}", names.head_norms.join(", "))));
    }
    let activation = if is_encoder { Activation::GeluErf } else { Activation::Silu };
    let (pre_norm, context, window) = (!is_encoder, numbers.context(), numbers.window(architecture)?);
    Ok(Network {
        architecture,
        layers,
        embedding,
        head,
        pre_norm,
        activation,
        heads,
        rotary,
        eps,
        outer_norm,
        window,
        context,
    })
}

/// Checks that all layers have the head counts and dimensions.
fn check_heads(heads: &Heads, layers: &[LayerTensors]) -> Result<(), Error> {
    let Heads { heads, kv_heads, head_dim } = *heads;
    for layer in layers {
        let of = [(&layer.q, heads), (&layer.k, kv_heads), (&layer.v, kv_heads)];
        for (name, got, heads) in
            of.map(|(m, heads)| (&m.tensor, m.n, heads)).into_iter().chain([(&layer.o.tensor, layer.o.k, heads)])
        {
            if heads.checked_mul(head_dim) != Some(got) {
                let what = format!("{name} has {got} features: expected {heads} heads of {head_dim}");
                return Err(incomplete(what));
            }
        }
    }
    Ok(())
}

/// Fingerprint: hash of names, kinds, shapes and sizes of all tensors.
pub(super) fn fingerprint(model: &Model) -> String {
    let mut lines: Vec<String> = model.tensors().iter().map(line).collect();
    lines.sort();
    let mut hash = Sha256::new();
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

fn incomplete(what: String) -> Error {
    Error::IncompleteModel { what }
}

struct Reader<'m> {
    model: &'m Model,
    is_gguf: bool,
    names: &'static Names,
    prefix: &'static str,
    /// Row scales and column orders by role and format, cached. Layers are alike, and
    /// a plan refuses a weight that differs.
    known: Vec<(&'static str, Format, bool, bool)>,
}

impl Reader<'_> {
    fn name(&self, layer: usize, role: &str) -> String {
        format!("{}{layer}.{role}", self.prefix)
    }

    fn has(&self, layer: usize, role: &str) -> bool {
        !role.is_empty() && self.model.info(&self.name(layer, role)).is_ok()
    }

    fn layer(&mut self, layer: usize, top_k: Option<usize>) -> Result<LayerTensors, Error> {
        let names = self.names;
        let of_layer = |reader: &mut Self, role| Ok::<_, Error>(reader.matrix(reader.name(layer, role), role)?.0);
        let feed_forward = match self.has(layer, names.router) {
            false => FeedForward::Dense {
                gate: if self.has(layer, names.gate) { Some(of_layer(self, names.gate)?) } else { None },
                up: of_layer(self, names.up)?,
                down: of_layer(self, names.down)?,
            },
            true => {
                let top_k = top_k.ok_or_else(|| incomplete("the number of experts per token is missing".into()))?;
                let router = of_layer(self, names.router)?;
                let mut of_experts = |role: &'static str| {
                    let (matrix, count) = self.matrix(self.name(layer, &role.replace("{e}", "0")), role)?;
                    match count.unwrap_or(router.n) == router.n {
                        true => Ok(matrix),
                        false => Err(incomplete(format!(
                            "{}: expected {} experts, which its router has",
                            matrix.tensor, router.n
                        ))),
                    }
                };
                let (gate, up, down) = (of_experts(names.gates)?, of_experts(names.ups)?, of_experts(names.downs)?);
                if top_k == 0 || top_k > router.n {
                    return Err(incomplete(format!("{top_k} experts a token: expected 1 to {}", router.n)));
                }
                FeedForward::Experts { gate, up, down, experts: router.n, top_k, router }
            }
        };
        let [before, behind] = names.norms.map(|role| self.norm(&self.name(layer, role)));
        let head_norms = match self.has(layer, names.head_norms[0]) {
            false => None,
            true => {
                let [q, k] = names.head_norms.map(|role| self.norm(&self.name(layer, role)));
                Some([q?, k?])
            }
        };
        Ok(LayerTensors {
            norms: [before?, behind?],
            head_norms,
            q: of_layer(self, names.q)?,
            k: of_layer(self, names.k)?,
            v: of_layer(self, names.v)?,
            o: of_layer(self, names.o)?,
            feed_forward,
        })
    }

    /// Tensors of a norm.
    fn norm(&self, name: &str) -> Result<NormTensors, Error> {
        let dense = |name: &str| match self.model.info(name) {
            Ok(TensorInfo { name, kind: TensorKind::Dense(dtype), .. }) => Some((name.clone(), *dtype)),
            _ => None,
        };
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let gamma =
            dense(name).ok_or_else(|| incomplete(format!("expected a tensor `{stem}.weight` of plain numbers")))?;
        Ok(NormTensors { gamma, beta: dense(&format!("{stem}.bias")) })
    }

    /// Weight, and the number of experts of a stack.
    fn matrix(&mut self, name: String, role: &'static str) -> Result<(Matrix, Option<usize>), Error> {
        let info = self.model.info(&name)?;
        let (n, k, count) = match info.shape[..] {
            [n, k] => (n, k, None),
            [count, n, k] => (n, k, Some(count)),
            ref shape => return Err(incomplete(format!("{name} has shape {shape:?}: expected a matrix"))),
        };
        let (format, is_quantized) = match &info.kind {
            TensorKind::Quantized(format) => (*format, true),
            TensorKind::Dense(dtype) => (dtype.name().parse()?, false),
            TensorKind::Opaque(kind) => {
                return Err(incomplete(format!("{name} is of type {kind}, for which there is no weight format")));
            }
        };
        let known = self.known.iter().find(|(r, f, ..)| *r == role && *f == format).copied();
        let (row_scale, k_order) = match (is_quantized && !self.is_gguf, known) {
            (false, _) => (false, false),
            (true, Some((_, _, row_scale, k_order))) => (row_scale, k_order),
            (true, None) => {
                let weight = self.model.stacked_weight(&name, 0)?;
                let found = (weight.row_scale().is_some(), weight.k_order().is_some());
                self.known.push((role, format, found.0, found.1));
                found
            }
        };
        let bias_name = format!("{}.bias", name.strip_suffix(".weight").unwrap_or(&name));
        let bias = match self.model.info(&bias_name).map(|info| &info.kind) {
            Ok(TensorKind::Dense(dtype)) => Some((bias_name, *dtype)),
            _ => None,
        };
        Ok((Matrix { tensor: info.name.clone(), format, n, k, row_scale, k_order, bias }, count))
    }
}

//! Architectures: which products and norms a layer has, of which tensors.

use qgemm_formats::model::{Model, TensorInfo, TensorKind, strict_json};
use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::numbers::{Heads, Numbers};
use super::operands::PlannedRotary;
use crate::error::Error;

/// Architectures that plans are made for.
pub(super) const SERVED: &[&str] = &["llama", "qwen3", "qwen3moe", "bert"];

/// How the tensors of a layer are called.
struct Names {
    /// What stands before the layer's number, and behind it.
    prefixes: &'static [&'static str],
    q: &'static str,
    k: &'static str,
    v: &'static str,
    o: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    router: &'static str,
    /// Of experts; `{e}` is the expert's number where they are stored one by one.
    gates: &'static str,
    ups: &'static str,
    downs: &'static str,
    /// The last product, else the embedding that it is tied to.
    heads: &'static [&'static str],
    /// Norms of a layer: before or behind attention, and before or behind the feed-forward part.
    norms: [&'static str; 2],
    /// Norms of the heads of queries and keys.
    head_norms: [&'static str; 2],
    /// The last norm of a decoder, or the first of an encoder.
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
    heads: &["output", "token_embd"],
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
    heads: &["lm_head", "model.embed_tokens"],
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

/// The products of a model.
pub(super) struct Network {
    pub architecture: &'static str,
    pub layers: Vec<LayerTensors>,
    /// The product that makes logits, where there is one.
    pub head: Option<Matrix>,
    /// Whether a layer's first norm comes before its products (else after).
    pub pre_norm: bool,
    /// The function of the feed-forward part.
    pub activation: Activation,
    pub heads: Heads,
    /// How queries and keys are turned; none in encoders, and the reason where that is the caller's.
    pub rotary: Option<Result<PlannedRotary, String>>,
    /// What norms add below the root.
    pub eps: f32,
    /// The norm before the head, or behind the embeddings of an encoder.
    pub outer_norm: NormTensors,
    /// Tokens that the model is made for, where it says so.
    pub context: Option<usize>,
}

/// The tensors of a norm.
#[derive(Clone)]
pub(super) struct NormTensors {
    pub gamma: (String, DType),
    pub beta: Option<(String, DType)>,
}

/// The products of a layer.
pub(super) struct LayerTensors {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    /// Norms before or behind attention, and before or behind the feed-forward part.
    pub norms: [NormTensors; 2],
    /// Norms of the heads of queries and keys.
    pub head_norms: Option<[NormTensors; 2]>,
    pub feed_forward: FeedForward,
}

/// What follows attention.
pub(super) enum FeedForward {
    /// `down(activation(up))`, with a gate where there is one.
    Dense { gate: Option<Matrix>, up: Matrix, down: Matrix },
    /// The same for `top_k` of `experts` experts that a router chooses.
    Experts { router: Matrix, gate: Matrix, up: Matrix, down: Matrix, experts: usize, top_k: usize },
}

/// A weight of the model: of experts, one of them.
#[derive(Clone)]
pub(super) struct Matrix {
    /// Tensor; of experts that are stored one by one, the first one's.
    pub tensor: String,
    pub format: Format,
    pub n: usize,
    pub k: usize,
    pub row_scale: bool,
    pub k_order: bool,
    pub bias: Option<(String, DType)>,
}

/// Finds the products of `model`; `config` is the text of its `config.json`.
///
/// # Errors
/// [`Error::UnknownArchitecture`], [`Error::IncompleteModel`], or a tensor that is missing or cannot be read.
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
    let head = match is_encoder {
        true => None,
        false => {
            let name = names.heads.iter().find(|name| model.info(name).is_ok());
            let name =
                name.ok_or_else(|| incomplete(format!("expected one of the tensors {}", names.heads.join(", "))))?;
            Some(reader.matrix((*name).to_owned(), "head")?.0)
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
    let (pre_norm, context) = (!is_encoder, numbers.context());
    Ok(Network { architecture, layers, head, pre_norm, activation, heads, rotary, eps, outer_norm, context })
}

/// That the products of all layers have the features of the heads.
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

/// A hash of the names, kinds, shapes and sizes of all tensors.
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
    /// What the weights of a role in a format carry beside codes and scales: found out once, for the files of layers are alike, and a
    /// plan does not run with a weight that is not.
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
                let top_k = top_k.ok_or_else(|| incomplete("it does not say how many experts a token has".into()))?;
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

    /// The tensors of a norm.
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

    /// A weight and, of a stack, how many there are.
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

//! BERT encoders: their tensors and numbers.

use qgemm_formats::model::Model;
use qgemm_hal::Activation;

use super::encoder_names::{EncoderNames, GGUF, HUGGING_FACE};
use super::hyperparameters::{ACTIVATION, CONTEXT, HEADS, HIDDEN};
use super::network::{AttentionTensors, FeedForward, Heads, LayerTensors, Mixer, Network, fingerprint};
use super::reader::Reader;
use super::settings::{Key, Settings};
use super::sizes::{INTERMEDIATE, LAYERS, size};
use crate::error::Error;

const EPS: Key = Key { gguf: "attention.layer_norm_epsilon", config: &["/layer_norm_eps"] };
const POSITIONS: Key = Key { gguf: "", config: &["/position_embedding_type"] };

/// Sizes and constants of an encoder.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct EncoderNumbers {
    /// Layers.
    pub layers: usize,
    /// Features of a token between layers, and of an embedding.
    pub hidden: usize,
    /// Features between up and down.
    pub intermediate: usize,
    /// Attention heads.
    pub heads: usize,
    /// Epsilon of LayerNorm.
    pub eps: f32,
    /// Rows of the position embedding.
    pub positions: usize,
    /// Activation of feed-forward parts.
    pub activation: Activation,
}

impl EncoderNumbers {
    /// Reads the hyperparameters.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>) -> Result<Self, Error> {
        let required = |key| settings.required(size(settings, key)?, key);
        let unserved = |key, got: String, expected: &str| {
            Err(Error::UnservedSetting { name: settings.name(key), got, expected: expected.to_owned() })
        };
        let (hidden, heads) = (required(HIDDEN)?, required(HEADS)?);
        if !hidden.is_multiple_of(heads) {
            return unserved(HEADS, heads.to_string(), &format!("a divisor of {hidden}"));
        }
        let activation = match settings.text(ACTIVATION).unwrap_or("gelu") {
            "gelu" => Activation::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            other => return unserved(ACTIVATION, other.to_owned(), "gelu, gelu_new or relu"),
        };
        match settings.text(POSITIONS) {
            None | Some("absolute") => {}
            Some(other) => return unserved(POSITIONS, other.to_owned(), "absolute"),
        }
        let positions = required(CONTEXT)?;
        let eps = settings.required(settings.number(EPS), EPS)? as f32;
        let (layers, intermediate) = (required(LAYERS)?, required(INTERMEDIATE)?);
        Ok(Self { layers, hidden, intermediate, heads, eps, positions, activation })
    }
}

/// Reads an encoder.
///
/// # Errors
/// As [`Network::read`].
pub(super) fn encoder(model: &Model, settings: &Settings<'_>) -> Result<Network, Error> {
    let names = if settings.is_gguf() { &GGUF } else { &HUGGING_FACE };
    let numbers = EncoderNumbers::read(settings)?;
    let mut reader = Reader::new(model, "bert");
    let prefix = if reader.has(&format!("{}{}", names.prefix, names.norm)) { names.prefix } else { "" };
    let layers =
        (0..numbers.layers).map(|i| layer(&mut reader, names, &numbers, &format!("{prefix}{}{i}.", names.layer)));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let outer_norm = reader.norm(&format!("{prefix}{}", names.norm), numbers.hidden)?;
    // The caller adds up the embeddings.
    let others = [names.words, names.positions, names.segments].into_iter().chain(names.heads.iter().copied());
    others.for_each(|name| {
        reader.ignore(&format!("{prefix}{name}"));
        reader.ignore(name);
    });
    let EncoderNumbers { hidden, heads, eps, positions, activation, .. } = numbers;
    Ok(Network {
        architecture: "bert",
        hidden,
        layers,
        embedding: None,
        head: None,
        pre_norm: false,
        activation,
        embedding_scale: 1.0,
        score_scale: None,
        heads: Heads { heads, kv_heads: heads, head_dim: hidden / heads },
        rotary: None,
        window_rotary: None,
        rotary_factors: None,
        eps,
        outer_norm,
        context: Some(positions),
        numbers: None,
        fingerprint: fingerprint(model),
        weight_bytes: reader.finish()?,
    })
}

fn layer(
    reader: &mut Reader<'_>,
    names: &EncoderNames,
    numbers: &EncoderNumbers,
    prefix: &str,
) -> Result<LayerTensors, Error> {
    let &EncoderNumbers { hidden, intermediate, .. } = numbers;
    let name = |part: &str| format!("{prefix}{part}");
    let [q, k, v] = names.qkv.map(|part| reader.matrix(name(part), part, [hidden, hidden]));
    let norms = [names.attention_norm, names.ffn_norm].map(|part| reader.norm(&name(part), hidden));
    let [attention_norm, ffn_norm] = norms;
    let attention = AttentionTensors {
        q: q?,
        gate: None,
        k: k?,
        v: v?,
        o: reader.matrix(name(names.attention_output), names.attention_output, [hidden, hidden])?,
        head_norms: None,
        sinks: None,
        window: None,
    };
    let feed_forward = FeedForward::Dense {
        gate: None,
        up: reader.matrix(name(names.up), names.up, [intermediate, hidden])?,
        down: reader.matrix(name(names.down), names.down, [hidden, intermediate])?,
    };
    Ok(LayerTensors {
        mixer: Some((attention_norm?, Mixer::Attention(attention))),
        feed_forward: Some((ffn_norm?, feed_forward)),
        post_norms: None,
    })
}

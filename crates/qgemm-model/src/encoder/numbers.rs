//! Hyperparameters of an encoder.

use std::path::Path;

use qgemm_api::Activation;

use crate::error::Error;
use crate::hyperparameters::{ACTIVATION, CONTEXT, HEADS, HIDDEN, INTERMEDIATE, LAYERS, size};
use crate::settings::{Key, Settings, json_beside};

const EPS: Key = Key { gguf: "attention.layer_norm_epsilon", config: &["/layer_norm_eps"] };
const POSITIONS: Key = Key { gguf: "", config: &["/position_embedding_type"] };

/// Sizes and constants of an encoder.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// Tokens of a text at most.
    pub context: usize,
    /// Activation of feed-forward parts.
    pub activation: Activation,
}

impl EncoderNumbers {
    /// Reads the hyperparameters of the model at `path`.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>, path: &Path) -> Result<Self, Error> {
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
        // `sentence-transformers` cuts texts earlier.
        let stated = json_beside(path, "sentence_bert_config.json")?.unwrap_or_default();
        let stated = stated["max_seq_length"].as_u64().and_then(|tokens| usize::try_from(tokens).ok());
        let context = stated.filter(|&tokens| tokens > 0).map_or(positions, |tokens| tokens.min(positions));
        let eps = settings.required(settings.number(EPS), EPS)? as f32;
        let (layers, intermediate) = (required(LAYERS)?, required(INTERMEDIATE)?);
        Ok(Self { layers, hidden, intermediate, heads, eps, positions, context, activation })
    }
}

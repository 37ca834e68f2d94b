//! Hyperparameters of a decoder: sizes, norms, context, window.

use crate::architecture::{Architecture, Window};
use crate::error::Error;
use crate::settings::{Key, Settings};

const LAYERS: Key = Key { gguf: "block_count", config: &["/num_hidden_layers"] };
const HIDDEN: Key = Key { gguf: "embedding_length", config: &["/hidden_size"] };
const INTERMEDIATE: Key = Key { gguf: "feed_forward_length", config: &["/intermediate_size"] };
const HEADS: Key = Key { gguf: "attention.head_count", config: &["/num_attention_heads"] };
const KV_HEADS: Key = Key { gguf: "attention.head_count_kv", config: &["/num_key_value_heads"] };
const HEAD_DIM: Key = Key { gguf: "attention.key_length", config: &["/head_dim"] };
const V_HEAD_DIM: Key = Key { gguf: "attention.value_length", config: &["/v_head_dim"] };
const EPS: Key = Key { gguf: "attention.layer_norm_rms_epsilon", config: &["/rms_norm_eps"] };
const CONTEXT: Key = Key { gguf: "context_length", config: &["/max_position_embeddings"] };
const WINDOW: Key = Key { gguf: "attention.sliding_window", config: &["/sliding_window"] };
const USE_WINDOW: Key = Key { gguf: "attention.use_sliding_window", config: &["/use_sliding_window"] };
const ACTIVATION: Key = Key { gguf: "", config: &["/hidden_act", "/hidden_activation"] };

/// Largest size that is read: products of two are far from overflow.
const MOST: usize = 1 << 24;

/// Sizes and constants of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Decoder layers.
    pub layers: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Features between gate·up and down.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Epsilon of RMSNorm.
    pub eps: f32,
    /// Tokens that the model is made for.
    pub context: usize,
    /// Keys that a query attends to at most.
    pub window: Option<usize>,
}

impl Hyperparameters {
    /// Reads the hyperparameters of a model.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>, architecture: &Architecture) -> Result<Self, Error> {
        let stated = |key| size(settings, key);
        let required = |key| settings.required(stated(key)?, key);
        let (hidden, heads) = (required(HIDDEN)?, required(HEADS)?);
        let head_dim = stated(HEAD_DIM)?.unwrap_or(hidden / heads);
        let eps = settings.required(settings.number(EPS), EPS)? as f32;
        let numbers = Self {
            layers: required(LAYERS)?,
            hidden,
            intermediate: required(INTERMEDIATE)?,
            heads,
            kv_heads: stated(KV_HEADS)?.unwrap_or(heads),
            head_dim,
            eps,
            context: required(CONTEXT)?,
            window: window(settings, architecture)?,
        };
        let expect = |key, got: String, holds: bool, expected: &str| match holds {
            true => Ok(()),
            false => Err(Error::UnservedSetting { name: settings.name(key), got, expected: expected.to_owned() }),
        };
        let v_dim = settings.count(V_HEAD_DIM).unwrap_or(head_dim);
        expect(V_HEAD_DIM, v_dim.to_string(), v_dim == head_dim, &format!("{head_dim}, as keys have"))?;
        expect(
            KV_HEADS,
            numbers.kv_heads.to_string(),
            heads.is_multiple_of(numbers.kv_heads),
            "a divisor of the heads",
        )?;
        let activation = settings.text(ACTIVATION).unwrap_or("silu");
        expect(ACTIVATION, activation.to_owned(), activation == "silu", "silu")?;
        Ok(numbers)
    }
}

/// A positive size, if it is stated.
fn size(settings: &Settings<'_>, key: Key) -> Result<Option<usize>, Error> {
    match settings.count(key).filter(|&n| n > 0) {
        Some(got) if got > MOST => Err(Error::UnservedSetting {
            name: settings.name(key),
            got: got.to_string(),
            expected: format!("at most {MOST}"),
        }),
        stated => Ok(stated),
    }
}

fn window(settings: &Settings<'_>, architecture: &Architecture) -> Result<Option<usize>, Error> {
    let stated = settings.count(WINDOW).filter(|&keys| keys > 0);
    match architecture.window {
        Window::None => Ok(None),
        Window::AllLayers => Ok(stated),
        Window::SomeLayers if stated.is_some() && settings.flag(USE_WINDOW) => Err(Error::UnservedSetting {
            name: settings.name(USE_WINDOW),
            got: "true".into(),
            expected: "false (a window on some layers is not run)".into(),
        }),
        Window::SomeLayers => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::architecture::architecture;

    fn read(name: &str, changes: &[(&str, serde_json::Value)]) -> Result<Hyperparameters, Error> {
        let mut config = json!({
            "model_type": name, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        });
        changes.iter().for_each(|(key, value)| config[key] = value.clone());
        Hyperparameters::read(&Settings::Config(config), architecture(name)?)
    }

    #[test]
    fn numbers_of_a_config() {
        let got = read("llama", &[]).expect("complete");
        let expected = Hyperparameters {
            layers: 3,
            hidden: 64,
            intermediate: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            eps: 1e-5,
            context: 512,
            window: None,
        };
        assert_eq!(got, expected);
        assert_eq!(read("qwen3", &[("head_dim", json!(32))]).expect("complete").head_dim, 32);
        assert_eq!(read("mistral", &[("sliding_window", json!(128))]).expect("complete").window, Some(128));
        assert_eq!(read("mistral", &[("sliding_window", json!(null))]).expect("complete").window, None);
        assert_eq!(read("qwen2", &[("sliding_window", json!(128))]).expect("complete").window, None);
    }

    #[test]
    fn other_settings_are_refused_by_name() {
        let refused = read("llama", &[("hidden_act", json!("gelu"))]).expect_err("no SiLU").to_string();
        assert_eq!(refused, "`hidden_act` is gelu: expected silu");
        let changes = [("sliding_window", json!(128)), ("use_sliding_window", json!(true))];
        assert!(matches!(read("qwen2", &changes), Err(Error::UnservedSetting { .. })));
        assert!(matches!(read("llama", &[("num_key_value_heads", json!(3))]), Err(Error::UnservedSetting { .. })));
        let huge = [("num_attention_heads", json!(1u64 << 39)), ("head_dim", json!(1u64 << 39))];
        assert!(matches!(read("llama", &huge), Err(Error::UnservedSetting { .. })));
        let missing = read("llama", &[("rms_norm_eps", json!(null))]).expect_err("missing").to_string();
        assert_eq!(missing, "the model does not state `rms_norm_eps`");
    }
}

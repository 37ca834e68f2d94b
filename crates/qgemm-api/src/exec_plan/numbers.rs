//! Model hyperparameters: heads, rotary embedding, norm epsilon, context length.

use qgemm_formats::model::Model;
use qgemm_formats::model::gguf::{GgufScalar, GgufValue};
use qgemm_hal::RotaryPairs;
use serde_json::Value;

use super::rotary::{PlannedRotary, PlannedScaling, PlannedTables};
use crate::error::Error;

/// Hyperparameters of a GGUF file (keys with the architecture's
/// prefix) or of a `config.json`.
pub(super) enum Numbers<'m> {
    Gguf { model: &'m Model, architecture: &'static str },
    Config(Value),
}

/// Head counts and dimensions of attention.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Numbers<'_> {
    /// Number by its GGUF key, or its `config.json` names.
    fn number(&self, gguf: &str, config: &[&str]) -> Option<f64> {
        match self {
            Self::Gguf { model, architecture } => {
                let key = format!("{architecture}.{gguf}");
                let value = model.metadata().iter().find(|(name, _)| *name == key).map(|(_, value)| value)?;
                match value {
                    GgufValue::Scalar(GgufScalar::F32(number)) => Some(f64::from(*number)),
                    GgufValue::Scalar(GgufScalar::F64(number)) => Some(*number),
                    other => other.as_u64().map(|number| number as f64),
                }
            }
            Self::Config(config_json) => config.iter().find_map(|name| config_json.pointer(name)?.as_f64()),
        }
    }

    fn text(&self, gguf: &str, config: &[&str]) -> Option<String> {
        match self {
            Self::Gguf { model, architecture } => {
                let key = format!("{architecture}.{gguf}");
                let value = model.metadata().iter().find(|(name, _)| *name == key);
                value.and_then(|(_, value)| value.as_str()).map(str::to_owned)
            }
            Self::Config(config_json) => {
                config.iter().find_map(|name| Some(config_json.pointer(name)?.as_str()?.to_owned()))
            }
        }
    }

    fn count(&self, gguf: &str, config: &[&str]) -> Option<usize> {
        self.number(gguf, config).filter(|n| n.fract() == 0.0 && (0.0..1e12).contains(n)).map(|n| n as usize)
    }

    fn required<T>(&self, found: Option<T>, gguf: &str, config: &str) -> Result<T, Error> {
        found.ok_or_else(|| {
            let name = if let Self::Gguf { architecture, .. } = self {
                format!("{architecture}.{gguf}")
            } else {
                config.trim_start_matches('/').to_owned()
            };
            Error::IncompleteModel { what: format!("`{name}` is missing") }
        })
    }

    /// Heads, for queries of `q` features in all.
    pub fn heads(&self, q: usize) -> Result<Heads, Error> {
        let heads = self.count("attention.head_count", &["/num_attention_heads"]);
        let heads = self.required(heads, "attention.head_count", "/num_attention_heads")?;
        let kv_heads = self.count("attention.head_count_kv", &["/num_key_value_heads"]).unwrap_or(heads);
        let of_features = q.checked_div(heads);
        let head_dim = self.count("attention.key_length", &["/head_dim"]).or(of_features).unwrap_or(0);
        Ok(Heads { heads, kv_heads, head_dim })
    }

    /// Epsilon of RMSNorm, or of LayerNorm.
    pub fn eps(&self, is_layer: bool) -> Result<f32, Error> {
        let (gguf, config) = match is_layer {
            true => ("attention.layer_norm_epsilon", "/layer_norm_eps"),
            false => ("attention.layer_norm_rms_epsilon", "/rms_norm_eps"),
        };
        self.required(self.number(gguf, &[config]), gguf, config).map(|eps| eps as f32)
    }

    /// Experts per token.
    pub fn top_k(&self) -> Option<usize> {
        self.count("expert_used_count", &["/num_experts_per_tok"])
    }

    /// Keys that a query sees at most, in every layer.
    ///
    /// # Errors
    /// [`Error::IncompleteModel`] where only some layers have a window.
    pub fn window(&self, architecture: &str) -> Result<Option<usize>, Error> {
        let window = self.count("attention.sliding_window", &["/sliding_window"]).filter(|window| *window > 0);
        match (architecture, self.is_set("/use_sliding_window")) {
            ("mistral", _) => Ok(window),
            (_, true) if window.is_some() => {
                Err(Error::IncompleteModel { what: "`use_sliding_window`: no plan for a window on some layers".into() })
            }
            _ => Ok(None),
        }
    }

    /// Whether the file has factors of frequencies.
    fn has_factors(&self) -> bool {
        matches!(self, Self::Gguf { model, .. } if model.info("rope_freqs").is_ok())
    }

    fn is_set(&self, config: &str) -> bool {
        matches!(self, Self::Config(value) if value.pointer(config).and_then(Value::as_bool) == Some(true))
    }

    /// Context length.
    pub fn context(&self) -> Option<usize> {
        self.count("context_length", &["/max_position_embeddings"])
    }

    /// Rotary embedding, or the reason why the library does not support it.
    pub fn rotary(&self, head_dim: usize) -> Result<PlannedRotary, String> {
        let pairs = match self {
            // GGUF files of llama permute the rows of queries and keys.
            Self::Gguf { architecture: "llama", .. } => RotaryPairs::Interleaved,
            Self::Gguf { .. } => RotaryPairs::Neox,
            Self::Config(_) => RotaryPairs::Neox,
        };
        let share = self.number("", &["/partial_rotary_factor", "/rope_parameters/partial_rotary_factor"]);
        let part = share.map(|share| (share * head_dim as f64) as usize);
        let dim = self.count("rope.dimension_count", &[]).or(part).unwrap_or(head_dim);
        let base = self.number("rope.freq_base", &["/rope_theta", "/rope_parameters/rope_theta"]).unwrap_or(10_000.0);
        let of = |gguf: &str, name: &str| {
            self.number(gguf, &[&format!("/rope_scaling/{name}"), &format!("/rope_parameters/{name}")])
        };
        let kinds =
            ["rope_scaling/rope_type", "rope_scaling/type", "rope_parameters/rope_type"].map(|name| format!("/{name}"));
        let kind = self.text("rope.scaling.type", &kinds.each_ref().map(String::as_str));
        let kind = kind.unwrap_or_else(|| "none".into());
        let missing = |what: &str| format!("its rotary scaling of kind `{kind}` has no {what}");
        let factor = || of("rope.scaling.factor", "factor").ok_or_else(|| missing("factor"));
        let original = || {
            let stated = of("rope.scaling.original_context_length", "original_max_position_embeddings");
            stated.or(self.context().map(|n| n as f64)).map(|n| n as usize).ok_or_else(|| missing("original context"))
        };
        let scaling = match kind.as_str() {
            "none" | "default" => None,
            "linear" => Some(scaling(&kind, factor()?)),
            "llama3" => Some(PlannedScaling {
                low: Some(of("", "low_freq_factor").ok_or_else(|| missing("low_freq_factor"))?),
                high: Some(of("", "high_freq_factor").ok_or_else(|| missing("high_freq_factor"))?),
                original: Some(original()?),
                ..scaling(&kind, factor()?)
            }),
            "yarn" => Some(PlannedScaling {
                low: Some(of("rope.scaling.yarn_beta_slow", "beta_slow").unwrap_or(1.0)),
                high: Some(of("rope.scaling.yarn_beta_fast", "beta_fast").unwrap_or(32.0)),
                original: Some(original()?),
                ..scaling(&kind, factor()?)
            }),
            other => return Err(format!("rotary scaling `{other}` is not supported")),
        };
        let tables = self.has_factors().then(|| PlannedTables {
            factors: "rope_freqs.weight".into(),
            cos: "rotary.cos".into(),
            sin: "rotary.sin".into(),
        });
        if tables.is_some() && scaling.is_some() {
            return Err("its frequencies have both a scaling and factors of their own".into());
        }
        Ok(PlannedRotary { dim, pairs: pairs.name().to_owned(), base, scaling, tables })
    }
}

fn scaling(kind: &str, factor: f64) -> PlannedScaling {
    PlannedScaling { kind: kind.to_owned(), factor, low: None, high: None, original: None }
}

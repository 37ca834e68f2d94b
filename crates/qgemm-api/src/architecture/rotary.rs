//! Rotary embedding of a model, by its settings.

use qgemm_hal::RotaryPairs;

use super::description::Architecture;
use super::hyperparameters::Hyperparameters;
use super::settings::{Key, Settings};
use crate::error::Error;
use crate::kv_append::RotaryScaling;

const DIM: Key = Key { gguf: "rope.dimension_count", config: &[] };
const SHARE: Key = Key { gguf: "", config: &["/partial_rotary_factor", "/rope_parameters/partial_rotary_factor"] };
const BASE: Key = Key {
    gguf: "rope.freq_base",
    config: &["/rope_theta", "/rope_parameters/rope_theta", "/rope_parameters/full_attention/rope_theta"],
};
const WINDOW_BASE: Key = Key {
    gguf: "rope.freq_base_swa",
    config: &["/rope_local_base_freq", "/rope_parameters/sliding_attention/rope_theta"],
};
const KIND: Key = Key {
    gguf: "rope.scaling.type",
    config: &[
        "/rope_scaling/rope_type",
        "/rope_scaling/type",
        "/rope_parameters/rope_type",
        "/rope_parameters/full_attention/rope_type",
    ],
};
const FACTOR: Key = Key {
    gguf: "rope.scaling.factor",
    config: &["/rope_scaling/factor", "/rope_parameters/factor", "/rope_parameters/full_attention/factor"],
};
const ORIGINAL: Key = Key {
    gguf: "rope.scaling.original_context_length",
    config: &[
        "/rope_scaling/original_max_position_embeddings",
        "/rope_parameters/original_max_position_embeddings",
        "/original_max_position_embeddings",
    ],
};
const LOW: Key = Key { gguf: "", config: &["/rope_scaling/low_freq_factor", "/rope_parameters/low_freq_factor"] };
const HIGH: Key = Key { gguf: "", config: &["/rope_scaling/high_freq_factor", "/rope_parameters/high_freq_factor"] };
const BETA_FAST: Key =
    Key { gguf: "rope.scaling.yarn_beta_fast", config: &["/rope_scaling/beta_fast", "/rope_parameters/beta_fast"] };
const BETA_SLOW: Key =
    Key { gguf: "rope.scaling.yarn_beta_slow", config: &["/rope_scaling/beta_slow", "/rope_parameters/beta_slow"] };
const TRUNCATE: Key = Key { gguf: "", config: &["/rope_scaling/truncate", "/rope_parameters/truncate"] };
const AMPLITUDE: Key =
    Key { gguf: "", config: &["/rope_scaling/attention_factor", "/rope_parameters/attention_factor"] };
const GGUF_AMPLITUDE: Key = Key { gguf: "rope.scaling.attn_factor", config: &[] };

/// Rotary settings of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotarySettings {
    /// Rotated features of a head.
    pub dim: usize,
    /// Features that are rotated together.
    pub pairs: RotaryPairs,
    /// Frequency base.
    pub base: f64,
    /// Frequency scaling.
    pub scaling: RotaryScaling,
    /// Factor of rotated features, where it is not that of the scaling.
    pub amplitude: Option<f32>,
}

impl RotarySettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// [`Error::UnservedSetting`] for another kind of scaling; [`Error::MissingSetting`].
    pub fn read(
        settings: &Settings<'_>,
        architecture: &Architecture,
        numbers: &Hyperparameters,
    ) -> Result<Self, Error> {
        let head_dim = numbers.head_dim;
        let share = (settings.number(SHARE).unwrap_or(architecture.rotary_share) * head_dim as f64) as usize;
        let dim = settings.count(DIM).unwrap_or(share);
        let base = settings.number(BASE).unwrap_or(10_000.0);
        let pairs = if settings.is_gguf() { architecture.gguf_rotary } else { RotaryPairs::Neox };
        let scaling = scaling(settings, architecture, numbers)?;
        let amplitude = match scaling {
            RotaryScaling::Yarn { factor, .. } => {
                let multiplied = settings.number(GGUF_AMPLITUDE).map(|by| by * (1.0 + 0.1 * factor.ln()));
                settings.number(AMPLITUDE).or(multiplied).map(|amplitude| amplitude as f32)
            }
            _ => None,
        };
        Ok(Self { dim, pairs, base, scaling, amplitude })
    }

    /// Settings of layers with a sliding window, where they differ: another base, and no scaling.
    pub fn of_window(self, settings: &Settings<'_>, architecture: &Architecture) -> Option<Self> {
        let default = architecture.window_rotary_base?;
        let base = settings.number(WINDOW_BASE).unwrap_or(default);
        Some(Self { base, scaling: RotaryScaling::None, amplitude: None, ..self })
    }
}

fn scaling(
    settings: &Settings<'_>,
    architecture: &Architecture,
    numbers: &Hyperparameters,
) -> Result<RotaryScaling, Error> {
    let required = |key| settings.required(settings.number(key), key);
    let original = settings.count(ORIGINAL).unwrap_or(numbers.context);
    match settings.text(KIND).unwrap_or("none") {
        "none" | "default" => Ok(RotaryScaling::None),
        "linear" => Ok(RotaryScaling::Linear { factor: required(FACTOR)? }),
        "llama3" => Ok(RotaryScaling::Llama3 {
            factor: required(FACTOR)?,
            low: required(LOW)?,
            high: required(HIGH)?,
            original,
        }),
        "yarn" => {
            let fast = settings.number(BETA_FAST).unwrap_or(32.0);
            let slow = settings.number(BETA_SLOW).unwrap_or(1.0);
            let truncate = settings.flag(TRUNCATE).unwrap_or(architecture.yarn_truncate);
            Ok(RotaryScaling::Yarn { factor: required(FACTOR)?, fast, slow, original, truncate })
        }
        other => Err(Error::UnservedSetting {
            name: settings.name(KIND),
            got: other.to_owned(),
            expected: "none, linear, llama3 or yarn".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::architecture::served::architecture;

    fn read(changes: &[(&str, Value)]) -> Result<RotarySettings, Error> {
        let mut config = json!({ "model_type": "llama" });
        changes.iter().for_each(|(key, value)| config[key] = value.clone());
        let numbers = Hyperparameters {
            layers: 1,
            draft_layers: 0,
            hidden: 64,
            intermediate: 64,
            heads: 4,
            kv_heads: 4,
            head_dim: 16,
            activation: qgemm_hal::Activation::Silu,
            score_scale: None,
            eps: 1e-5,
            context: 2048,
            window: None,
            parts: Vec::new(),
            recurrent: None,
            experts: None,
        };
        RotarySettings::read(&Settings::Config(config), architecture("llama")?, &numbers)
    }

    #[test]
    fn settings_of_a_config() {
        let plain = RotarySettings {
            dim: 16,
            pairs: RotaryPairs::Neox,
            base: 10_000.0,
            scaling: RotaryScaling::None,
            amplitude: None,
        };
        assert_eq!(read(&[]).expect("read"), plain);
        assert_eq!(read(&[("rope_theta", json!(5e5))]).expect("read"), RotarySettings { base: 5e5, ..plain });
        assert_eq!(read(&[("partial_rotary_factor", json!(0.5))]).expect("read").dim, 8);
        let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192 });
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        assert_eq!(read(&[("rope_scaling", llama3)]).expect("read"), RotarySettings { scaling, ..plain });
        let yarn = json!({ "type": "yarn", "factor": 4.0, "attention_factor": 1.5 });
        let scaling = RotaryScaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 2048, truncate: true };
        let expected = RotarySettings { scaling, amplitude: Some(1.5), ..plain };
        assert_eq!(read(&[("rope_scaling", yarn)]).expect("read"), expected);
    }

    #[test]
    fn other_scalings_are_refused() {
        let refused = read(&[("rope_scaling", json!({ "rope_type": "longrope" }))]).expect_err("not run").to_string();
        assert_eq!(refused, "`rope_scaling.rope_type` is longrope: expected none, linear, llama3 or yarn");
        assert!(matches!(read(&[("rope_scaling", json!({ "type": "linear" }))]), Err(Error::MissingSetting { .. })));
    }
}

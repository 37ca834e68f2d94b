//! Sizes of recurrent mixers.

use qgemm_hal::op::linear_attention::MOST_DIM;

use super::description::{Architecture, Recurrence};
use super::settings::{Key, Settings};
use super::sizes::size;
use crate::error::Error;

const CONV_WIDTH: Key = Key { gguf: "shortconv.l_cache", config: &["/conv_L_cache"] };
const WIDTH: Key = Key { gguf: "ssm.conv_kernel", config: &["/linear_conv_kernel_dim", "/conv_kernel"] };
const HEADS: Key = Key { gguf: "ssm.time_step_rank", config: &["/linear_num_value_heads", "/mamba_num_heads"] };
const KEY_HEADS: Key = Key { gguf: "ssm.group_count", config: &["/linear_num_key_heads", "/n_groups"] };
const KEY_DIM: Key = Key { gguf: "ssm.state_size", config: &["/linear_key_head_dim", "/ssm_state_size"] };
const VALUE_DIM: Key = Key { gguf: "", config: &["/linear_value_head_dim", "/mamba_head_dim"] };
const VALUES: Key = Key { gguf: "ssm.inner_size", config: &[] };
const ACTIVATION: Key = Key { gguf: "", config: &["/mamba_hidden_act"] };
const STEP_LIMIT: Key = Key { gguf: "", config: &["/time_step_limit/0"] };
const STEP_MOST: Key = Key { gguf: "", config: &["/time_step_limit/1"] };

/// Sizes of the recurrent mixer of a model's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentNumbers {
    /// Short convolution.
    ShortConv {
        /// Taps of the kernel.
        width: usize,
    },
    /// Gated delta rule or Mamba-2.
    Linear(LinearNumbers),
}

/// Sizes of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearNumbers {
    /// Taps of the convolution's kernel.
    pub width: usize,
    /// Heads of values.
    pub heads: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Features of a key.
    pub key_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
}

impl RecurrentNumbers {
    /// Reads the sizes, if the architecture has a recurrence.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>, architecture: &Architecture) -> Result<Option<Self>, Error> {
        let required = |key| settings.required(size(settings, key)?, key);
        let unserved = |key, got: String, expected: String| {
            Err(Error::UnservedSetting { name: settings.name(key), got, expected })
        };
        match architecture.recurrence {
            Recurrence::None => return Ok(None),
            Recurrence::ShortConv => return Ok(Some(Self::ShortConv { width: required(CONV_WIDTH)? })),
            Recurrence::GatedDelta { .. } | Recurrence::Mamba2 => {}
        }
        let (heads, key_heads) = (required(HEADS)?, required(KEY_HEADS)?);
        if !heads.is_multiple_of(key_heads) {
            return unserved(KEY_HEADS, key_heads.to_string(), format!("a divisor of {heads}"));
        }
        let v_dim = match settings.is_gguf() {
            true => {
                let values = required(VALUES)?;
                if !values.is_multiple_of(heads) {
                    return unserved(VALUES, values.to_string(), format!("a multiple of {heads}, the heads"));
                }
                values / heads
            }
            false => required(VALUE_DIM)?,
        };
        if let Some(other) = settings.text(ACTIVATION).filter(|&name| name != "silu") {
            return unserved(ACTIVATION, other.to_owned(), "silu".into());
        }
        let (least, most) = (settings.number(STEP_LIMIT), settings.number(STEP_MOST));
        // Infinity is no number in JSON, or is written as a huge one.
        if least.is_some_and(|least| least > 0.0) || most.is_some_and(|most| most < 1e30) {
            return unserved(STEP_LIMIT, format!("{least:?} to {most:?}"), "no limit".into());
        }
        let (width, key_dim) = (required(WIDTH)?, required(KEY_DIM)?);
        let of_values = if settings.is_gguf() { VALUES } else { VALUE_DIM };
        for (key, dim) in [(KEY_DIM, key_dim), (of_values, v_dim)] {
            if dim > MOST_DIM {
                return unserved(key, format!("{dim} a head"), format!("at most {MOST_DIM}"));
            }
        }
        Ok(Some(Self::Linear(LinearNumbers { width, heads, key_heads, key_dim, v_dim })))
    }
}

impl LinearNumbers {
    /// Features of all queries, or of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Features of all values.
    pub fn values(&self) -> usize {
        self.heads * self.v_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::architecture::served::architecture;

    fn read(name: &str, changes: &[(&str, Value)]) -> Result<Option<RecurrentNumbers>, Error> {
        let mut config = json!({
            "conv_L_cache": 3, "linear_conv_kernel_dim": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 64, "conv_kernel": 4, "mamba_num_heads": 128,
            "n_groups": 8, "ssm_state_size": 256, "mamba_head_dim": 80, "time_step_limit": [0.0, null],
        });
        changes.iter().for_each(|(key, value)| config[key] = value.clone());
        RecurrentNumbers::read(&Settings::Config(config), architecture(name)?)
    }

    #[test]
    fn sizes_of_a_config() {
        let read = |name| read(name, &[]).expect("complete");
        assert_eq!(read("llama"), None);
        assert_eq!(read("lfm2"), Some(RecurrentNumbers::ShortConv { width: 3 }));
        let delta = LinearNumbers { width: 4, heads: 32, key_heads: 16, key_dim: 128, v_dim: 64 };
        assert_eq!(read("qwen3_next"), Some(RecurrentNumbers::Linear(delta)));
        assert_eq!((delta.keys(), delta.values(), delta.channels()), (2048, 2048, 6144));
    }

    #[test]
    fn other_sizes_are_refused_by_name() {
        let refused = |name, key, value| read(name, &[(key, value)]).expect_err("refused").to_string();
        let heads = refused("qwen3_next", "linear_num_key_heads", json!(5));
        assert_eq!(heads, "`linear_num_key_heads` is 5: expected a divisor of 32");
        let dim = refused("qwen3_next", "linear_key_head_dim", json!(1 << 20));
        assert_eq!(dim, "`linear_key_head_dim` is 1048576 a head: expected at most 256");
        let missing = refused("lfm2", "conv_L_cache", json!(null));
        assert_eq!(missing, "the model does not state `conv_L_cache`");
        let activation = refused("nemotron_h", "mamba_hidden_act", json!("gelu"));
        assert_eq!(activation, "`mamba_hidden_act` is gelu: expected silu");
        assert!(refused("nemotron_h", "time_step_limit", json!([0.001, 0.1])).contains("expected no limit"));
    }
}

//! Sizes of recurrent mixers.

use super::description::{Architecture, Recurrence};
use super::hyperparameters::size;
use super::settings::{Key, Settings};
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
        Ok(Some(Self::Linear(LinearNumbers {
            width: required(WIDTH)?,
            heads,
            key_heads,
            key_dim: required(KEY_DIM)?,
            v_dim,
        })))
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

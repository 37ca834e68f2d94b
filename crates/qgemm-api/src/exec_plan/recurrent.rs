//! Plan-file records of recurrent mixers: short convolution, linear attention, their states.

use std::ops::Range;

use qgemm_formats::{DType, ShardAxis};
use serde::{Deserialize, Serialize};

use super::mismatch::wrong;
use super::ranks::{Division, PlannedShard};
use super::sizes::WORD;
use crate::attention::Queries;
use crate::error::Error;
use crate::linear_attention::{Decay, LinearAttention};
use crate::operand::WIDE_ACCESS;
use crate::short_conv::ShortConv;

/// States of recurrent mixers: a slot for each sequence, found by an index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedState {
    /// Region of the states.
    pub region: String,
    /// Slots.
    pub slots: usize,
    /// Region of the slot of each sequence: i32.
    pub indices: String,
}

/// Short convolution of some columns of X (`short_conv`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedConv {
    /// Sequences, with equal shares of the tokens.
    pub sequences: usize,
    /// Taps of the kernel.
    pub width: usize,
    /// First column of the input.
    pub first: usize,
    /// First column of the gate of the input.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub input_gate: Option<usize>,
    /// First column of the gate of the result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub output_gate: Option<usize>,
    /// Whether SiLU follows.
    pub silu: bool,
    /// Region and tensor of the kernel: f32 `[channels, width]`.
    pub weight: String,
    /// Region and tensor of the bias: f32 `[channels]`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bias: Option<String>,
    /// This rank's channels of kernel and bias, one range after the other. Empty for all.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub shards: Vec<PlannedShard>,
    /// Last inputs of each slot.
    pub state: PlannedState,
}

/// Linear attention of the columns of X (`linear_attention`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedLinear {
    /// Sequences, with equal shares of the tokens.
    pub sequences: usize,
    /// Heads of values.
    pub heads: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Whether value head `h` has key head `h % key_heads`.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub tiled: bool,
    /// First of the rank's value heads, in tensors with a number for each. Absent if it has all.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub first_head: Option<usize>,
    /// Features of a key.
    pub key_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
    /// First column of queries.
    pub q: usize,
    /// First column of keys.
    pub k: usize,
    /// First column of values.
    pub v: usize,
    /// Whether there is a delta term.
    pub delta: bool,
    /// Epsilon of the L2 norm of queries and keys, if they have one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub normalized: Option<f32>,
    /// Scale of queries. The root of `1 / key_dim` if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scale: Option<f32>,
    /// Region of the summands of the time step: f32 `[tokens, heads]`.
    pub step: String,
    /// Region of what the sigmoid makes β: f32 `[tokens, heads]`. β is the time step if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta: Option<String>,
    /// Region and tensor of the logarithms of the decay rates: f32 `[heads]`.
    pub a_log: String,
    /// Whether the tensor has the negative rates instead.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_rate: bool,
    /// Region and tensor of the bias of the time step: f32 `[heads]`.
    pub dt_bias: String,
    /// Region and tensor of the factors of values in the result: f32 `[heads]`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub skip: Option<String>,
    /// State of each slot: f32 `[heads, v_dim, key_dim]`.
    pub state: PlannedState,
}

impl PlannedConv {
    /// Problem of `tokens` tokens with `channels` of `columns` columns.
    pub(super) fn describe(&self, [tokens, channels, columns]: [usize; 3], dtype: DType) -> ShortConv {
        let each = tokens.checked_div(self.sequences).unwrap_or(0);
        let conv = ShortConv::new(dtype, channels, self.width, Queries::each(self.sequences, each));
        let firsts = [Some(self.first), self.input_gate, self.output_gate].into_iter().flatten();
        let conv = conv.x_row_stride(columns as u64).alignment(alignment(firsts, dtype)).state(self.state.slots);
        let conv = if self.silu { conv.silu() } else { conv };
        let conv = if self.bias.is_some() { conv.bias() } else { conv };
        let conv = self.input_gate.iter().fold(conv, |conv, _| conv.input_gate_row_stride(columns as u64));
        self.output_gate.iter().fold(conv, |conv, _| conv.output_gate_row_stride(columns as u64))
    }

    /// Numbers of the rank's channels, `each` of every channel, from those of all.
    pub(super) fn of_channels(&self, whole: Vec<f32>, each: usize) -> Result<Vec<f32>, Error> {
        if self.shards.is_empty() {
            return Ok(whole);
        }
        let part = |shard: &PlannedShard| match shard.division()? {
            Division::Features(ShardAxis::Rows) => {
                let at = |channel: usize| channel.saturating_mul(each);
                part_of(&whole, at(shard.range().start)..at(shard.range().end))
            }
            _ => Err(wrong("conv.shards.axis", "rows", &shard.axis)),
        };
        self.shards.iter().map(part).collect::<Result<Vec<_>, _>>().map(|parts| parts.concat())
    }

    /// Bytes of the state; `None` on overflow.
    pub(super) fn state_bytes(&self, channels: usize, dtype: DType) -> Option<usize> {
        let rows = self.state.slots.checked_mul(self.width.saturating_sub(1))?;
        rows.checked_mul(channels)?.checked_mul(dtype.bytes())
    }
}

impl PlannedLinear {
    /// Problem of `tokens` tokens of `columns` columns.
    pub(super) fn describe(
        &self,
        [tokens, columns]: [usize; 2],
        dtype: DType,
        batch_invariant: bool,
    ) -> LinearAttention {
        let &Self { sequences, heads, key_heads, key_dim, v_dim, q, k, v, .. } = self;
        let queries = Queries::each(sequences, tokens.checked_div(sequences).unwrap_or(0));
        let (token, key, value) = (columns as u64, key_dim as u64, v_dim as u64);
        let attention = LinearAttention::new(dtype, heads, key_dim, queries, self.state.slots)
            .key_heads(key_heads)
            .v_dim(v_dim)
            .q_strides(token, key)
            .k_strides(token, key)
            .v_strides(token, value)
            .alignment(alignment([q, k, v].into_iter(), dtype))
            .decay(Decay::per_head().softplus(DType::F32))
            .slot_indices();
        let attention = if batch_invariant { attention.batch_invariant() } else { attention };
        let attention = if self.tiled { attention.tiled_key_heads() } else { attention };
        let attention = if self.delta { attention } else { attention.without_delta() };
        let attention = if self.beta.is_some() { attention.beta_logits() } else { attention.time_step_beta() };
        let attention = if self.skip.is_some() { attention.skip() } else { attention };
        let attention = self.normalized.into_iter().fold(attention, LinearAttention::normalized);
        self.scale.into_iter().fold(attention, LinearAttention::scale)
    }

    /// Numbers of the rank's heads, from those of all.
    pub(super) fn of_heads(&self, whole: Vec<f32>) -> Result<Vec<f32>, Error> {
        match self.first_head {
            None => Ok(whole),
            Some(first) => part_of(&whole, first..first.saturating_add(self.heads)).map(<[f32]>::to_vec),
        }
    }

    /// Bytes of the states; `None` on overflow.
    pub(super) fn state_bytes(&self) -> Option<usize> {
        let values = self.state.slots.checked_mul(self.heads)?.checked_mul(self.v_dim)?;
        values.checked_mul(self.key_dim)?.checked_mul(WORD)
    }
}

/// Alignment of addresses at these columns of a region, as far as kernels gain by it.
fn alignment(columns: impl Iterator<Item = usize>, dtype: DType) -> usize {
    let of = |first: usize| match first.saturating_mul(dtype.bytes()) {
        0 => WIDE_ACCESS,
        bytes => WIDE_ACCESS.min(1 << bytes.trailing_zeros()),
    };
    columns.map(of).min().unwrap_or(WIDE_ACCESS)
}

/// A range of numbers.
pub(super) fn part_of(values: &[f32], range: Range<usize>) -> Result<&[f32], Error> {
    let got = format!("{range:?}");
    values.get(range).ok_or_else(|| wrong("shards", &format!("a range of {}", values.len()), &got))
}

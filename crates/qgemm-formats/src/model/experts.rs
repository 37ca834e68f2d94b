//! The experts of a layer, as files have them: one tensor with all of them, or a tensor an expert.

use super::Model;
use super::layer::stack_size;
use super::raw::bad;
use crate::error::FormatError;
use crate::experts::HostExperts;
use crate::weight::HostWeight;

/// What stands in a name for an expert's number.
const NUMBER: &str = "{}";

impl Model {
    /// The weights of a layer's experts, called `name`: either a stack of matrices, as in GGUF files (`blk.0.ffn_down_exps`), or, where
    /// `name` holds `{}`, a layer for each number from 0 on that the model has (`model.layers.0.mlp.experts.{}.down_proj`).
    ///
    /// # Errors
    /// As [`Model::weight`] and [`HostExperts::new`].
    pub fn experts(&self, name: &str) -> Result<HostExperts, FormatError> {
        HostExperts::new(&self.expert_weights(name)?)
    }

    /// The same of pairs of gate and up, each named as in [`Model::experts`].
    ///
    /// # Errors
    /// As [`Model::experts`]; [`FormatError::PairMismatch`] when one has more experts than the other.
    pub fn gated_experts(&self, gate: &str, up: &str) -> Result<HostExperts, FormatError> {
        let (gates, ups) = (self.expert_weights(gate)?, self.expert_weights(up)?);
        if gates.len() != ups.len() {
            let (gate, up) = (gates.len().to_string(), ups.len().to_string());
            return Err(FormatError::PairMismatch { what: "number of experts", gate, up });
        }
        HostExperts::gated(&gates.into_iter().zip(ups).collect::<Vec<_>>())
    }

    /// The pairs of gate and up of a layer's experts, called `name` as in [`Model::experts`], where the rows of each alternate between
    /// the two, the gate's first, as in gpt-oss checkpoints (`model.layers.0.mlp.experts.gate_up_proj`).
    ///
    /// # Errors
    /// As [`Model::experts`]; [`FormatError::PairMismatch`] when one has an odd number of rows.
    pub fn interleaved_experts(&self, name: &str) -> Result<HostExperts, FormatError> {
        let pair = |weight: HostWeight| weight.interleaved_pair().map(|[gate, up]| (gate, up));
        let pairs: Result<Vec<_>, _> = self.expert_weights(name)?.into_iter().map(pair).collect();
        HostExperts::gated(&pairs?)
    }

    /// The biases of such pairs, a row an expert (`gate_up_proj_bias`): of each expert those of the gate, then those of the up, as
    /// products with gated pairs take them. Those of experts that are no pairs, such as `down_proj_bias`, [`Model::dense`] reads as
    /// they are.
    ///
    /// # Errors
    /// As [`Model::dense`]; [`FormatError::BadFile`] when the tensor is no matrix of an even number of columns.
    pub fn interleaved_biases(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let (tensor, info) = (self.dense(name)?, self.info(name)?);
        let &[_, columns] = &info.shape[..] else {
            return Err(bad(&info.name, format!("expected a row of biases an expert, got shape {:?}", info.shape)));
        };
        if columns == 0 || !columns.is_multiple_of(2) {
            return Err(bad(
                &info.name,
                format!("expected biases of gate and up by turns, got {columns} of an expert"),
            ));
        }
        let values = tensor.to_f32();
        let parts = |row: &[f32]| [0, 1].map(|first| row.iter().skip(first).step_by(2).copied().collect::<Vec<_>>());
        Ok(values.chunks_exact(columns).flat_map(parts).flatten().collect())
    }

    fn expert_weights(&self, name: &str) -> Result<Vec<HostWeight>, FormatError> {
        if !name.contains(NUMBER) {
            let shape = &self.info(name)?.shape;
            let experts = if shape.len() < 3 { 1 } else { stack_size(shape) };
            return (0..experts).map(|expert| self.stacked_weight(name, expert)).collect();
        }
        let of = |expert: usize| name.replacen(NUMBER, &expert.to_string(), 1);
        let mut weights = vec![self.weight(&of(0))?];
        while self.find(&of(weights.len())).is_ok() {
            weights.push(self.weight(&of(weights.len()))?);
        }
        Ok(weights)
    }
}

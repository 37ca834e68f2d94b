//! The experts of a layer, as files have them: one tensor with all of them, or a tensor an expert.

use std::collections::BTreeMap;

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
    /// `name` holds `{}`, a layer for each expert (`model.layers.0.mlp.experts.{}.down_proj`). Experts are those of which the
    /// checkpoint has any tensor, be it in a shard that was not opened ([`Model::with_other_shards`]).
    ///
    /// # Errors
    /// As [`Model::weight`] and [`HostExperts::new`]; [`FormatError::MissingExpert`] when there is a gap in the numbers, or an
    /// expert has other weights and not this one.
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
        let numbers = self.expert_numbers(name);
        let last = match numbers.last_key_value() {
            Some((&last, _)) if numbers.keys().any(|&expert| self.knows(&of(expert))) => last,
            // It is the name that is wrong.
            _ => return Err(self.no_such_tensor(&of(0))),
        };
        let weight = |expert| match self.knows(&of(expert)) {
            true => self.weight(&of(expert)),
            false => {
                let there = numbers.range(expert..).next().map_or("", |(_, tensor)| tensor).to_owned();
                Err(FormatError::MissingExpert { name: name.to_owned(), expert, there })
            }
        };
        (0..=last).map(weight).collect()
    }

    /// The experts of which there is any tensor, and one of each.
    fn expert_numbers(&self, name: &str) -> BTreeMap<usize, &str> {
        let Some((before, after)) = name.split_once(NUMBER) else { return BTreeMap::new() };
        let number = |tensor: &str| {
            let rest = tensor.strip_prefix(before)?;
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (number, rest) = rest.split_at(digits);
            // Of a number that ends otherwise than in the name, there is no telling that it is an expert's.
            let ends_alike = after.is_empty() || rest.chars().next() == after.chars().next();
            number.parse::<usize>().ok().filter(|n| ends_alike && n.to_string() == number)
        };
        let names =
            self.tensors.iter().map(|tensor| tensor.name.as_str()).chain(self.others.keys().map(String::as_str));
        names.filter_map(|tensor| Some((number(tensor)?, tensor))).collect()
    }
}

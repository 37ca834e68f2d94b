//! Expert weights in files: one stacked tensor, or one tensor per expert.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Model;
use super::layer::stack_size;
use super::raw::bad;
use crate::error::FormatError;
use crate::experts::HostExperts;
use crate::gated::pair_bias;
use crate::weight::HostWeight;

/// Placeholder of the expert id in a name.
const NUMBER: &str = "{}";

impl Model {
    /// Expert weights of the layer `name`.
    ///
    /// A name without `{}` is a stack of matrices, as in GGUF files
    /// (`blk.0.ffn_down_exps`). A name with `{}` has one layer per expert
    /// (`model.layers.0.mlp.experts.{}.down_proj`). An expert counts if the checkpoint has
    /// any tensor of it, even in an unopened shard ([`Model::with_other_shards`]).
    ///
    /// # Errors
    /// As [`Model::weight`] and [`HostExperts::new`]. [`FormatError::MissingExpert`] for
    /// a gap in the ids, or when an expert lacks this weight but has others.
    pub fn experts(&self, name: &str) -> Result<HostExperts, FormatError> {
        self.experts_in(name, None)
    }

    /// [`Model::experts`] with these ids alone; all by default. No other expert is read.
    ///
    /// # Errors
    /// As [`Model::experts`]. [`FormatError::NoRange`] for ids beyond the experts.
    pub fn experts_in(&self, name: &str, ids: Option<Range<usize>>) -> Result<HostExperts, FormatError> {
        HostExperts::new(&self.expert_weights(name, ids)?)
    }

    /// Gated pairs of a layer's experts. Each name is as in [`Model::experts`].
    ///
    /// # Errors
    /// As [`Model::experts`]. [`FormatError::PairMismatch`] when gate and up differ
    /// in the number of experts.
    pub fn gated_experts(&self, gate: &str, up: &str) -> Result<HostExperts, FormatError> {
        self.gated_experts_in(gate, up, None)
    }

    /// [`Model::gated_experts`] with these ids alone; all by default.
    ///
    /// # Errors
    /// As [`Model::gated_experts`] and [`Model::experts_in`].
    pub fn gated_experts_in(
        &self,
        gate: &str,
        up: &str,
        ids: Option<Range<usize>>,
    ) -> Result<HostExperts, FormatError> {
        let (gates, ups) = (self.expert_weights(gate, ids.clone())?, self.expert_weights(up, ids)?);
        if gates.len() != ups.len() {
            let (gate, up) = (gates.len().to_string(), ups.len().to_string());
            return Err(FormatError::PairMismatch { what: "number of experts", gate, up });
        }
        HostExperts::gated(&gates.into_iter().zip(ups).collect::<Vec<_>>())
    }

    /// Gated pairs of the layer `name`, split from weights with alternating gate
    /// and up rows (gate first).
    ///
    /// gpt-oss checkpoints have them (`model.layers.0.mlp.experts.gate_up_proj`).
    /// The name is as in [`Model::experts`].
    ///
    /// # Errors
    /// As [`Model::experts`]. [`FormatError::PairMismatch`] for an odd number of rows.
    pub fn interleaved_experts(&self, name: &str) -> Result<HostExperts, FormatError> {
        self.interleaved_experts_in(name, None)
    }

    /// [`Model::interleaved_experts`] of the experts with these ids;
    /// without ids, of all experts.
    ///
    /// # Errors
    /// As [`Model::interleaved_experts`] and [`Model::experts_in`].
    pub fn interleaved_experts_in(&self, name: &str, ids: Option<Range<usize>>) -> Result<HostExperts, FormatError> {
        HostExperts::interleaved(&self.expert_weights(name, ids)?)
    }

    /// Biases of interleaved pairs, one row per expert (`gate_up_proj_bias`).
    ///
    /// They are reordered for products with gated pairs: per expert, gate biases and then
    /// up biases. [`Model::dense`] reads biases of plain experts, such as `down_proj_bias`.
    ///
    /// # Errors
    /// As [`Model::dense`]. [`FormatError::BadFile`] when the tensor is no matrix with
    /// an even number of columns.
    pub fn interleaved_biases(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let (tensor, info) = (self.dense(name)?, self.info(name)?);
        let &[_, columns] = &info.shape[..] else {
            return Err(bad(&info.name, format!("expected one row of biases per expert, got shape {:?}", info.shape)));
        };
        if columns == 0 || !columns.is_multiple_of(2) {
            return Err(bad(
                &info.name,
                format!("expected an even number of columns (alternating biases of gate and up), got {columns}"),
            ));
        }
        let rows: Result<Vec<_>, _> = tensor.to_f32().chunks_exact(columns).map(pair_bias).collect();
        Ok(rows?.concat())
    }

    fn expert_weights(&self, name: &str, ids: Option<Range<usize>>) -> Result<Vec<HostWeight>, FormatError> {
        let among = |experts: usize| match ids {
            None => Ok(0..experts),
            Some(ids) if ids.start <= ids.end && ids.end <= experts => Ok(ids),
            Some(range) => Err(FormatError::NoRange { what: "experts", range, len: experts, unit: 1 }),
        };
        if !name.contains(NUMBER) {
            let shape = &self.info(name)?.shape;
            let experts = if shape.len() < 3 { 1 } else { stack_size(shape) };
            return among(experts)?.map(|expert| self.stacked_weight(name, expert)).collect();
        }
        let of = |expert: usize| name.replacen(NUMBER, &expert.to_string(), 1);
        let numbers = self.expert_numbers(name);
        let last = match numbers.last_key_value() {
            Some((&last, _)) if numbers.keys().any(|&expert| self.knows(&of(expert))) => last,
            // The pattern matches no expert.
            _ => return Err(self.no_such_tensor(&of(0))),
        };
        let weight = |expert| match self.knows(&of(expert)) {
            true => self.weight(&of(expert)),
            false => {
                let there = numbers.range(expert..).next().map_or("", |(_, tensor)| tensor).to_owned();
                Err(FormatError::MissingExpert { name: name.to_owned(), expert, there })
            }
        };
        among(last.saturating_add(1))?.map(weight).collect()
    }

    /// Expert ids with any tensor, and one tensor name of each.
    fn expert_numbers(&self, name: &str) -> BTreeMap<usize, &str> {
        let Some((before, after)) = name.split_once(NUMBER) else { return BTreeMap::new() };
        let number = |tensor: &str| {
            let rest = tensor.strip_prefix(before)?;
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (number, rest) = rest.split_at(digits);
            // The next character must match, or the tensor may be
            // that of no expert.
            let ends_alike = after.is_empty() || rest.chars().next() == after.chars().next();
            number.parse::<usize>().ok().filter(|n| ends_alike && n.to_string() == number)
        };
        let names =
            self.tensors.iter().map(|tensor| tensor.name.as_str()).chain(self.others.keys().map(String::as_str));
        names.filter_map(|tensor| Some((number(tensor)?, tensor))).collect()
    }
}

//! Unopened shards of a checkpoint, by the shard index.

use std::collections::{BTreeMap, HashMap};

use super::recognise::owner;
use super::{Model, Source, TensorKind};
use crate::error::FormatError;

impl Model {
    /// Declares tensors of unopened shards. `others` maps
    /// tensor names to files.
    ///
    /// A layer whose tensors are partly in unopened shards is refused.
    /// Errors name the file of a missing tensor.
    #[must_use]
    pub fn with_other_shards(mut self, others: BTreeMap<String, String>) -> Self {
        let is_layer = |&(_, source): &(usize, &Source)| !matches!(source, Source::Dense(_));
        let layers = self.sources.iter().enumerate().filter(is_layer);
        let layers: HashMap<String, usize> = layers.map(|(i, _)| (self.tensors[i].name.clone(), i)).collect();
        for (name, shard) in &others {
            let Some(index) = owner(name, &layers) else { continue };
            let layer = &self.tensors[index];
            if matches!(self.sources[index], Source::Broken(_)) {
                continue;
            }
            let kind = match &layer.kind {
                TensorKind::Quantized(format) => format.to_string(),
                TensorKind::Dense(dtype) => dtype.to_string(),
                TensorKind::Opaque(kind) => kind.clone(),
            };
            let format = format!("{kind} of several tensors");
            let error = FormatError::missing(&layer.name, &format, [name.clone()]).in_shard(shard.clone());
            self.break_layer(index, error);
        }
        for index in 0..self.sources.len() {
            let Source::Broken(FormatError::MissingTensor { tensors, .. }) = &self.sources[index] else { continue };
            let Some(shard) = tensors.iter().find_map(|name| others.get(name)).cloned() else { continue };
            if let Source::Broken(error) = self.sources[index].clone() {
                self.break_layer(index, error.in_shard(shard));
            }
        }
        self.others = others;
        self
    }

    fn break_layer(&mut self, index: usize, error: FormatError) {
        self.tensors[index].kind = TensorKind::Opaque(error.to_string());
        self.sources[index] = Source::Broken(error);
    }
}

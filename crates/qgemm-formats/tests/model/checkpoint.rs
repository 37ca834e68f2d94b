//! Synthetic checkpoints for the tests of model files.

use std::collections::HashMap;

use qgemm_formats::model::{Model, ModelOptions, NamedFile};
use qgemm_formats::{FormatError, HostWeight, SharedBytes};
use safetensors::tensor::{Dtype, TensorView, serialize};

/// Deterministic number stream.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Next number below `limit`.
    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) % u64::from(limit)) as u32
    }
}

/// Tensors of a safetensors file, and its metadata.
#[derive(Default)]
pub struct Checkpoint(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>, HashMap<String, String>);

impl Checkpoint {
    pub fn add(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.0.push((name.into(), dtype, shape.to_vec(), bytes));
        self
    }

    /// Adds metadata of the header.
    pub fn describe(mut self, key: &str, text: &str) -> Self {
        self.1.insert(key.into(), text.into());
        self
    }

    pub fn add_f32(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::F32, shape, bytemuck::cast_slice(values).to_vec())
    }

    pub fn bytes(&self) -> Vec<u8> {
        let views = self.0.iter().map(|(name, dtype, shape, bytes)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("bytes fit the shape"))
        });
        let metadata = Some(self.1.clone()).filter(|metadata| !metadata.is_empty());
        serialize(views, metadata).expect("serializable")
    }

    pub fn open(&self, config: Option<&str>) -> Model {
        self.open_with(config, ModelOptions::default())
    }

    pub fn open_with(&self, config: Option<&str>, options: ModelOptions) -> Model {
        Model::from_bytes(self.bytes().into(), config, options).expect("a model")
    }

    /// Opens the model with these settings files (name and text).
    pub fn open_beside(&self, settings: &[(&str, &str)]) -> Result<Model, FormatError> {
        let shard = NamedFile { name: "model.safetensors".into(), contents: SharedBytes::from(self.bytes()) };
        let settings: Vec<_> =
            settings.iter().map(|&(name, contents)| NamedFile { name: name.into(), contents }).collect();
        Model::from_files(&[shard], &settings, ModelOptions::default())
    }

    /// Drops the tensors whose names end in `part`.
    pub fn without(mut self, part: &str) -> Self {
        self.0.retain(|(name, ..)| !name.ends_with(part));
        self
    }

    /// Adds the tensors of `other`, with `layer` in their names replaced by `name`.
    pub fn with_layer(mut self, name: &str, other: Self) -> Self {
        self.0.extend(
            other.0.into_iter().map(|(of, dtype, shape, bytes)| (of.replacen("layer", name, 1), dtype, shape, bytes)),
        );
        self
    }

    pub fn weight(&self, config: Option<&str>) -> Result<HostWeight, FormatError> {
        self.open(config).weight("layer")
    }
}

/// Dequantized rows of a weight, concatenated.
pub fn values(weight: &HostWeight) -> Vec<f32> {
    (0..weight.n()).flat_map(|n| weight.dequantize_row(n)).collect()
}

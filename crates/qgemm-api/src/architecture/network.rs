//! [`Network`]: the tensors of a model by what reads them, and its numbers.

use std::collections::HashSet;
use std::path::Path;

use qgemm_formats::model::{Model, TensorInfo, TensorKind};
use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;
use sha2::{Digest, Sha256};

use super::decoder::decoder;
use super::encoder::encoder;
use super::hyperparameters::Hyperparameters;
use super::rotary::RotarySettings;
use super::settings::Settings;
use super::{ENCODERS, architecture};
use crate::error::Error;

/// Layers of a model with their tensors and numbers, from the tables of contents of its files.
///
/// ```no_run
/// use qgemm_api::{Network, open_model};
///
/// let model = open_model("model.gguf")?;
/// let network = Network::read(&model, "model.gguf")?;
/// println!("{} of {} layers", network.architecture(), network.layers());
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
pub struct Network {
    pub(crate) architecture: &'static str,
    pub(crate) layers: Vec<LayerTensors>,
    /// Rows by token. None in encoders, which add up rows of several tables.
    pub(crate) embedding: Option<Matrix>,
    /// Product that makes logits, if any.
    pub(crate) head: Option<Matrix>,
    /// Whether norms precede the products of their part (pre-norm).
    pub(crate) pre_norm: bool,
    /// Activation of the feed-forward part.
    pub(crate) activation: Activation,
    pub(crate) heads: Heads,
    /// Rotary embedding. None in encoders; an error is the reason why it is the caller's.
    pub(crate) rotary: Option<Result<RotarySettings, String>>,
    /// Tensor of the divisors of rotary frequencies, if there is one.
    pub(crate) rotary_factors: Option<String>,
    /// Epsilon of norms.
    pub(crate) eps: f32,
    /// Norm before the head, or after the embeddings of an encoder.
    pub(crate) outer_norm: NormTensors,
    /// Context length of the model, if stated.
    pub(crate) context: Option<usize>,
    /// Numbers of a decoder.
    pub(crate) numbers: Option<Hyperparameters>,
    /// Hash of names, kinds, shapes and sizes of all tensors.
    pub(crate) fingerprint: String,
    pub(super) weight_bytes: WeightBytes,
}

/// Head counts and dimensions of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Tensors of a norm.
#[derive(Clone, Debug)]
pub(crate) struct NormTensors {
    pub gamma: (String, DType),
    pub beta: Option<(String, DType)>,
}

/// Products of a layer.
#[derive(Debug)]
pub(crate) struct LayerTensors {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    /// Norms at attention and at the feed-forward part.
    pub norms: [NormTensors; 2],
    /// Norms of query and key heads.
    pub head_norms: Option<[NormTensors; 2]>,
    /// Keys that a query attends to at most.
    pub window: Option<usize>,
    pub feed_forward: FeedForward,
}

/// Feed-forward part of a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    /// `down(activation(up))`, with an optional gate.
    Dense { gate: Option<Matrix>, up: Matrix, down: Matrix },
    /// Router and its experts.
    Experts(Box<ExpertTensors>),
}

/// Tensors of a layer of experts.
#[derive(Debug)]
pub(crate) struct ExpertTensors {
    pub router: Matrix,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
    pub experts: usize,
    pub top_k: usize,
    /// Whether the weights of a token's experts are scaled to a sum of 1.
    pub renormalized: bool,
}

/// Weight of the model. For experts, the weight of one.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Tensor name. For experts with their own tensors, that of the first.
    pub tensor: String,
    pub format: Format,
    pub n: usize,
    pub k: usize,
    pub row_scale: bool,
    pub k_order: bool,
    pub bias: Option<(String, DType)>,
}

impl Network {
    /// Reads the architecture of `model`, which was opened at `path`.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`] and [`Error::UnservedArchitecture`]; others that name
    /// the setting or tensor that is missing, of another shape, or not part of the architecture.
    pub fn read(model: &Model, path: impl AsRef<Path>) -> Result<Self, Error> {
        let settings = Settings::read(model, path.as_ref())?;
        match ENCODERS.contains(&settings.architecture()) {
            true => encoder(model, &settings),
            false => decoder(model, &settings, architecture(settings.architecture())?),
        }
    }

    /// Name of the architecture.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Rows of the embedding: tokens of the vocabulary. None in encoders.
    pub fn vocabulary(&self) -> Option<usize> {
        self.embedding.as_ref().map(|embedding| embedding.n)
    }

    /// Sizes and constants of a decoder. None for encoders.
    pub fn hyperparameters(&self) -> Option<&Hyperparameters> {
        self.numbers.as_ref()
    }

    /// Average bytes of weights that a step of `tokens` tokens reads, in the checkpoint's
    /// formats.
    ///
    /// An embedding counts if it is tied to the head. Experts count as often as a router
    /// that is balanced chooses them.
    pub fn weight_bytes(&self, tokens: usize) -> f64 {
        self.weight_bytes.of_step(tokens)
    }
}

/// Bytes of a checkpoint's tensors, by what reads them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightBytes {
    /// Read by every step.
    pub shared: usize,
    /// Bytes of all experts.
    pub experts: usize,
    /// Share of the experts that a token does not choose.
    pub idle: f64,
}

impl WeightBytes {
    /// Average bytes that a step of `tokens` tokens reads. Tokens
    /// choose their experts evenly and independently.
    fn of_step(self, tokens: usize) -> f64 {
        self.shared as f64 + self.experts as f64 * (1.0 - self.idle.powf(tokens as f64))
    }
}

/// Fingerprint: hash of names, kinds, shapes and sizes of all tensors.
pub(crate) fn fingerprint(model: &Model) -> String {
    let mut lines: Vec<String> = model.tensors().iter().map(line).collect();
    lines.sort();
    let mut hash = Sha256::new();
    lines.iter().for_each(|line| hash.update(line.as_bytes()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn line(tensor: &TensorInfo) -> String {
    let kind = match &tensor.kind {
        TensorKind::Quantized(format) => format.name,
        TensorKind::Dense(dtype) => dtype.name(),
        TensorKind::Opaque(_) => "opaque",
    };
    format!("{}\0{kind}\0{:?}\0{}\n", tensor.name, tensor.shape, tensor.bytes)
}

pub(super) fn incomplete(what: String) -> Error {
    Error::IncompleteModel { what }
}

/// Tensors that no step needs: constants, and scales of quantized caches.
const IGNORED: &[&str] =
    &[".position_ids", ".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".masked_bias"];

/// Endings of the tensors that make up one weight.
const PARTS: &[&str] = &["weight", "bias"];

/// Finds the tensors of a model, and remembers which.
pub(super) struct Reader<'m> {
    pub model: &'m Model,
    architecture: &'static str,
    /// Stems of the names of tensors that were found.
    used: HashSet<String>,
    bytes: WeightBytes,
    /// Row scales and column orders by role and format, cached. Layers are alike, and
    /// a plan refuses a weight that differs.
    known: Vec<(&'static str, Format, bool, bool)>,
}

impl<'m> Reader<'m> {
    pub fn new(model: &'m Model, architecture: &'static str) -> Self {
        Self { model, architecture, used: HashSet::new(), bytes: WeightBytes::default(), known: Vec::new() }
    }

    pub fn has(&self, name: &str) -> bool {
        !name.is_empty() && self.model.info(name).is_ok()
    }

    /// Tensors of a norm of `columns` features.
    pub fn norm(&mut self, name: &str, columns: usize) -> Result<NormTensors, Error> {
        let gamma = self.vector(name, columns)?;
        let beta = format!("{name}.bias");
        let beta = if self.has(&beta) { Some(self.vector(&beta, columns)?) } else { None };
        Ok(NormTensors { gamma, beta })
    }

    /// A tensor of `len` plain numbers.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<(String, DType), Error> {
        let info = self.model.info(name)?;
        let TensorKind::Dense(dtype) = info.kind else {
            return Err(incomplete(format!("expected a tensor `{name}` of plain numbers")));
        };
        check_shape(info, &[len])?;
        self.used.insert(stem(&info.name).to_owned());
        self.bytes.shared += info.bytes;
        Ok((info.name.clone(), dtype))
    }

    /// Weight of N output and K input features.
    pub fn matrix(&mut self, name: String, role: &'static str, [n, k]: [usize; 2]) -> Result<Matrix, Error> {
        check_shape(self.model.info(&name)?, &[n, k])?;
        let (matrix, bytes) = self.any_matrix(&name, role)?;
        self.bytes.shared += bytes;
        Ok(matrix)
    }

    /// Table of rows of `k` features, which is no product's weight.
    pub fn table(&mut self, name: &str, k: usize) -> Result<Matrix, Error> {
        let rows = self.model.info(name)?.shape.first().copied().unwrap_or(0);
        check_shape(self.model.info(name)?, &[rows, k])?;
        Ok(self.any_matrix(name, "embedding")?.0)
    }

    /// Weight of `count` experts: of one stack, or of a tensor each where the name has `{}`.
    pub fn experts(
        &mut self,
        name: &str,
        role: &'static str,
        count: usize,
        [n, k]: [usize; 2],
    ) -> Result<Matrix, Error> {
        if !name.contains("{}") {
            check_shape(self.model.info(name)?, &[count, n, k])?;
            let (matrix, bytes) = self.any_matrix(name, role)?;
            self.bytes.experts += bytes;
            return Ok(matrix);
        }
        let mut first = None;
        for expert in 0..count {
            let name = name.replace("{}", &expert.to_string());
            check_shape(self.model.info(&name)?, &[n, k])?;
            let (matrix, bytes) = self.any_matrix(&name, role)?;
            self.bytes.experts += bytes;
            first.get_or_insert(matrix);
        }
        first.ok_or_else(|| incomplete(format!("{name}: expected 1 expert or more")))
    }

    /// Weight and its bytes in the file.
    fn any_matrix(&mut self, name: &str, role: &'static str) -> Result<(Matrix, usize), Error> {
        let info = self.model.info(name)?;
        let [.., n, k] = info.shape[..] else {
            return Err(incomplete(format!("{name} has shape {:?}: expected a matrix", info.shape)));
        };
        let (format, is_quantized) = match &info.kind {
            TensorKind::Quantized(format) => (*format, true),
            TensorKind::Dense(dtype) => (dtype.name().parse()?, false),
            TensorKind::Opaque(kind) => {
                return Err(incomplete(format!("{name} is of type {kind}, for which there is no weight format")));
            }
        };
        let is_gguf = !self.model.metadata().is_empty();
        let known = self.known.iter().find(|(r, f, ..)| *r == role && *f == format).copied();
        let (row_scale, k_order) = match (is_quantized && !is_gguf, known) {
            (false, _) => (false, false),
            (true, Some((_, _, row_scale, k_order))) => (row_scale, k_order),
            (true, None) => {
                let weight = self.model.stacked_weight(name, 0)?;
                let found = (weight.row_scale().is_some(), weight.k_order().is_some());
                self.known.push((role, format, found.0, found.1));
                found
            }
        };
        self.used.insert(stem(&info.name).to_owned());
        let bias_name = format!("{}.bias", stem(name));
        let bias = match self.model.info(&bias_name) {
            Ok(TensorInfo { kind: TensorKind::Dense(dtype), shape, .. }) if shape[..] == [n] => {
                Some((bias_name, *dtype))
            }
            Ok(other) => return Err(wrong_shape(other, &[n])),
            Err(_) => None,
        };
        Ok((Matrix { tensor: info.name.clone(), format, n, k, row_scale, k_order, bias }, info.bytes))
    }

    /// Counts the tensors whose names begin like this as known.
    pub fn ignore(&mut self, beginning: &str) {
        let begins = self.model.tensors().iter().filter(|tensor| tensor.name.starts_with(beginning));
        self.used.extend(begins.map(|tensor| stem(&tensor.name).to_owned()));
    }

    /// Checks that the architecture explains every tensor, and returns their bytes.
    ///
    /// # Errors
    /// [`Error::UnexpectedTensor`].
    pub fn finish(&self) -> Result<WeightBytes, Error> {
        let is_ignored = |stem: &str| IGNORED.iter().any(|ending| stem.ends_with(ending));
        let is_known = |name: &str| {
            let stem = stem(name);
            self.used.contains(stem) || is_ignored(stem) || is_ignored(name)
        };
        match self.model.tensors().iter().find(|tensor| !is_known(&tensor.name)) {
            Some(TensorInfo { name, .. }) => {
                Err(Error::UnexpectedTensor { tensor: name.clone(), architecture: self.architecture })
            }
            None => Ok(self.bytes),
        }
    }
}

/// Name without `.weight` or `.bias`.
fn stem(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((stem, part)) if PARTS.contains(&part) => stem,
        _ => name,
    }
}

fn check_shape(info: &TensorInfo, expected: &[usize]) -> Result<(), Error> {
    if info.shape == expected { Ok(()) } else { Err(wrong_shape(info, expected)) }
}

fn wrong_shape(info: &TensorInfo, expected: &[usize]) -> Error {
    Error::WrongShape { tensor: info.name.clone(), expected: expected.to_vec(), got: info.shape.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_the_experts_of_its_tokens() {
        let bytes = WeightBytes { shared: 100, experts: 800, idle: 0.75 };
        assert_eq!(bytes.of_step(1), 300.0);
        assert_eq!(bytes.of_step(2), 100.0 + 800.0 * (1.0 - 0.75 * 0.75));
        assert!(bytes.of_step(1000) > 899.9);
        assert_eq!(WeightBytes { experts: 0, ..bytes }.of_step(5), 100.0);
    }
}

//! [`Reader`]: the tensors of a model, and which of them are read.

use std::collections::HashSet;

use qgemm_formats::model::{Model, TensorInfo, TensorKind};
use qgemm_formats::{DType, Format};

use super::network::{Kernel, Matrix, NormTensors, Rows, WeightBytes};
use crate::error::Error;

pub(super) fn incomplete(what: String) -> Error {
    Error::IncompleteModel { what }
}

/// Tensors that no step needs: constants, and scales of quantized caches.
const IGNORED: &[&str] =
    &[".position_ids", ".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".masked_bias"];

/// Endings of a bias, behind the name of its weight.
const BIASES: [&str; 2] = [".bias", "_bias"];

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
        !name.is_empty() && self.model.has(name)
    }

    /// Tensors of a norm of `columns` features.
    pub fn norm(&mut self, name: &str, columns: usize) -> Result<NormTensors, Error> {
        let gamma = self.vector(name, columns)?;
        let beta = format!("{name}.bias");
        let beta = if self.has(&beta) { Some(self.vector(&beta, columns)?) } else { None };
        Ok(NormTensors { gamma, beta, gamma_offset: false })
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

    /// A tensor of plain numbers in one of these shapes.
    pub fn numbers(&mut self, name: &str, shapes: &[&[usize]]) -> Result<String, Error> {
        let info = self.model.info(name)?;
        let TensorKind::Dense(_) = info.kind else {
            return Err(incomplete(format!("expected a tensor `{name}` of plain numbers")));
        };
        if !shapes.contains(&&info.shape[..]) {
            return Err(wrong_shape(info, shapes.first().copied().unwrap_or_default()));
        }
        self.used.insert(stem(&info.name).to_owned());
        self.bytes.shared += info.bytes;
        Ok(info.name.clone())
    }

    /// Kernel of a short convolution.
    pub fn kernel(&mut self, name: &str, [channels, width]: [usize; 2]) -> Result<Kernel, Error> {
        let tensor = self.numbers(name, &[&[channels, width], &[channels, 1, width]])?;
        let bias = format!("{name}.bias");
        let bias = if self.has(&bias) { Some(self.vector(&bias, channels)?.0) } else { None };
        Ok(Kernel { tensor, bias, width })
    }

    /// Weight of one output feature: a row, which may be a vector.
    pub fn row(&mut self, name: &str, role: &'static str, k: usize) -> Result<Matrix, Error> {
        let info = self.model.info(name)?;
        let (TensorKind::Dense(dtype), 1) = (&info.kind, info.shape.len()) else {
            return self.matrix(name.to_owned(), role, [1, k]);
        };
        let (format, tensor) = (dtype.name().parse()?, self.vector(name, k)?.0);
        Ok(Matrix { tensor, rows: Vec::new(), format, n: 1, k, row_scale: false, k_order: false, bias: None })
    }

    /// Weight of some rows of a tensor of `rows` rows.
    pub fn rows_of(
        &mut self,
        name: &str,
        role: &'static str,
        [rows, k]: [usize; 2],
        parts: Vec<Rows>,
    ) -> Result<Matrix, Error> {
        check_shape(self.model.info(name)?, &[rows, k])?;
        let (matrix, bytes) = self.any_matrix(name, role)?;
        if matrix.bias.is_some() {
            return Err(incomplete(format!("{name} has a bias: expected none of a tensor of several projections")));
        }
        let n = parts.iter().map(|part| rows / part.every.max(1) * part.count).sum();
        self.bytes.shared += bytes / rows.max(1) * n;
        Ok(Matrix { rows: parts, n, ..matrix })
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

    /// Gated pairs of `count` experts in one stack of alternating rows; `n` counts those of one
    /// half.
    pub fn interleaved_experts(
        &mut self,
        name: &str,
        role: &'static str,
        count: usize,
        [n, k]: [usize; 2],
    ) -> Result<Matrix, Error> {
        let rows = n.saturating_mul(2);
        Ok(Matrix { n, ..self.experts(name, role, count, [rows, k])? })
    }

    /// Weight and its bytes in the file.
    fn any_matrix(&mut self, name: &str, role: &'static str) -> Result<(Matrix, usize), Error> {
        let info = self.model.info(name)?;
        let [ref stack @ .., n, k] = info.shape[..] else {
            return Err(incomplete(format!("{name} has shape {:?}: expected a matrix", info.shape)));
        };
        let of_bias = [stack, &[n]].concat();
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
        let names = BIASES.map(|ending| format!("{}{ending}", stem(name)));
        let bias = names.iter().find(|name| self.has(name)).map(|name| self.model.info(name)).transpose()?;
        let bias = match bias {
            Some(TensorInfo { kind: TensorKind::Dense(dtype), shape, name, .. }) if *shape == of_bias => {
                Some((name.clone(), *dtype))
            }
            Some(other) => return Err(wrong_shape(other, &of_bias)),
            None => None,
        };
        self.used.extend(bias.iter().map(|(name, _)| stem(name).to_owned()));
        let (tensor, rows) = (info.name.clone(), Vec::new());
        Ok((Matrix { tensor, rows, format, n, k, row_scale, k_order, bias }, info.bytes))
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

/// Whether no step needs the tensor.
pub(super) fn is_ignored(name: &str) -> bool {
    IGNORED.iter().any(|ending| name.ends_with(ending))
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

//! [`Loader`]: weights of a decoder, by the names of its architecture.

use qgemm_api::{DType, NormFunction, Problem, Weight};

use crate::architecture::{Architecture, TensorNames};
use crate::error::Error;
use crate::hyperparameters::Hyperparameters;
use crate::precision::Precision;
use crate::projection::Projection;
use crate::tensors::{Tensors, with_bias};

/// Reads the weights of a decoder.
pub struct Loader<'a> {
    /// Tensors of the checkpoint.
    pub tensors: Tensors<'a>,
    /// Its architecture.
    pub architecture: &'static Architecture,
    /// Names of its tensors.
    pub names: &'static TensorNames,
    /// Its sizes.
    pub numbers: &'a Hyperparameters,
}

impl Loader<'_> {
    /// A product of the residual stream, normalized, with D in `d`.
    pub fn normed(&self, weight: &Weight, d: DType, bias: Option<Vec<f32>>) -> Result<Projection, Error> {
        let precision = self.tensors.precision;
        let describe = |p| with_bias(normed_problem(p, precision, self.numbers.eps).d_dtype(d), bias.is_some());
        let linear = self.tensors.ctx.layer(weight, describe)?;
        self.tensors.projection(linear, bias)
    }
}

/// The problem with X normalized: the residual stream in f32, rounded once to the type of activations.
pub fn normed_problem(problem: Problem, precision: Precision, eps: f32) -> Problem {
    let norm = NormFunction::rms(eps).gamma(DType::F32);
    precision.of(problem.x_dtype(DType::F32)).norm(norm).normed_dtype(precision.activations)
}

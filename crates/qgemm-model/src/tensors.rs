//! [`Tensors`]: tensors of a checkpoint, with their shapes checked, and products with them.

use std::collections::HashSet;

use qgemm_api::{Buffer, Context, DType, HostWeight, Linear, Model, Problem};

use crate::error::Error;
use crate::precision::Precision;
use crate::projection::Projection;

/// Tensors of checkpoints that no product needs: constants, and scales of quantized caches.
const IGNORED: &[&str] =
    &[".position_ids", ".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".masked_bias"];

/// Reads tensors, and remembers which.
pub struct Tensors<'a> {
    /// The device's context.
    pub ctx: &'a Context,
    /// The checkpoint.
    pub model: &'a Model,
    /// Name of its architecture.
    pub architecture: &'static str,
    /// Arithmetic of products.
    pub precision: Precision,
    /// Names of the tensors that were read.
    pub used: HashSet<String>,
}

impl Tensors<'_> {
    /// A product that adds to the residual stream.
    pub fn residual(&mut self, name: &str, [hidden, k]: [usize; 2]) -> Result<Projection, Error> {
        let precision = self.precision;
        let weight = self.matrix(name, hidden, k)?;
        let bias = self.bias(name, hidden)?;
        let linear = self.ctx.layer(&self.ctx.load(&weight)?, |p| {
            let p = precision.of(p.x_dtype(precision.activations)).d_dtype(DType::F32).residual_in_d();
            with_bias(p, bias.is_some())
        })?;
        self.projection(linear, bias)
    }

    /// A product with its bias.
    pub fn projection(&self, linear: Linear, bias: Option<Vec<f32>>) -> Result<Projection, Error> {
        let bias = bias.map(|bias| self.ctx.upload(&bias)).transpose()?;
        Ok(Projection { linear, bias })
    }

    /// Whether the checkpoint has a tensor.
    pub fn has(&self, name: &str) -> bool {
        !name.is_empty() && self.model.info(name).is_ok()
    }

    /// A weight of N output and K input features.
    pub fn matrix(&mut self, name: &str, n: usize, k: usize) -> Result<HostWeight, Error> {
        self.check_shape(name, &[n, k])?;
        Ok(self.model.weight(name)?)
    }

    /// A vector in f32 on the device, such as the gamma of a norm.
    pub fn device_vector(&mut self, name: &str, len: usize) -> Result<Buffer, Error> {
        let values = self.vector(name, len)?;
        Ok(self.ctx.upload(&values)?)
    }

    /// The bias of the layer `name`, if it has one.
    pub fn bias(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, Error> {
        let name = format!("{name}.bias");
        if self.has(&name) { Ok(Some(self.vector(&name, len)?)) } else { Ok(None) }
    }

    /// A vector in f32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.check_shape(name, &[len])?;
        Ok(self.model.dense(name)?.to_f32())
    }

    /// Checks the shape of a tensor, which counts as read.
    pub fn check_shape(&mut self, name: &str, expected: &[usize]) -> Result<(), Error> {
        let info = self.model.info(name)?;
        self.used.insert(info.name.clone());
        match info.shape == expected {
            true => Ok(()),
            false => Err(qgemm_api::Error::WrongShape {
                tensor: info.name.clone(),
                expected: expected.to_vec(),
                got: info.shape.clone(),
            }
            .into()),
        }
    }

    /// Checks that the architecture explains every tensor.
    pub fn check_all_used(&self) -> Result<(), Error> {
        let is_ignored =
            |name: &str| IGNORED.iter().any(|ending| name.strip_suffix(".weight").unwrap_or(name).ends_with(ending));
        let unexpected = |name: &&String| !self.used.contains(*name) && !is_ignored(name);
        match self.model.tensors().iter().map(|tensor| &tensor.name).find(unexpected) {
            Some(tensor) => {
                let (tensor, architecture) = (tensor.clone(), self.architecture);
                Err(qgemm_api::Error::UnexpectedTensor { tensor, architecture }.into())
            }
            None => Ok(()),
        }
    }
}

/// The problem, with a bias if there is one.
pub fn with_bias(problem: Problem, has_bias: bool) -> Problem {
    if has_bias { problem.bias(DType::F32) } else { problem }
}

//! Weights of a loaded plan: of one operation, and of all.

use std::collections::HashMap;

use qgemm_formats::model::Model;
use qgemm_formats::{DType, HostWeight};
use qgemm_hal::{Buffer, BufferRef};

use super::file::{PlannedOp, PlannedWeight};
use super::load::LoadedPlan;
use super::operands::PlannedHeads;
use super::rotary::{PlannedRotary, PlannedTables};
use crate::context::Context;
use crate::error::Error;
use crate::experts::Experts;
use crate::setters::setters;
use crate::weight::Weight;

/// Weights of one operation of a plan, for [`LoadedPlan::run`].
///
/// Made from a [`Weight`], from [`Experts`], or by `default` for an operation without
/// weights. Methods add the others.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct OpWeights<'a> {
    /// Weight of a product, a gradient or a gather.
    pub weight: Option<&'a Weight>,
    /// Weights of a layer of experts.
    pub experts: Option<&'a Experts>,
    /// Bias of a product, in the plan's type.
    pub bias: Option<BufferRef<'a>>,
    /// Gamma of a norm, in the plan's type.
    pub gamma: Option<BufferRef<'a>>,
    /// Beta of a norm, in the plan's type.
    pub beta: Option<BufferRef<'a>>,
    /// Factors of the KV heads of an E4M3 cache, in f32.
    pub kv_factors: Option<BufferRef<'a>>,
    /// Tables of cosines and sines of a rotary embedding with factors of pairs.
    pub cos_and_sin: Option<[BufferRef<'a>; 2]>,
}

impl<'a> OpWeights<'a> {
    setters! {
        /// With the bias of a product.
        bias: BufferRef,
        /// With the gamma of a norm.
        gamma: BufferRef,
        /// With the beta of a norm.
        beta: BufferRef,
        /// With the factors of the KV heads of an E4M3 cache.
        kv_factors: BufferRef,
    }
}

impl<'a> From<&'a Weight> for OpWeights<'a> {
    fn from(weight: &'a Weight) -> Self {
        Self { weight: Some(weight), ..Self::default() }
    }
}

impl<'a> From<&'a Experts> for OpWeights<'a> {
    fn from(experts: &'a Experts) -> Self {
        Self { experts: Some(experts), ..Self::default() }
    }
}

/// Weights of all operations of a plan, on its device. By
/// [`LoadedPlan::load_weights`].
#[derive(Debug)]
pub struct PlanWeights {
    regions: HashMap<String, Held>,
}

/// Contents of a region of weights.
#[derive(Debug)]
enum Held {
    Weight(Weight),
    Experts(Experts),
    /// Bias, gamma or beta.
    Values(Buffer),
}

impl LoadedPlan {
    /// Loads the weights of all operations from `model`, each region once.
    ///
    /// # Errors
    /// When `model` lacks a tensor or it cannot be read, or on a device error such as
    /// exhausted memory.
    pub fn load_weights(&self, model: &Model) -> Result<PlanWeights, Error> {
        let mut regions = HashMap::new();
        for op in &self.exec_plan().ops {
            let mut hold = |region: &str, load: &dyn Fn() -> Result<Held, Error>| {
                if !regions.contains_key(region) {
                    regions.insert(region.to_owned(), load()?);
                }
                Ok::<_, Error>(())
            };
            if let Some(weight) = &op.weight {
                hold(&weight.region, &|| load_weight(&self.ctx, model, weight))?;
            }
            if let (Some(weight), Some(region), Some(dtype)) = (&op.weight, &op.bias, &op.bias_dtype) {
                let tensors: Vec<String> = weight.tensors.iter().map(|tensor| of_weight(tensor, "bias")).collect();
                hold(region, &|| load_values(&self.ctx, model, &tensors, dtype.parse()?))?;
            }
            if let Some((heads, region)) = op.heads.as_ref().and_then(|heads| Some((heads, heads.factors()?))) {
                // A plan's caches are not calibrated.
                hold(region, &|| Ok(Held::Values(self.ctx.upload(&vec![1.0f32; heads.kv_heads])?)))?;
            }
            if let Some((tables, rotary, positions)) = op.tables() {
                let angles = || {
                    let factors = model.dense(&tables.factors)?.to_f32();
                    rotary.of_frequencies()?.cos_and_sin(&factors, positions)
                };
                for (region, part) in [(&tables.cos, 0), (&tables.sin, 1)] {
                    hold(region, &|| Ok(Held::Values(self.ctx.upload(&angles()?[part])?)))?;
                }
            }
            if let Some(norm) = &op.norm {
                let beta = norm.beta.as_ref().zip(norm.beta_dtype.as_ref());
                for (tensor, dtype) in std::iter::once((&norm.gamma, &norm.gamma_dtype)).chain(beta) {
                    hold(tensor, &|| load_values(&self.ctx, model, std::slice::from_ref(tensor), dtype.parse()?))?;
                }
            }
        }
        Ok(PlanWeights { regions })
    }
}

impl PlanWeights {
    /// Weights of an operation, for [`LoadedPlan::run`].
    pub fn of(&self, op: &PlannedOp) -> OpWeights<'_> {
        let held = |region: Option<&String>| region.and_then(|region| self.regions.get(region));
        let values = |region| match held(region) {
            Some(Held::Values(values)) => Some(values.view()),
            _ => None,
        };
        let (weight, experts) = match held(op.weight.as_ref().map(|weight| &weight.region)) {
            Some(Held::Weight(weight)) => (Some(weight), None),
            Some(Held::Experts(experts)) => (None, Some(experts)),
            _ => (None, None),
        };
        let norm = op.norm.as_ref();
        let kv_factors = op.heads.as_ref().and_then(PlannedHeads::factors);
        let (gamma, beta) = (norm.map(|norm| &norm.gamma), norm.and_then(|norm| norm.beta.as_ref()));
        OpWeights {
            weight,
            experts,
            bias: values(op.bias.as_ref()),
            gamma: values(gamma),
            beta: values(beta),
            kv_factors: values(kv_factors),
            cos_and_sin: op.tables().and_then(|(t, ..)| Some([values(Some(&t.cos))?, values(Some(&t.sin))?])),
        }
    }
}

impl PlannedOp {
    /// Tables of angles, their rotary embedding and positions.
    fn tables(&self) -> Option<(&PlannedTables, &PlannedRotary, usize)> {
        let heads = self.heads.as_ref()?;
        let rotary = heads.rotary.as_ref()?;
        Some((rotary.tables.as_ref()?, rotary, heads.capacity))
    }
}

fn load_weight(ctx: &Context, model: &Model, weight: &PlannedWeight) -> Result<Held, Error> {
    let names: Vec<String> = weight.tensors.iter().map(|tensor| of_experts(model, weight, tensor)).collect();
    let wrong = || Error::NotInPlan { what: "tensor of", name: weight.region.clone() };
    if weight.experts.is_some() {
        let experts = match (&names[..], weight.gated) {
            ([gate, up], true) => model.gated_experts(gate, up)?,
            ([one], false) => model.experts(one)?,
            _ => return Err(wrong()),
        };
        return Ok(Held::Experts(ctx.load_experts(&experts)?));
    }
    let parts = names.iter().map(|name| model.weight(name)).collect::<Result<Vec<_>, _>>()?;
    let loaded = match (&parts[..], weight.gated) {
        ([gate, up], true) => ctx.load_gated(gate, up)?,
        ([one], false) => ctx.load(one)?,
        ([_, ..], false) => ctx.load(&HostWeight::concat_rows(&parts.iter().collect::<Vec<_>>())?)?,
        _ => return Err(wrong()),
    };
    Ok(Held::Weight(loaded))
}

/// Name of a tensor as [`Model::experts`] takes it. A plan names the tensor of the first
/// expert where each has its own.
fn of_experts(model: &Model, weight: &PlannedWeight, tensor: &str) -> String {
    let is_stack = model.info(tensor).is_ok_and(|info| info.shape.len() > 2);
    match tensor.rsplit_once(".0.") {
        Some((before, after)) if weight.experts.is_some() && !is_stack => format!("{before}.{{}}.{after}"),
        _ => tensor.to_owned(),
    }
}

/// Contiguous values of tensors, in `dtype`.
fn load_values(ctx: &Context, model: &Model, tensors: &[String], dtype: DType) -> Result<Held, Error> {
    let mut values = Vec::new();
    for tensor in tensors {
        values.extend(model.dense(tensor)?.to_f32());
    }
    let mut buffer = ctx.allocate_elements(dtype, values.len())?;
    ctx.upload_into(&dtype.encode(&values), &mut buffer)?;
    Ok(Held::Values(buffer))
}

/// Tensor that stands beside a weight.
fn of_weight(tensor: &str, role: &str) -> String {
    format!("{}.{role}", tensor.strip_suffix(".weight").unwrap_or(tensor))
}

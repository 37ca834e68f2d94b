//! Weights of a loaded plan: of one operation, and of all.

use std::collections::HashMap;
use std::sync::Arc;

use qgemm_formats::model::Model;
use qgemm_formats::{DType, Format, FormatError, HostWeight};
use qgemm_hal::{Buffer, BufferRef};

use super::file::{PlannedOp, PlannedRows, PlannedWeight};
use super::load::LoadedPlan;
use super::operands::PlannedHeads;
use super::rotary::{PlannedRotary, PlannedTables};
use crate::context::Context;
use crate::error::Error;
use crate::experts::Experts;
use crate::quantize::quantize;
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
    /// Gammas of the norms of query and key heads, in the plan's type.
    pub head_gammas: Option<[BufferRef<'a>; 2]>,
    /// Beta of a norm, in the plan's type.
    pub beta: Option<BufferRef<'a>>,
    /// Sinks of the query heads, in f32.
    pub sinks: Option<BufferRef<'a>>,
    /// Kernel of a short convolution, in f32.
    pub conv: Option<BufferRef<'a>>,
    /// Logarithms of decay rates and biases of the time step of linear attention, in f32.
    pub decay: Option<[BufferRef<'a>; 2]>,
    /// Factors of values in the result of linear attention, in f32.
    pub skip: Option<BufferRef<'a>>,
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
        /// With the sinks of the query heads.
        sinks: BufferRef,
        /// With the kernel of a short convolution.
        conv: BufferRef,
        /// With the factors of values in the result of linear attention.
        skip: BufferRef,
        /// With the factors of the KV heads of an E4M3 cache.
        kv_factors: BufferRef,
    }

    /// With the gammas of the norms of query and key heads.
    pub fn head_gammas(mut self, q: impl Into<BufferRef<'a>>, k: impl Into<BufferRef<'a>>) -> Self {
        self.head_gammas = Some([q.into(), k.into()]);
        self
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
    regions: HashMap<String, Arc<Held>>,
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
        self.load_more_weights(model, &PlanWeights { regions: HashMap::new() })
    }

    /// [`LoadedPlan::load_weights`] of another plan of the model, which shares the memory of
    /// what that has.
    ///
    /// # Errors
    /// As [`LoadedPlan::load_weights`].
    pub fn load_more_weights(&self, model: &Model, others: &PlanWeights) -> Result<PlanWeights, Error> {
        let mut regions = others.regions.clone();
        for op in &self.exec_plan().ops {
            let mut hold = |region: &str, load: &dyn Fn() -> Result<Held, Error>| {
                if !regions.contains_key(region) {
                    regions.insert(region.to_owned(), Arc::new(load()?));
                }
                Ok::<_, Error>(())
            };
            if let Some(weight) = &op.weight {
                hold(&weight.region, &|| load_weight(&self.ctx, model, weight))?;
            }
            if let (Some(weight), Some(region), Some(dtype)) = (&op.weight, &op.bias, &op.bias_dtype) {
                hold(region, &|| upload(&self.ctx, &bias_of(model, weight)?, dtype.parse()?))?;
            }
            if let Some((heads, sinks)) = op.heads.as_ref().and_then(|heads| Some((heads, heads.sinks.as_ref()?))) {
                hold(sinks, &|| upload(&self.ctx, &heads.sinks_of(model.dense(sinks)?.to_f32())?, DType::F32))?;
            }
            let plain = |tensor: &str| Ok::<_, Error>(model.dense(tensor)?.to_f32());
            if let Some(of) = &op.conv {
                let each = std::iter::once((&of.weight, of.width)).chain(of.bias.iter().map(|bias| (bias, 1)));
                for (tensor, each) in each {
                    hold(tensor, &|| upload(&self.ctx, &of.of_channels(plain(tensor)?, each)?, DType::F32))?;
                }
            }
            if let Some(of) = &op.linear {
                for tensor in std::iter::once(&of.dt_bias).chain(&of.skip) {
                    hold(tensor, &|| upload(&self.ctx, &of.of_heads(plain(tensor)?)?, DType::F32))?;
                }
                let logs = || Ok::<_, Error>(rates(&of.of_heads(plain(&of.a_log)?)?, of.is_rate));
                hold(&of.a_log, &|| upload(&self.ctx, &logs()?, DType::F32))?;
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
            let of_heads = op.heads.iter().flat_map(|heads| heads.head_norms.iter().flatten());
            for norm in op.norm.iter().chain(of_heads) {
                let beta = norm.beta.as_ref().zip(norm.beta_dtype.as_ref()).map(|(beta, dtype)| (beta, dtype, false));
                let gamma = (&norm.gamma, &norm.gamma_dtype, norm.gamma_offset);
                for (tensor, dtype, is_offset) in std::iter::once(gamma).chain(beta) {
                    let values = || {
                        let stored = model.dense(tensor)?;
                        let stored = if is_offset { stored.one_plus() } else { stored };
                        norm.of_features(stored.to_f32())
                    };
                    hold(tensor, &|| upload(&self.ctx, &values()?, dtype.parse()?))?;
                }
            }
        }
        Ok(PlanWeights { regions })
    }
}

impl PlanWeights {
    /// Weights of an operation, for [`LoadedPlan::run`].
    pub fn of(&self, op: &PlannedOp) -> OpWeights<'_> {
        let held = |region: Option<&String>| region.and_then(|region| self.regions.get(region)).map(|held| &**held);
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
            bias: values(op.bias.as_ref().or(op.conv.as_ref().and_then(|conv| conv.bias.as_ref()))),
            gamma: values(gamma),
            head_gammas: op
                .heads
                .as_ref()
                .and_then(|heads| heads.head_norms.as_ref())
                .and_then(|[q, k]| Some([values(Some(&q.gamma))?, values(Some(&k.gamma))?])),
            beta: values(beta),
            sinks: values(op.heads.as_ref().and_then(|heads| heads.sinks.as_ref())),
            conv: values(op.conv.as_ref().map(|conv| &conv.weight)),
            decay: op.linear.as_ref().and_then(|of| Some([values(Some(&of.a_log))?, values(Some(&of.dt_bias))?])),
            skip: values(op.linear.as_ref().and_then(|of| of.skip.as_ref())),
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
        let ids = weight.local_experts()?;
        let experts = match (&names[..], weight.gated) {
            ([gate, up], true) => model.gated_experts_in(gate, up, ids)?,
            ([one], false) => model.experts_in(one, ids)?,
            ([pairs], true) => model.interleaved_experts_in(pairs, ids)?,
            _ => return Err(wrong()),
        };
        return Ok(Held::Experts(ctx.load_experts(&weight.of_experts(experts)?)?));
    }
    let part = |(place, name): (usize, &String)| {
        let whole = whole_weight(model, name)?;
        match weight.rows.get(place).copied().flatten() {
            Some(rows) => some_rows(&whole, rows).ok_or_else(wrong)?.map_err(Error::from),
            None => Ok(whole),
        }
    };
    let parts = names.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
    let mut parts = weight.of_tensors(parts)?;
    if let ([gate, up], true) = (&parts[..], weight.gated)
        && gate.format() != up.format()
    {
        let (gate, up, both) = (gate.format().name, up.format().name, &weight.format);
        tracing::warn!(region = %weight.region, gate, up, both, "the formats of gate and up differ");
        parts = parts.into_iter().map(|part| in_format(&part, weight.format.parse()?)).collect::<Result<_, _>>()?;
    }
    let loaded = match (&parts[..], weight.gated) {
        ([gate, up], true) => ctx.load_gated(gate, up)?,
        ([one], false) => ctx.load(one)?,
        ([_, ..], false) => ctx.load(&HostWeight::concat_rows(&parts.iter().collect::<Vec<_>>())?)?,
        _ => return Err(wrong()),
    };
    Ok(Held::Weight(loaded))
}

/// A weight; a vector is one of one row.
fn whole_weight(model: &Model, name: &str) -> Result<HostWeight, Error> {
    match model.info(name)?.shape[..] {
        [k] => {
            let vector = model.dense(name)?;
            Ok(quantize(&vector.to_f32(), 1, k, vector.dtype.name().parse()?)?.0)
        }
        _ => Ok(model.weight(name)?),
    }
}

/// Ranges of rows of a weight. None if they are not ranges.
fn some_rows(weight: &HostWeight, rows: PlannedRows) -> Option<Result<HostWeight, FormatError>> {
    let PlannedRows { first, count, every } = rows;
    let is_whole = first.checked_add(count).is_some_and(|end| end <= every);
    if !is_whole || every == 0 || !weight.n().is_multiple_of(every) {
        return None;
    }
    let ranges = (0..weight.n()).step_by(every).flat_map(|at| at + first..at + first + count);
    Some(weight.select_rows(&ranges.map(|row| row as u32).collect::<Vec<_>>()))
}

/// Logarithms of decay rates, from negative rates where a tensor has these.
fn rates(values: &[f32], is_rate: bool) -> Vec<f32> {
    if is_rate { values.iter().map(|rate| (-rate).ln()).collect() } else { values.to_vec() }
}

/// The weight in another format.
fn in_format(weight: &HostWeight, format: Format) -> Result<HostWeight, Error> {
    Ok(quantize(&weight.dequantize()?, weight.n(), weight.k(), format)?.0)
}

/// Name of a tensor as [`Model::experts`] takes it. A plan names the tensor of the first
/// expert where each has its own.
fn of_experts(model: &Model, weight: &PlannedWeight, tensor: &str) -> String {
    let is_stack = model.info(tensor).is_ok_and(|info| info.shape.len() > 2);
    // A rank may have one of many.
    let are_many = weight.experts.is_some_and(|experts| experts > 1) || matches!(weight.local_experts(), Ok(Some(_)));
    match tensor.rsplit_once(".0.") {
        Some((before, after)) if are_many && !is_stack => {
            format!("{before}.{{}}.{after}")
        }
        _ => tensor.to_owned(),
    }
}

/// Biases of a weight: of all segments, of gate and up, or of each expert in turn.
fn bias_of(model: &Model, weight: &PlannedWeight) -> Result<Vec<f32>, Error> {
    let name = |tensor: &String| {
        let stem = tensor.strip_suffix(".weight").unwrap_or(tensor);
        let names = [format!("{stem}.bias"), format!("{stem}_bias")];
        names.iter().find(|name| model.has(name)).unwrap_or(&names[0]).clone()
    };
    let experts = match (weight.local_experts()?, weight.tensors.first()) {
        (Some(_), Some(tensor)) => model.info(&name(tensor))?.shape.first().copied().unwrap_or(1),
        _ => weight.experts.unwrap_or(1),
    };
    if let ([pairs], true) = (&weight.tensors[..], weight.gated) {
        return weight.of_biases(vec![model.interleaved_biases(&name(pairs))?], experts);
    }
    let read = |tensor| Ok::<_, Error>(model.dense(&name(tensor))?.to_f32());
    let parts = weight.tensors.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let parts = match &parts[..] {
        [gate, up] if weight.experts.is_some() && gate.len() == up.len() => {
            let rows = (gate.len() / experts.max(1)).max(1);
            vec![gate.chunks(rows).zip(up.chunks(rows)).flat_map(|(gate, up)| [gate, up].concat()).collect()]
        }
        _ => parts,
    };
    weight.of_biases(parts, experts)
}

/// Contiguous values in `dtype`.
fn upload(ctx: &Context, values: &[f32], dtype: DType) -> Result<Held, Error> {
    let mut buffer = ctx.allocate_elements(dtype, values.len())?;
    ctx.upload_into(&dtype.encode(values), &mut buffer)?;
    Ok(Held::Values(buffer))
}

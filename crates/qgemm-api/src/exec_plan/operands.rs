//! What a plan file says of operations between products: norms, the KV cache, attention, the optimizer.

use qgemm_formats::DType;
use qgemm_hal::{NormFunction, NormKind, RotaryPairs, UpdateRule};
use serde::{Deserialize, Serialize};

use super::file::PlannedOp;
use crate::attention::{Attention, Keys, Queries};
use crate::error::Error;
use crate::kv_append::{KvAppend, Rotary, RotaryScaling};
use crate::norm::Norm;
use crate::optimizer::Optimizer;

/// A field that names a region, the name, and the bytes that the region has at least; none when these overflow.
type NamedRegion<'a> = (&'static str, &'a str, Option<usize>);

/// Bytes of a length of a sequence.
pub(super) const WORD: usize = 4;
/// Bytes of the numbers of an optimizer's step.
pub(super) const STEP_BYTES: usize = 16;

/// Of `norm`: what becomes of a row. Where the operation's X and D are one region, it is normalized in place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedNorm {
    /// `rms` or `layer`.
    pub function: String,
    /// Added below the root.
    pub eps: f32,
    /// Region of the factors of columns.
    pub gamma: String,
    /// Their element type.
    pub gamma_dtype: String,
    /// Region of what is added to columns.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta: Option<String>,
    /// Its element type.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta_dtype: Option<String>,
}

/// Of `kv_append` and `attention`: sequences, heads, and where keys and values lie.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedHeads {
    /// Sequences; each has the same share of the tokens.
    pub sequences: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Keys that each sequence has room for, or, without lengths, has.
    pub capacity: usize,
    /// Whether a query sees no later keys.
    pub causal: bool,
    /// Region of the keys; of `kv_append` that is written.
    pub k: String,
    /// Region of the values; of `kv_append` that is written.
    pub v: String,
    /// Region of the number of keys of each sequence, those of this step among them: u32.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub lengths: Option<String>,
    /// Of `kv_append`: region of the new keys.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new_k: Option<String>,
    /// Of `kv_append`: region of the new values.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new_v: Option<String>,
    /// Of `kv_append`: how queries, in place, and keys are turned.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rotary: Option<PlannedRotary>,
}

/// How queries and keys are turned ([`Rotary`](crate::Rotary)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedRotary {
    /// Features of a head that are turned.
    pub dim: usize,
    /// Which two of them together: `neox` or `interleaved`.
    pub pairs: String,
    /// Of the frequencies.
    pub base: f64,
    /// How they are scaled.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scaling: Option<PlannedScaling>,
}

/// How frequencies are scaled ([`RotaryScaling`](crate::RotaryScaling)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedScaling {
    /// `linear`, `llama3` or `yarn`.
    pub kind: String,
    /// The factor.
    pub factor: f64,
    /// Of `llama3` and `yarn`: `low_freq_factor` or `beta_slow`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub low: Option<f64>,
    /// Of `llama3` and `yarn`: `high_freq_factor` or `beta_fast`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub high: Option<f64>,
    /// Of `llama3` and `yarn`: positions that the model was first trained on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub original: Option<usize>,
}

/// Of `optimizer`: AdamW's numbers and regions. The operation's X is the gradient, its D the trained values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedOptimizer {
    /// What the first moment is multiplied with.
    pub beta1: f32,
    /// What the second moment is multiplied with.
    pub beta2: f32,
    /// Added to the root of the corrected second moment.
    pub eps: f32,
    /// Region of the first moments.
    pub moment1: String,
    /// Region of the second moments.
    pub moment2: String,
    /// Region of the step's numbers, 16 bytes that [`OptimizerPlan::step`](crate::OptimizerPlan::step) makes.
    pub step: String,
}

fn wrong(field: &str, expected: &str, got: &str) -> Error {
    Error::PlanMismatch { at: field.into(), expected: expected.into(), got: got.into() }
}

impl PlannedNorm {
    /// The norm of so many rows and columns; in place where D has no type of its own.
    pub(super) fn describe(&self, [rows, columns]: [usize; 2], x: DType, d: Option<DType>) -> Result<Norm, Error> {
        let kind = NormKind::ALL.into_iter().find(|kind| kind.name() == self.function);
        let function = match kind {
            Some(NormKind::Rms) => NormFunction::rms(self.eps),
            Some(NormKind::Layer) => NormFunction::layer(self.eps),
            _ => return Err(wrong("norm.function", "rms or layer", &self.function)),
        };
        let function = function.gamma(self.gamma_dtype.parse()?);
        let function = match &self.beta_dtype {
            Some(dtype) => function.beta(dtype.parse()?),
            None => function,
        };
        let norm = Norm::new(rows, columns, x, function);
        Ok(d.map_or(norm.clone().d_in_place(), |dtype| norm.d_dtype(dtype)))
    }
}

impl PlannedHeads {
    /// What turns and keeps so many tokens.
    pub(super) fn append(&self, tokens: usize, dtype: DType) -> Result<KvAppend, Error> {
        let (queries, keys) = self.of_sequences(tokens);
        let append = KvAppend::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        match &self.rotary {
            None => Ok(append),
            Some(rotary) => Ok(append.rotary(rotary.describe()?)),
        }
    }

    /// The attention of so many tokens.
    pub(super) fn attention(&self, tokens: usize, dtype: DType) -> Attention {
        let (queries, keys) = self.of_sequences(tokens);
        let attention = Attention::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        if self.causal { attention.causal() } else { attention }
    }

    /// Which tokens are whose, and how many keys there are.
    fn of_sequences(&self, tokens: usize) -> (Queries, Keys) {
        let each = tokens.checked_div(self.sequences).unwrap_or(0);
        let keys = if self.lengths.is_some() { Keys::lengths(self.capacity) } else { Keys::each(self.capacity) };
        (Queries::each(self.sequences, each), keys)
    }
}

impl PlannedRotary {
    fn describe(&self) -> Result<Rotary, Error> {
        let pairs = RotaryPairs::ALL.into_iter().find(|pairs| pairs.name() == self.pairs);
        let rotary = match pairs {
            Some(RotaryPairs::Neox) => Rotary::neox(self.dim),
            Some(RotaryPairs::Interleaved) => Rotary::interleaved(self.dim),
            None => return Err(wrong("heads.rotary.pairs", "neox or interleaved", &self.pairs)),
        };
        let rotary = rotary.base(self.base);
        let Some(PlannedScaling { kind, factor, low, high, original }) = &self.scaling else { return Ok(rotary) };
        // What is missing is no number, which the rotary embedding refuses by name.
        let (factor, low, high) = (*factor, low.unwrap_or(f64::NAN), high.unwrap_or(f64::NAN));
        let original = original.unwrap_or(0);
        let scaling = match kind.as_str() {
            "linear" => RotaryScaling::Linear { factor },
            "llama3" => RotaryScaling::Llama3 { factor, low, high, original },
            "yarn" => RotaryScaling::Yarn { factor, fast: high, slow: low, original },
            other => return Err(wrong("heads.rotary.scaling.kind", "linear, llama3 or yarn", other)),
        };
        Ok(rotary.scaling(scaling))
    }
}

impl PlannedOptimizer {
    /// A step of so many parameters by a gradient of this type.
    pub(super) fn describe(&self, len: usize, gradient: DType) -> Optimizer {
        let &Self { beta1, beta2, eps, .. } = self;
        Optimizer::adamw(len).rule(UpdateRule::AdamW { beta1, beta2, eps }).gradient_dtype(gradient)
    }
}

impl PlannedOp {
    fn part<'a, T>(&self, part: &'a Option<T>, what: &'static str) -> Result<&'a T, Error> {
        part.as_ref().ok_or_else(|| Error::NotInPlan { what, name: self.op_id.clone() })
    }

    /// What a `norm` says of itself.
    pub(super) fn of_norm(&self) -> Result<&PlannedNorm, Error> {
        self.part(&self.norm, "function of")
    }

    /// What a `kv_append` or an `attention` says of itself.
    pub(super) fn of_heads(&self) -> Result<&PlannedHeads, Error> {
        self.part(&self.heads, "heads of")
    }

    /// What an `optimizer` says of itself.
    pub(super) fn of_optimizer(&self) -> Result<&PlannedOptimizer, Error> {
        self.part(&self.optimizer, "rule of")
    }

    /// The description of a `norm`.
    pub(super) fn as_norm(&self) -> Result<Norm, Error> {
        let d = if self.x == self.d { None } else { Some(self.d_dtype.parse()?) };
        self.of_norm()?.describe([self.shape.m, self.shape.n], self.x_dtype.parse()?, d)
    }

    /// The description of a `kv_append`.
    pub(super) fn as_kv_append(&self) -> Result<KvAppend, Error> {
        self.of_heads()?.append(self.shape.m, self.x_dtype.parse()?)
    }

    /// The description of an `attention`.
    pub(super) fn as_attention(&self) -> Result<Attention, Error> {
        Ok(self.of_heads()?.attention(self.shape.m, self.x_dtype.parse()?))
    }

    /// The description of an `optimizer`.
    pub(super) fn as_optimizer(&self) -> Result<Optimizer, Error> {
        let len = self.shape.m.checked_mul(self.shape.n);
        let len = *self.part(&len, "size of")?;
        Ok(self.of_optimizer()?.describe(len, self.x_dtype.parse()?))
    }

    /// Regions of an operation beside X, D and those of products: their fields, and the bytes that each has at least.
    pub(super) fn other_regions(&self) -> Result<Vec<NamedRegion<'_>>, Error> {
        let values = |count: usize, dtype: &str| -> Result<Option<usize>, Error> {
            Ok(count.checked_mul(dtype.parse::<DType>()?.bytes()))
        };
        let mut found: Vec<NamedRegion<'_>> = Vec::new();
        if let Some(of) = &self.norm {
            found.push(("norm.gamma", &of.gamma, values(self.shape.n, &of.gamma_dtype)?));
            if let (Some(beta), Some(dtype)) = (&of.beta, &of.beta_dtype) {
                found.push(("norm.beta", beta, values(self.shape.n, dtype)?));
            }
        }
        if let Some(of) = &self.heads {
            let row = of.kv_heads.checked_mul(of.head_dim);
            let rows = |count: Option<usize>| -> Result<Option<usize>, Error> {
                row.zip(count)
                    .and_then(|(row, count)| row.checked_mul(count))
                    .map_or(Ok(None), |n| values(n, &self.x_dtype))
            };
            let cache = rows(of.sequences.checked_mul(of.capacity))?;
            found.extend([("heads.k", of.k.as_str(), cache), ("heads.v", of.v.as_str(), cache)]);
            let new = rows(Some(self.shape.m))?;
            found.extend(of.new_k.as_deref().map(|name| ("heads.new_k", name, new)));
            found.extend(of.new_v.as_deref().map(|name| ("heads.new_v", name, new)));
            found.extend(of.lengths.as_deref().map(|name| ("heads.lengths", name, of.sequences.checked_mul(WORD))));
        }
        let of_routing = self.operation == "routing";
        let slots = if of_routing { self.shape.m.checked_mul(self.shape.k) } else { Some(self.shape.m) };
        let words = slots.and_then(|slots| slots.checked_mul(WORD));
        found.extend(self.ids.as_deref().map(|name| ("ids", name, words)));
        found.extend(self.router_weights.as_deref().map(|name| ("router_weights", name, words)));
        found.extend(self.status.as_deref().map(|name| ("status", name, Some(WORD))));
        if let Some(name) = &self.offsets {
            let products = self.products.or(self.weight.as_ref().and_then(|weight| weight.experts)).unwrap_or(1);
            found.push(("offsets", name, products.checked_add(1).and_then(|count| count.checked_mul(WORD))));
        }
        if let Some(of) = &self.optimizer {
            let all = self.shape.m.checked_mul(self.shape.n).and_then(|n| n.checked_mul(DType::F32.bytes()));
            found.extend([
                ("optimizer.moment1", of.moment1.as_str(), all),
                ("optimizer.moment2", of.moment2.as_str(), all),
            ]);
            found.push(("optimizer.step", &of.step, Some(STEP_BYTES)));
        }
        Ok(found)
    }

    /// The numbers of an operation between products, without the names of regions.
    pub(super) fn numbers_between(
        &self,
    ) -> (Option<PlannedNorm>, Option<PlannedHeads>, Option<PlannedOptimizer>, bool) {
        let nowhere = String::new;
        let norm = self.norm.clone().map(|of| PlannedNorm { gamma: nowhere(), beta: None, ..of });
        let heads = self.heads.clone().map(|of| PlannedHeads {
            k: nowhere(),
            v: nowhere(),
            lengths: of.lengths.map(|_| nowhere()),
            new_k: None,
            new_v: None,
            ..of
        });
        let optimizer = self.optimizer.clone().map(|of| PlannedOptimizer {
            moment1: nowhere(),
            moment2: nowhere(),
            step: nowhere(),
            ..of
        });
        (norm, heads, optimizer, self.x == self.d)
    }
}

//! Plan-file records of operations between products: norms, KV
//! cache, attention, optimizer.

use qgemm_formats::DType;
use qgemm_hal::{NormFunction, NormKind, RotaryPairs, UpdateRule};
use serde::{Deserialize, Serialize};

use super::file::PlannedOp;
use crate::attention::{Attention, Keys, Queries};
use crate::error::Error;
use crate::kv_append::{KvAppend, Rotary, RotaryScaling};
use crate::norm::Norm;
use crate::optimizer::Optimizer;

/// Region operand: field name, region name, and minimum bytes (`None` on overflow).
type NamedRegion<'a> = (&'static str, &'a str, Option<usize>);

/// Bytes of a sequence length.
pub(super) const WORD: usize = 4;
/// Bytes of the optimizer step's numbers.
pub(super) const STEP_BYTES: usize = 16;

/// Parameters of a `norm`. It is in place when X and D are one region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedNorm {
    /// `rms` or `layer`.
    pub function: String,
    /// Epsilon, added before the square root.
    pub eps: f32,
    /// Region of gamma.
    pub gamma: String,
    /// Element type of gamma.
    pub gamma_dtype: String,
    /// Region of beta.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta: Option<String>,
    /// Element type of beta.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta_dtype: Option<String>,
}

/// Sequences, heads and KV operands of `kv_append` and `attention`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedHeads {
    /// Sequences, with equal shares of the tokens.
    pub sequences: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// KV-cache capacity per sequence. Without lengths, the number of keys.
    pub capacity: usize,
    /// Whether attention is causal.
    pub causal: bool,
    /// Region of the keys, the output of `kv_append`.
    pub k: String,
    /// Region of the values, the output of `kv_append`.
    pub v: String,
    /// Region of the sequence lengths in keys, including this step: u32.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub lengths: Option<String>,
    /// Region of the new keys (`kv_append`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new_k: Option<String>,
    /// Region of the new values (`kv_append`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new_v: Option<String>,
    /// Rotary embedding of queries (in place) and keys (`kv_append`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rotary: Option<PlannedRotary>,
}

/// Rotary embedding ([`Rotary`](crate::Rotary)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedRotary {
    /// Rotated features per head.
    pub dim: usize,
    /// Pairing: `neox` or `interleaved`.
    pub pairs: String,
    /// Frequency base (theta).
    pub base: f64,
    /// Frequency scaling.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scaling: Option<PlannedScaling>,
}

/// Frequency scaling ([`RotaryScaling`](crate::RotaryScaling)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedScaling {
    /// `linear`, `llama3` or `yarn`.
    pub kind: String,
    /// Scaling factor.
    pub factor: f64,
    /// `low_freq_factor` (`llama3`) or `beta_slow` (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub low: Option<f64>,
    /// `high_freq_factor` (`llama3`) or `beta_fast` (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub high: Option<f64>,
    /// Original context length (`llama3` and `yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub original: Option<usize>,
}

/// Parameters and regions of AdamW. X of the operation is the
/// gradient, D the trained values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedOptimizer {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Epsilon, added to the root of the corrected second moment.
    pub eps: f32,
    /// Region of the first moments.
    pub moment1: String,
    /// Region of the second moments.
    pub moment2: String,
    /// Region of the step's numbers: 16 bytes from
    /// [`OptimizerPlan::step`](crate::OptimizerPlan::step).
    pub step: String,
}

fn wrong(field: &str, expected: &str, got: &str) -> Error {
    Error::PlanMismatch { at: field.into(), expected: expected.into(), got: got.into() }
}

impl PlannedNorm {
    /// Norm problem of these rows and columns. In place if D has no type.
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
    /// KV-append problem of `tokens` tokens.
    pub(super) fn append(&self, tokens: usize, dtype: DType) -> Result<KvAppend, Error> {
        let (queries, keys) = self.of_sequences(tokens);
        let append = KvAppend::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        match &self.rotary {
            None => Ok(append),
            Some(rotary) => Ok(append.rotary(rotary.describe()?)),
        }
    }

    /// Attention problem of `tokens` tokens.
    pub(super) fn attention(&self, tokens: usize, dtype: DType) -> Attention {
        let (queries, keys) = self.of_sequences(tokens);
        let attention = Attention::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        if self.causal { attention.causal() } else { attention }
    }

    /// Queries and keys of the sequences.
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
        // A missing number becomes NaN, which the rotary embedding refuses by name.
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
    /// Optimizer problem of `len` parameters, with this gradient type.
    pub(super) fn describe(&self, len: usize, gradient: DType) -> Optimizer {
        let &Self { beta1, beta2, eps, .. } = self;
        Optimizer::adamw(len).rule(UpdateRule::AdamW { beta1, beta2, eps }).gradient_dtype(gradient)
    }
}

impl PlannedOp {
    fn part<'a, T>(&self, part: &'a Option<T>, what: &'static str) -> Result<&'a T, Error> {
        part.as_ref().ok_or_else(|| Error::NotInPlan { what, name: self.op_id.clone() })
    }

    /// Parameters of a `norm`.
    pub(super) fn of_norm(&self) -> Result<&PlannedNorm, Error> {
        self.part(&self.norm, "function of")
    }

    /// Parameters of a `kv_append` or an `attention`.
    pub(super) fn of_heads(&self) -> Result<&PlannedHeads, Error> {
        self.part(&self.heads, "heads of")
    }

    /// Parameters of an `optimizer`.
    pub(super) fn of_optimizer(&self) -> Result<&PlannedOptimizer, Error> {
        self.part(&self.optimizer, "rule of")
    }

    /// Problem of a `norm`.
    pub(super) fn as_norm(&self) -> Result<Norm, Error> {
        let d = if self.x == self.d { None } else { Some(self.d_dtype.parse()?) };
        self.of_norm()?.describe([self.shape.m, self.shape.n], self.x_dtype.parse()?, d)
    }

    /// Problem of a `kv_append`.
    pub(super) fn as_kv_append(&self) -> Result<KvAppend, Error> {
        self.of_heads()?.append(self.shape.m, self.x_dtype.parse()?)
    }

    /// Problem of an `attention`.
    pub(super) fn as_attention(&self) -> Result<Attention, Error> {
        Ok(self.of_heads()?.attention(self.shape.m, self.x_dtype.parse()?))
    }

    /// Problem of an `optimizer`.
    pub(super) fn as_optimizer(&self) -> Result<Optimizer, Error> {
        let len = self.shape.m.checked_mul(self.shape.n);
        let len = *self.part(&len, "size of")?;
        Ok(self.of_optimizer()?.describe(len, self.x_dtype.parse()?))
    }

    /// Region operands besides X, D and those of products, with their minimum bytes.
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

    /// Parameters of an operation between products, without region names.
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

//! Plan-file records of operations between products: norms, KV
//! cache, attention, optimizer.

use qgemm_formats::{DType, ShardAxis};
use qgemm_hal::op::sampling::SamplingParameters;
use qgemm_hal::{GateFunction, NormFunction, NormKind, UpdateRule};
use serde::{Deserialize, Serialize};

use super::file::PlannedOp;
use super::mismatch::wrong;
use super::ranks::{Division, PlannedShard};
use super::recurrent::part_of;
use super::rotary::{PlannedRotary, PlannedTables};
use super::sizes::{NamedRegion, WORD, too_large};
use crate::attention::{Attention, Keys, Queries};
use crate::error::Error;
use crate::kv_append::KvAppend;
use crate::norm::Norm;
use crate::operand::WIDE_ACCESS;
use crate::optimizer::Optimizer;

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
    /// Whether gamma is 1 more than its tensor.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub gamma_offset: bool,
    /// Region of beta.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta: Option<String>,
    /// Element type of beta.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beta_dtype: Option<String>,
    /// Element type of the normed X of a product, whose prologue the norm is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub normed_dtype: Option<String>,
    /// Rows of X for each row of D, which is the norm of the last of them. 1 if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub every: Option<usize>,
    /// Region of the sum of X and the residual, which is normalized; in the type of X.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sum: Option<String>,
    /// Gate of the result, or of X.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gate: Option<PlannedGate>,
    /// Groups of adjacent features, each normalized by itself. 1 if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub groups: Option<usize>,
    /// This rank's features of gamma and beta. All if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub shard: Option<PlannedShard>,
}

/// Gate of a norm: a function of z multiplies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedGate {
    /// Region of z, with the shape and type of X.
    pub z: String,
    /// `silu` or `sigmoid`.
    pub function: String,
    /// Whether it multiplies X instead of the result.
    pub before: bool,
}

/// Segment of a product's features with an output of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedSegment {
    /// First feature.
    pub first: usize,
    /// Number of features.
    pub features: usize,
    /// Region of the output, in the type of D.
    pub d: String,
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
    /// Format and pages of the cache. Without them, rows in the type of the queries.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cache: Option<PlannedCache>,
    /// Keys that a query sees at most, its own included.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub window: Option<usize>,
    /// Factor of scores (`attention`). The root of `1 / head_dim` if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub score_scale: Option<f32>,
    /// Region of the sinks: f32 `[heads]` (`attention`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sinks: Option<String>,
    /// Region of the output gate, with the shape and type of D (`attention`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gate: Option<String>,
    /// First of these query heads in the model, whose sinks the tensor has (`attention`). 0 if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub first_head: Option<usize>,
    /// RMS norms of query and key heads before the rotary embedding (`kv_append`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub head_norms: Option<[PlannedNorm; 2]>,
    /// Rotary embedding of queries (in place) and keys (`kv_append`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rotary: Option<PlannedRotary>,
    /// Whether queries (in place) and keys have a Hadamard rotation (`kv_append`).
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub rotate_k: bool,
    /// Whether values have a Hadamard rotation (`kv_append`).
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub rotate_v: bool,
}

/// Hadamard rotation of heads in place, which undoes that of values on the result of an `attention`
/// (`kv_append` without keys).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedRotation {
    /// Heads.
    pub heads: usize,
    /// Head dimension.
    pub head_dim: usize,
}

/// Format and pages of a KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedCache {
    /// Format of keys and values.
    pub format: String,
    /// Pages. Without them, each sequence has rows of its own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pages: Option<PlannedPages>,
    /// Region of the scales of the keys, in formats with scales.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub k_scales: Option<String>,
    /// Region of the scales of the values.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub v_scales: Option<String>,
    /// Region of the factors of heads, all 1, in formats with factors.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub factors: Option<String>,
}

/// Pages of a KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedPages {
    /// Number of pages.
    pub count: usize,
    /// Tokens of a page.
    pub size: usize,
    /// Region of the block table: u32 `[sequences, capacity / size]`, rounded up.
    pub table: String,
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

impl PlannedNorm {
    /// Norm problem of these rows and columns. In place if D has no type.
    pub(super) fn describe(&self, [rows, columns]: [usize; 2], x: DType, d: Option<DType>) -> Result<Norm, Error> {
        let norm = Norm::new(rows, columns, x, self.function()?);
        let norm = if self.sum.is_some() { norm.residual(x) } else { norm };
        let norm = match self.every {
            None => norm,
            Some(every) => {
                let row_stride = columns.checked_mul(every).ok_or_else(too_large)?;
                let first = self.first_byte(columns, x);
                // The first row lies within X.
                let alignment = if first == 0 { WIDE_ACCESS } else { WIDE_ACCESS.min(1 << first.trailing_zeros()) };
                let norm = norm.x_row_stride(row_stride as u64).x_alignment(alignment);
                norm.residual_row_stride(row_stride as u64).residual_alignment(alignment)
            }
        };
        let norm = match &self.gate {
            None => norm,
            Some(PlannedGate { function, before, .. }) => {
                let known = GateFunction::ALL.into_iter().find(|known| known.name() == function);
                let known = known.ok_or_else(|| wrong("norm.gate.function", "silu or sigmoid", function))?;
                if *before { norm.gate_before(known) } else { norm.gate(known) }
            }
        };
        let norm = self.groups.into_iter().fold(norm, Norm::groups);
        Ok(d.map_or(norm.clone().d_in_place(), |dtype| norm.d_dtype(dtype)))
    }

    /// Byte of X at which the first normed row begins.
    pub(super) fn first_byte(&self, columns: usize, x: DType) -> usize {
        self.every.unwrap_or(1).saturating_sub(1).saturating_mul(columns).saturating_mul(x.bytes())
    }

    /// Numbers of the rank's features, from those of all.
    pub(super) fn of_features(&self, whole: Vec<f32>) -> Result<Vec<f32>, Error> {
        let Some(shard) = &self.shard else { return Ok(whole) };
        match shard.division()? {
            Division::Features(ShardAxis::Rows) => part_of(&whole, shard.range()).map(<[f32]>::to_vec),
            _ => Err(wrong("norm.shard.axis", "rows", &shard.axis)),
        }
    }

    /// Function and type of the norm of a product's X.
    pub(super) fn in_prologue(&self, x: DType) -> Result<(NormFunction, DType), Error> {
        Ok((self.function()?, self.normed_dtype.as_deref().map_or(Ok(x), str::parse)?))
    }

    /// Function with the types of gamma and beta.
    pub(super) fn function(&self) -> Result<NormFunction, Error> {
        let kind = NormKind::ALL.into_iter().find(|kind| kind.name() == self.function);
        let function = match kind {
            Some(NormKind::Rms) => NormFunction::rms(self.eps),
            Some(NormKind::Layer) => NormFunction::layer(self.eps),
            _ => return Err(wrong("norm.function", "rms or layer", &self.function)),
        };
        let function = function.gamma(self.gamma_dtype.parse()?);
        match &self.beta_dtype {
            Some(dtype) => Ok(function.beta(dtype.parse()?)),
            None => Ok(function),
        }
    }
}

impl PlannedHeads {
    /// KV-append problem of `tokens` tokens.
    pub(super) fn append(&self, tokens: usize, dtype: DType) -> Result<KvAppend, Error> {
        let (queries, keys) = self.of_sequences(tokens);
        let append = KvAppend::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        let append = self.append_to_cache(append)?;
        let append = if self.rotate_k { append.rotate_k() } else { append };
        let append = if self.rotate_v { append.rotate_v() } else { append };
        let append = match &self.head_norms {
            None => append,
            Some(norms) => append.head_norm(norms[0].eps, head_gamma(norms)?),
        };
        match &self.rotary {
            None => Ok(append),
            Some(rotary) => Ok(append.rotary(rotary.describe(self.capacity)?)),
        }
    }

    /// Attention problem of `tokens` tokens.
    pub(super) fn attention(&self, tokens: usize, dtype: DType, batch_invariant: bool) -> Result<Attention, Error> {
        let (queries, keys) = self.of_sequences(tokens);
        let attention = Attention::new(dtype, self.heads, self.kv_heads, self.head_dim, queries, keys);
        let attention = if batch_invariant { attention.batch_invariant() } else { attention };
        let attention = if self.causal { attention.causal() } else { attention };
        let attention = if self.sinks.is_some() { attention.sinks() } else { attention };
        let attention = if self.gate.is_some() { attention.gated() } else { attention };
        let attention = self.score_scale.into_iter().fold(attention, Attention::scale);
        self.attend_to_cache(self.window.into_iter().fold(attention, Attention::window))
    }

    /// Queries and keys of the sequences.
    fn of_sequences(&self, tokens: usize) -> (Queries, Keys) {
        let each = tokens.checked_div(self.sequences).unwrap_or(0);
        (Queries::each(self.sequences, each), self.keys())
    }
}

/// Element type of gamma of both head norms, which are alike.
fn head_gamma([q, k]: &[PlannedNorm; 2]) -> Result<DType, Error> {
    let of = |norm: &PlannedNorm| format!("{} of {} in {}", norm.function, norm.eps, norm.gamma_dtype);
    let (expected, got) = (of(&PlannedNorm { function: NormKind::Rms.name().to_owned(), ..q.clone() }), [of(q), of(k)]);
    match got.iter().find(|got| **got != expected) {
        None => Ok(q.gamma_dtype.parse()?),
        Some(got) => Err(wrong("heads.head_norms", &expected, got)),
    }
}

impl PlannedRotation {
    /// Rotation of the heads of `tokens` tokens, whatever their positions are.
    pub(super) fn describe(&self, tokens: usize, dtype: DType) -> KvAppend {
        KvAppend::in_place(dtype, self.heads, self.head_dim, Queries::each(1, tokens), Keys::each(tokens)).hadamard()
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
    pub(super) fn part<'a, T>(&self, part: &'a Option<T>, what: &'static str) -> Result<&'a T, Error> {
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
        match &self.rotation {
            Some(rotation) => Ok(rotation.describe(self.shape.m, self.x_dtype.parse()?)),
            None => self.of_heads()?.append(self.shape.m, self.x_dtype.parse()?),
        }
    }

    /// Problem of an `attention`.
    pub(super) fn as_attention(&self) -> Result<Attention, Error> {
        self.of_heads()?.attention(self.shape.m, self.x_dtype.parse()?, self.batch_invariant)
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
            let columns = if self.weight.is_some() { self.shape.k } else { self.shape.n };
            found.push(("norm.gamma", &of.gamma, values(columns, &of.gamma_dtype)?));
            if let (Some(beta), Some(dtype)) = (&of.beta, &of.beta_dtype) {
                found.push(("norm.beta", beta, values(columns, dtype)?));
            }
            if let Some(gate) = &of.gate {
                let count = self.shape.m.checked_mul(columns);
                found.push(("norm.gate.z", &gate.z, count.map_or(Ok(None), |count| values(count, &self.x_dtype))?));
            }
            if let Some(sum) = &of.sum {
                let count = self.shape.m.checked_mul(columns);
                found.push(("norm.sum", sum, count.map_or(Ok(None), |count| values(count, &self.x_dtype))?));
            }
        }
        for segment in &self.segments {
            let values = self.shape.m.checked_mul(segment.features);
            let bytes = values.zip(self.d_dtype.parse::<DType>().ok());
            found.push(("segments.d", &segment.d, bytes.and_then(|(n, dtype)| n.checked_mul(dtype.bytes()))));
        }
        if let Some(of) = &self.heads {
            let row = of.kv_heads.checked_mul(of.head_dim);
            let rows = |count: Option<usize>| -> Result<Option<usize>, Error> {
                row.zip(count)
                    .and_then(|(row, count)| row.checked_mul(count))
                    .map_or(Ok(None), |n| values(n, &self.x_dtype))
            };
            let cache = of.cache_bytes(self.x_dtype.parse()?)?;
            found.extend(of.cache_regions()?);
            for norm in of.head_norms.iter().flatten() {
                found.push(("heads.head_norms.gamma", &norm.gamma, values(of.head_dim, &norm.gamma_dtype)?));
            }
            found.extend(of.rotary.iter().flat_map(|rotary| rotary.regions(of.capacity)));
            found.extend([("heads.k", of.k.as_str(), cache), ("heads.v", of.v.as_str(), cache)]);
            let new = rows(Some(self.shape.m))?;
            found.extend(of.new_k.as_deref().map(|name| ("heads.new_k", name, new)));
            found.extend(of.new_v.as_deref().map(|name| ("heads.new_v", name, new)));
            found.extend(of.sinks.as_deref().map(|name| ("heads.sinks", name, of.heads.checked_mul(WORD))));
            let of_tokens = of.heads.checked_mul(of.head_dim).and_then(|row| row.checked_mul(self.shape.m));
            let gated = of_tokens.map_or(Ok(None), |n| values(n, &self.x_dtype))?;
            found.extend(of.gate.as_deref().map(|name| ("heads.gate", name, gated)));
            found.extend(of.lengths.as_deref().map(|name| ("heads.lengths", name, of.sequences.checked_mul(WORD))));
        }
        let of_routing = self.operation == "routing";
        let slots = if of_routing { self.shape.m.checked_mul(self.shape.k) } else { Some(self.shape.m) };
        let words = slots.and_then(|slots| slots.checked_mul(WORD));
        found.extend(self.ids.as_deref().map(|name| ("ids", name, words)));
        found.extend(self.router_weights.as_deref().map(|name| ("router_weights", name, words)));
        found.extend(self.status.as_deref().map(|name| ("status", name, Some(WORD))));
        let parameters = self.shape.m.checked_mul(SamplingParameters::WORDS * WORD);
        found.extend(self.parameters.as_deref().map(|name| ("parameters", name, parameters)));
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
        found.extend(self.recurrent_regions()?);
        Ok(found)
    }

    /// Parameters of an operation between products, without region names.
    pub(super) fn numbers_between(
        &self,
    ) -> (Option<PlannedNorm>, Option<PlannedHeads>, Option<PlannedOptimizer>, bool) {
        let nowhere = String::new;
        let norm = self.norm.clone().map(|of| PlannedNorm {
            gamma: nowhere(),
            beta: None,
            sum: of.sum.map(|_| nowhere()),
            gate: of.gate.map(|of| PlannedGate { z: nowhere(), ..of }),
            ..of
        });
        let heads = self.heads.clone().map(|of| PlannedHeads {
            k: nowhere(),
            v: nowhere(),
            lengths: of.lengths.map(|_| nowhere()),
            sinks: of.sinks.map(|_| nowhere()),
            gate: of.gate.map(|_| nowhere()),
            head_norms: of.head_norms.map(|norms| norms.map(|of| PlannedNorm { gamma: nowhere(), ..of })),
            rotary: of.rotary.map(|of| PlannedRotary {
                tables: of.tables.map(|_| PlannedTables { factors: nowhere(), cos: nowhere(), sin: nowhere() }),
                ..of
            }),
            cache: of.cache.map(|of| PlannedCache {
                pages: of.pages.map(|of| PlannedPages { table: nowhere(), ..of }),
                k_scales: of.k_scales.map(|_| nowhere()),
                v_scales: of.v_scales.map(|_| nowhere()),
                factors: of.factors.map(|_| nowhere()),
                ..of
            }),
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

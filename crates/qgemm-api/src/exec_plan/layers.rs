//! Operations between the products of a layer: norms, KV cache, attention,
//! and the optimizer steps.

use qgemm_formats::DType;
use qgemm_hal::{Activation, XPrecision};

use super::backward::Taped;
use super::build::{Buffer, Builder, Input};
use super::file::{Phase, PlannedOp, RegionKind};
use super::kv_cache::LayerCache;
use super::operands::{PlannedHeads, PlannedNorm, PlannedOptimizer, PlannedRotation, STEP_BYTES};
use super::product::{known, op};
use super::rotary::PlannedRotary;
use crate::architecture::{AttentionTensors, NormTensors};
use crate::error::Error;
use crate::record::Sizes;

/// Region of the sequence lengths in keys.
pub(super) const LENGTHS: &str = "kv_lengths";
/// Region of the optimizer step's numbers.
const STEP: &str = "optimizer_step";
/// Product options that none of these operations has.
pub(super) const PLAIN: (Activation, XPrecision) = (Activation::Identity, XPrecision::Exact);

impl Builder<'_> {
    /// Adds a norm of the rows of `x` into `d`, possibly in place.
    ///
    /// A `d` of fewer rows has the norm of the last row of each
    /// equal share of `x`.
    pub(super) fn norm(&mut self, op_id: String, of: &NormTensors, x: &Buffer, d: Buffer) -> Result<Buffer, Error> {
        let every = x.rows.checked_div(d.rows).filter(|every| *every > 1);
        let norm = PlannedNorm { every, ..self.planned_norm(of) };
        self.reads(x)?;
        self.uses_norm(&norm, x.columns);
        let own = (x.name != d.name).then_some(d.dtype);
        let described = norm.describe([d.rows, x.columns], x.dtype, own)?;
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_norm(&described))?;
        let op = PlannedOp { norm: Some(norm), ..op(op_id, [x, &d], PLAIN, &record)? };
        self.push(op, &d, std::slice::from_ref(&x.name))?;
        self.tape("norm", std::slice::from_ref(x), &[], &d);
        Ok(d)
    }

    /// Norm of a product's X, rounded to the type of activations.
    pub(super) fn prologue(&self, of: &NormTensors) -> PlannedNorm {
        PlannedNorm { normed_dtype: Some(self.options.x_dtype.name().to_owned()), ..self.planned_norm(of) }
    }

    pub(super) fn planned_norm(&self, of: &NormTensors) -> PlannedNorm {
        let NormTensors { gamma: (gamma, gamma_dtype), beta, gamma_offset } = of;
        // One more than the tensor does not fit its type.
        let gamma_dtype = if *gamma_offset { DType::F32 } else { *gamma_dtype };
        PlannedNorm {
            function: if self.network.pre_norm { "rms".into() } else { "layer".into() },
            eps: self.network.eps,
            gamma: gamma.clone(),
            gamma_dtype: gamma_dtype.name().to_owned(),
            gamma_offset: *gamma_offset,
            beta: beta.as_ref().map(|(name, _)| name.clone()),
            beta_dtype: beta.as_ref().map(|(_, dtype)| dtype.name().to_owned()),
            normed_dtype: None,
            every: None,
            sum: None,
            gate: None,
            groups: None,
            shard: None,
        }
    }

    /// Records that the next operation reads the tensors of a norm.
    pub(super) fn uses_norm(&mut self, norm: &PlannedNorm, columns: usize) {
        let of_beta = norm.beta.as_ref().zip(norm.beta_dtype.as_ref());
        for (name, dtype) in std::iter::once((&norm.gamma, &norm.gamma_dtype)).chain(of_beta) {
            let bytes = dtype.parse().map_or(0, |dtype: DType| columns.saturating_mul(dtype.bytes()));
            self.out.uses(name, RegionKind::Weight, bytes);
        }
    }

    /// Adds the attention of a layer: projections, optional head norms,
    /// rotary embedding, KV-cache append, attention.
    pub(super) fn attention(&mut self, i: usize, layer: &AttentionTensors, input: Input<'_>) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let [q, k, v] = [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)]
            .map(|(role, matrix)| (role, matrix, self.activation(&id(role), matrix.n)));
        let gate = layer.gate.as_ref().map(|matrix| ("gate", matrix, self.activation(&id("gate"), matrix.n)));
        let parts: Vec<_> = std::iter::once(q.clone()).chain(gate.clone()).chain([k.clone(), v.clone()]).collect();
        self.projections(&id("attn_"), &parts, input)?;
        let ((_, _, q), (_, _, k), (_, _, v), gate) = (q, k, v, gate.map(|(_, _, gate)| gate));
        let heads = self.network.heads;
        let mut planned = PlannedHeads {
            sequences: self.sequences,
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            head_dim: heads.head_dim,
            capacity: self.context,
            causal: self.network.pre_norm,
            k: k.name.clone(),
            v: v.name.clone(),
            lengths: None,
            new_k: None,
            new_v: None,
            cache: None,
            window: layer.window,
            score_scale: self.network.score_scale,
            sinks: layer.sinks.clone(),
            gate: gate.as_ref().map(|gate| gate.name.clone()),
            first_head: self.part.first_head(),
            head_norms: None,
            rotary: None,
            rotate_k: false,
            rotate_v: false,
        };
        let (q, k) = match &layer.head_norms {
            // The backward phase reads what the norms read.
            Some(norms) if self.options.train || !self.network.pre_norm => self.head_norms(i, norms, [q, k])?.into(),
            _ => (q, k),
        };
        let read = match self.network.pre_norm {
            // Encoders attend to the keys of the same step alone.
            false => [k.clone(), v.clone()],
            true => self.append(i, layer, &mut planned, &q, [&k, &v])?,
        };
        let d = self.activation(&id("attn"), layer.o.k);
        let described = planned.attention(q.rows, q.dtype, self.options.batch_invariant)?;
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_attention(&described))?;
        [&q, &read[0], &read[1]].into_iter().chain(&gate).try_for_each(|buffer| self.reads(buffer))?;
        self.uses_cache(&planned)?;
        let (reads, lengths) = ([q.name.clone(), read[0].name.clone(), read[1].name.clone()], planned.lengths.clone());
        let of_gate = planned.gate.clone();
        let shape = Sizes { m: q.rows, n: d.columns, k: q.columns };
        let batch_invariant = self.options.batch_invariant;
        let op =
            PlannedOp { shape, batch_invariant, heads: Some(planned), ..op(id("attn"), [&q, &d], PLAIN, &record)? };
        self.push(op, &d, &reads.into_iter().chain(lengths).chain(of_gate).collect::<Vec<_>>())?;
        if self.rotates_cache() && gate.is_none() {
            self.undo_rotation(id("attn_rotation"), &d)?;
        }
        let kept: Vec<Buffer> = if self.network.pre_norm { read.to_vec() } else { Vec::new() };
        self.tape("attention", &[q, k, v], &kept, &d);
        Ok(d)
    }

    /// Adds norms of query and key heads.
    fn head_norms(
        &mut self,
        i: usize,
        [of_q, of_k]: &[NormTensors; 2],
        [q, k]: [Buffer; 2],
    ) -> Result<[Buffer; 2], Error> {
        let q = self.head_norm(format!("blk.{i}.attn_q_norm"), of_q, q)?;
        Ok([q, self.head_norm(format!("blk.{i}.attn_k_norm"), of_k, k)?])
    }

    /// Head norms within `append`, if a kernel has both.
    fn norms_within(
        &mut self,
        append: &PlannedHeads,
        norms: &[NormTensors; 2],
        q: &Buffer,
    ) -> Result<Option<[PlannedNorm; 2]>, Error> {
        let norms = norms.each_ref().map(|norm| self.planned_norm(norm));
        let append = PlannedHeads { head_norms: Some(norms), ..append.clone() };
        let (described, ctx) = (append.append(q.rows, q.dtype)?, self.ctx);
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_kv_append(&described))?;
        let norms = append.head_norms.filter(|_| record.chosen().is_some());
        norms.iter().flatten().for_each(|norm| self.uses_norm(norm, append.head_dim));
        Ok(norms)
    }

    /// Adds a norm of each head. In place, unless the backward
    /// phase needs its input.
    fn head_norm(&mut self, op_id: String, of: &NormTensors, x: Buffer) -> Result<Buffer, Error> {
        let columns = self.network.heads.head_dim;
        let by_head = Buffer { rows: x.rows * x.columns / columns.max(1), columns, ..x.clone() };
        let name = if self.options.train { format!("{}_normed", x.name) } else { x.name.clone() };
        self.norm(op_id, of, &by_head, Buffer { name: name.clone(), ..by_head.clone() })?;
        Ok(Buffer { name, ..x })
    }

    /// Adds head norms, rotary embedding and KV-cache append. Returns the cached K and V.
    fn append(
        &mut self,
        i: usize,
        layer: &AttentionTensors,
        planned: &mut PlannedHeads,
        q: &Buffer,
        [k, v]: [&Buffer; 2],
    ) -> Result<[Buffer; 2], Error> {
        let of_window = self.network.window_rotary.as_ref().filter(|_| layer.window.is_some());
        let callers = match (of_window, &self.network.rotary) {
            (Some(rotary), _) => {
                planned.rotary = Some(PlannedRotary::of(rotary, None));
                None
            }
            (None, None) => None,
            (None, Some(Ok(rotary))) => {
                planned.rotary = Some(PlannedRotary::of(rotary, self.network.rotary_factors.as_ref()));
                None
            }
            (None, Some(Err(why))) => Some(why),
        };
        let LayerCache { k: k_cache, v: v_cache, planned: cache } = self.layer_cache(i, [k, v])?;
        let caches = [k_cache, v_cache];
        planned.cache = cache;
        planned.lengths = (!self.options.train).then(|| LENGTHS.to_owned());
        let [of_k, of_v] = caches.each_ref().map(|cache| cache.name.clone());
        let mut append = PlannedHeads {
            k: of_k.clone(),
            v: of_v.clone(),
            new_k: Some(k.name.clone()),
            new_v: Some(v.name.clone()),
            score_scale: None,
            sinks: None,
            gate: None,
            rotate_k: self.rotates_cache(),
            // A gate multiplies features before the rotation could be undone.
            rotate_v: self.rotates_cache() && planned.gate.is_none(),
            ..planned.clone()
        };
        if let Some(norms) = layer.head_norms.as_ref().filter(|_| !self.options.train) {
            append.head_norms = if callers.is_none() { self.norms_within(&append, norms, q)? } else { None };
            if append.head_norms.is_none() {
                self.head_norms(i, norms, [q.clone(), k.clone()])?;
            }
        }
        if let Some(why) = callers {
            let both = [q.clone(), k.clone()];
            self.step_because("rotary embedding", &q.name, &both, &both, why)?;
        }
        let described = append.append(q.rows, q.dtype)?;
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_kv_append(&described))?;
        [q, k, v, &caches[1]].into_iter().try_for_each(|buffer| self.reads(buffer))?;
        self.uses_cache(&append)?;
        let reads: Vec<String> = [q, k, v].map(|b| b.name.clone()).into_iter().chain(append.lengths.clone()).collect();
        let op_id = format!("blk.{i}.kv_append");
        let shape = Sizes { m: q.rows, n: k.columns, k: q.columns };
        let op = PlannedOp { shape, heads: Some(append), ..op(op_id.clone(), [q, &caches[0]], PLAIN, &record)? };
        self.push(op, &caches[0], &reads)?;
        for written in [&q.name, &of_v] {
            self.out.writers.insert(written.clone(), op_id.clone());
        }
        (planned.k, planned.v, planned.rotary) = (of_k, of_v, None);
        Ok(caches)
    }

    /// Whether cached keys and values have a Hadamard rotation.
    fn rotates_cache(&self) -> bool {
        self.options.rotate_cache && self.network.pre_norm && !self.options.train
    }

    /// Adds the Hadamard rotation of attention's result, in place.
    fn undo_rotation(&mut self, op_id: String, d: &Buffer) -> Result<(), Error> {
        let heads = self.network.heads;
        let rotation = PlannedRotation { heads: heads.heads, head_dim: heads.head_dim };
        let described = rotation.describe(d.rows, d.dtype);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_kv_append(&described))?;
        self.reads(d)?;
        let shape = Sizes { m: d.rows, n: d.columns, k: d.columns };
        let op = PlannedOp { shape, rotation: Some(rotation), ..op(op_id, [d, d], PLAIN, &record)? };
        self.push(op, d, std::slice::from_ref(&d.name))
    }

    /// Optimizer numbers of a step.
    pub(super) fn step_numbers() -> Buffer {
        let columns = STEP_BYTES / DType::F32.bytes();
        Buffer { name: STEP.into(), kind: RegionKind::Input, rows: 1, columns, dtype: DType::F32, kv: None }
    }

    /// Adds AdamW of a tensor with both moments.
    pub(super) fn optimizer(
        &mut self,
        op_id: String,
        gradient: &Buffer,
        [master, moment1, moment2]: &[Buffer; 3],
    ) -> Result<(), Error> {
        let planned = PlannedOptimizer {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            moment1: moment1.name.clone(),
            moment2: moment2.name.clone(),
            step: STEP.into(),
        };
        let described = planned.describe(master.rows * master.columns, gradient.dtype);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_optimizer(&described))?;
        let numbers = Self::step_numbers();
        [gradient, moment1, moment2, &numbers].into_iter().try_for_each(|buffer| self.reads(buffer))?;
        let phase = Phase::Backward;
        let op = PlannedOp { phase, optimizer: Some(planned), ..op(op_id, [gradient, master], PLAIN, &record)? };
        self.push(op, master, &[gradient.name.clone(), numbers.name])
    }

    /// Records that the next operation reads a buffer.
    pub(super) fn reads(&mut self, buffer: &Buffer) -> Result<(), Error> {
        self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
        Ok(())
    }

    /// Tapes an operation whose backward pass is the caller's (training).
    pub(super) fn tape(&mut self, step: &str, reads: &[Buffer], kept: &[Buffer], made: &Buffer) {
        if self.options.train {
            let (what, step, reads, kept) = (made.name.clone(), step.to_owned(), reads.to_vec(), kept.to_vec());
            self.tape.push(Taped::Caller { what, step, reads, kept, made: made.clone() });
        }
    }
}

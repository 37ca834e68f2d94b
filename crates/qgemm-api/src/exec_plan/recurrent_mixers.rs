//! Recurrent mixers of a layer: short convolution between gates,
//! and linear attention.

use qgemm_formats::DType;
use qgemm_hal::GateFunction;

use super::build::{Buffer, Builder, Input};
use super::file::{PlannedOp, RegionKind};
use super::layers::PLAIN;
use super::operands::{PlannedGate, PlannedNorm};
use super::product::{known, op};
use super::recurrent::{PlannedConv, PlannedLinear, PlannedState};
use super::sizes::{WORD, too_large};
use crate::architecture::{ConvTensors, Kernel, LinearForm, LinearNumbers, LinearTensors};
use crate::error::Error;
use crate::record::Sizes;

/// Region of the slots of the sequences' recurrent states.
const STATE_SLOTS: &str = "state_slots";
/// Epsilon of the L2 norm of queries and keys in the gated delta
/// rule.
const L2_EPS: f32 = 1e-6;

impl Builder<'_> {
    /// Adds a short convolution between its gates (LFM2).
    pub(super) fn short_conv(&mut self, i: usize, tensors: &ConvTensors, input: Input<'_>) -> Result<Buffer, Error> {
        let channels = tensors.o.k;
        let bcx = self.activation(&format!("blk.{i}.bcx"), tensors.input.n);
        let parts = [("in", &tensors.input, bcx.clone())];
        self.projections(&format!("blk.{i}.conv_"), &parts, input)?;
        let d = self.activation(&format!("blk.{i}.conv"), channels);
        let planned = PlannedConv {
            first: 2 * channels,
            input_gate: Some(0),
            output_gate: Some(channels),
            ..self.planned_conv(i, &tensors.conv)
        };
        self.convolve(format!("blk.{i}.conv"), planned, &bcx, &d)?;
        Ok(d)
    }

    /// Adds linear attention: projections, convolution, recurrence,
    /// gated norm.
    pub(super) fn linear_attention(
        &mut self,
        i: usize,
        tensors: &LinearTensors,
        input: Input<'_>,
    ) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let numbers = tensors.numbers;
        let (qkv, gate) = (self.activation(&id("qkv"), tensors.qkv.n), self.activation(&id("gate"), tensors.gate.n));
        let in_f32 =
            |builder: &Self, role: &str| Buffer { dtype: DType::F32, ..builder.activation(&id(role), numbers.heads) };
        let (beta, step) = (in_f32(self, "beta"), in_f32(self, "step"));
        let mut parts = vec![("qkv", &tensors.qkv, qkv.clone()), ("gate", &tensors.gate, gate.clone())];
        parts.extend(tensors.beta.as_ref().map(|matrix| ("beta", matrix, beta.clone())));
        parts.push(("step", &tensors.step, step.clone()));
        self.projections(&id("linear_"), &parts, input)?;

        let convolved = self.activation(&id("linear_conv"), qkv.columns);
        let conv = PlannedConv { silu: true, ..self.planned_conv(i, &tensors.conv) };
        self.convolve(id("linear_conv"), conv, &qkv, &convolved)?;

        let attended = self.activation(&id("linear_attn"), numbers.values());
        let beta = tensors.beta.as_ref().map(|_| beta);
        let planned = PlannedLinear {
            step: step.name.clone(),
            beta: beta.as_ref().map(|beta| beta.name.clone()),
            ..self.planned_linear(i, tensors)
        };
        let reads: Vec<Buffer> = [convolved, step].into_iter().chain(beta).collect();
        self.recur(id("linear_attn"), planned, &reads, &attended)?;
        self.gated_norm(id("linear_gated_norm"), tensors, &attended, &gate)
    }

    /// The slots of recurrent states, an input of the caller.
    pub(super) fn state_slots(&self) -> Option<Buffer> {
        let (kind, dtype) = (RegionKind::Input, DType::F32);
        let (name, rows) = (STATE_SLOTS.to_owned(), self.sequences);
        self.network.recurs().then_some(Buffer { name, kind, rows, columns: 1, dtype, kv: None })
    }

    fn planned_state(&self, i: usize, role: &str) -> PlannedState {
        let slots = self.options.slots.unwrap_or(self.sequences);
        PlannedState { region: format!("blk.{i}.{role}_state"), slots, indices: STATE_SLOTS.into() }
    }

    /// Convolution of all columns of X.
    fn planned_conv(&self, i: usize, kernel: &Kernel) -> PlannedConv {
        PlannedConv {
            sequences: self.sequences,
            width: kernel.width,
            first: 0,
            input_gate: None,
            output_gate: None,
            silu: false,
            weight: kernel.tensor.clone(),
            bias: kernel.bias.clone(),
            shards: self.part.channels(&kernel.tensor),
            state: self.planned_state(i, "conv"),
        }
    }

    /// Adds a short convolution.
    fn convolve(&mut self, op_id: String, planned: PlannedConv, x: &Buffer, d: &Buffer) -> Result<(), Error> {
        let described = planned.describe([x.rows, d.columns, x.columns], x.dtype);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_short_conv(&described))?;
        self.reads(x)?;
        self.out.uses(&planned.weight, RegionKind::Weight, d.columns.saturating_mul(planned.width * WORD));
        planned.bias.iter().for_each(|bias| self.out.uses(bias, RegionKind::Weight, d.columns * WORD));
        self.uses_state(&planned.state, planned.state_bytes(d.columns, x.dtype))?;
        let shape = Sizes { m: x.rows, n: d.columns, k: x.columns };
        let op = PlannedOp { shape, conv: Some(planned), ..op(op_id, [x, d], PLAIN, &record)? };
        self.push(op, d, std::slice::from_ref(&x.name))
    }

    /// Linear attention, without the regions of its gates.
    fn planned_linear(&self, i: usize, of: &LinearTensors) -> PlannedLinear {
        let LinearNumbers { heads, key_heads, key_dim, v_dim, .. } = of.numbers;
        let (keys, values) = (of.numbers.keys(), of.numbers.values());
        let ([q, k, v], tiled) = match of.form {
            LinearForm::GatedDelta { tiled } => ([0, keys, 2 * keys], tiled),
            LinearForm::Mamba2 => ([values + keys, values, 0], false),
        };
        let is_delta = of.form != LinearForm::Mamba2;
        PlannedLinear {
            sequences: self.sequences,
            heads,
            key_heads,
            tiled,
            first_head: self.part.first_linear_head(),
            key_dim,
            v_dim,
            q,
            k,
            v,
            delta: is_delta,
            normalized: is_delta.then_some(L2_EPS),
            scale: (!is_delta).then_some(1.0),
            step: String::new(),
            beta: None,
            a_log: of.a_log.0.clone(),
            is_rate: of.a_log.1,
            dt_bias: of.dt_bias.clone(),
            skip: of.skip.clone(),
            state: self.planned_state(i, "linear"),
        }
    }

    /// Adds the recurrence of linear attention on the first of the
    /// buffers that it reads.
    fn recur(&mut self, op_id: String, planned: PlannedLinear, reads: &[Buffer], d: &Buffer) -> Result<(), Error> {
        let Some(x) = reads.first() else { return Ok(()) };
        let batch_invariant = self.options.batch_invariant;
        let described = planned.describe([x.rows, x.columns], x.dtype, batch_invariant);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_linear_attention(&described))?;
        reads.iter().try_for_each(|buffer| self.reads(buffer))?;
        for name in [Some(&planned.a_log), Some(&planned.dt_bias), planned.skip.as_ref()].into_iter().flatten() {
            self.out.uses(name, RegionKind::Weight, planned.heads * WORD);
        }
        self.uses_state(&planned.state, planned.state_bytes())?;
        let names: Vec<String> = reads.iter().map(|buffer| buffer.name.clone()).collect();
        let shape = Sizes { m: x.rows, n: d.columns, k: x.columns };
        let op = PlannedOp { shape, batch_invariant, linear: Some(planned), ..op(op_id, [x, d], PLAIN, &record)? };
        self.push(op, d, &names)
    }

    /// Adds the norm of linear attention's result: of each head times
    /// the gate, or of groups of gated features.
    fn gated_norm(&mut self, op_id: String, of: &LinearTensors, x: &Buffer, gate: &Buffer) -> Result<Buffer, Error> {
        let before = of.form == LinearForm::Mamba2;
        let columns = if before { x.columns } else { of.numbers.v_dim };
        let rows = x.rows * (x.columns / columns.max(1));
        let by_row = |buffer: &Buffer| Buffer { rows, columns, ..buffer.clone() };
        let d = self.activation(&op_id, x.columns);
        let norm = PlannedNorm {
            gate: Some(PlannedGate { z: gate.name.clone(), function: GateFunction::Silu.name().into(), before }),
            groups: before.then_some(of.numbers.key_heads).filter(|&groups| groups > 1),
            shard: before.then(|| self.part.linear_features(of.numbers.v_dim, columns)).flatten(),
            ..self.planned_norm(&of.norm)
        };
        self.reads(x)?;
        self.reads(gate)?;
        self.uses_norm(&norm, columns);
        let described = norm.describe([rows, columns], x.dtype, Some(d.dtype))?;
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_norm(&described))?;
        let op = PlannedOp { norm: Some(norm), ..op(op_id, [&by_row(x), &by_row(&d)], PLAIN, &record)? };
        self.push(op, &d, &[x.name.clone(), gate.name.clone()])?;
        Ok(d)
    }

    fn uses_state(&mut self, state: &PlannedState, bytes: Option<usize>) -> Result<(), Error> {
        self.out.uses(&state.region, RegionKind::RecurrentState, bytes.ok_or_else(too_large)?);
        self.out.uses(&state.indices, RegionKind::Input, self.sequences * WORD);
        Ok(())
    }
}

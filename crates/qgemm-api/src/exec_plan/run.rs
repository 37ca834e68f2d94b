//! Runs of a loaded plan: a whole step, or one operation.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::{BufferMut, Collective, Stream};

use super::arena::{PlanArena, RunMemory};
use super::file::{Phase, PlannedOp, RegionKind};
use super::load::LoadedPlan;
use super::ready::Ready;
use super::weights::{OpWeights, PlanWeights};
use crate::attention::{AttentionArgs, AttentionPlan};
use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertArgs, ExpertPlan, Experts};
use crate::gather_rows::{GatherRowsArgs, GatherRowsPlan};
use crate::gemm::{Args, Plan};
use crate::gradient::{GradientInputs, GradientPlan, GradientWeight};
use crate::kv_append::{KvAppendArgs, KvAppendPlan};
use crate::linear_attention::{LinearAttentionArgs, LinearAttentionPlan};
use crate::matmul::{MatmulArgs, MatmulPlan};
use crate::norm::{NormArgs, NormPlan};
use crate::optimizer::{OptimizerArgs, OptimizerPlan};
use crate::routing::{RoutingArgs, RoutingPlan};
use crate::sampling::{SamplingArgs, SamplingPlan};
use crate::short_conv::{ShortConvArgs, ShortConvPlan};
use crate::weight::Weight;

impl LoadedPlan {
    /// Submits all operations of the forward phase to `stream`: from the inputs that the
    /// caller wrote (`tokens`, `kv_lengths`) to `logits`.
    ///
    /// Once [prepared](LoadedPlan::prepare) it allocates nothing and waits for nothing,
    /// unless the arena checks canaries.
    ///
    /// ```no_run
    /// use qgemm_api::{Context, PlanOptions, open_model};
    ///
    /// let (ctx, model) = (Context::open("auto")?, open_model("model.gguf")?);
    /// let plan = ctx.plan_model("model.gguf", &PlanOptions::new(1))?;
    /// let loaded = ctx.load_plan(&serde_json::to_string(&plan).expect("numbers and text"), &model)?;
    /// let (weights, mut arena) = (loaded.load_weights(&model)?, loaded.arena()?);
    /// let mut token = 1u32;
    /// for length in 1..=16u32 {
    ///     ctx.upload_into(&[token], arena.region_mut("tokens")?)?;
    ///     ctx.upload_into(&[length], arena.region_mut("kv_lengths")?)?; // with this token
    ///     loaded.step(&ctx.default_stream(), &mut arena, &weights)?;
    ///     let logits: Vec<f32> = ctx.download(arena.region("logits")?)?;
    ///     token = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::CallersStep`] when a step of the caller stands between operations. Those of
    /// [`LoadedPlan::run`], and of [`Context::submit`] for a rank's plan.
    pub fn step(&self, stream: &Stream, arena: &mut PlanArena, weights: &PlanWeights) -> Result<(), Error> {
        self.agree()?;
        for (place, op) in self.forward()? {
            self.run_place(stream, place, arena, weights.of(op))?;
        }
        Ok(())
    }

    /// [`LoadedPlan::step`] in the memory of an arena ([`PlanArena::into_memory`]), for a
    /// CUDA graph that owns it:
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")]
    /// # fn capture(ctx: &qgemm_api::Context, loaded: &qgemm_api::LoadedPlan, weights: &qgemm_api::PlanWeights) -> Result<(), qgemm_api::Error> {
    /// let stream = ctx.new_stream()?;
    /// loaded.prepare()?;
    /// let (tokens, logits) = (loaded.region_range("tokens")?, loaded.region_range("logits")?);
    /// let memory = [loaded.arena()?.into_memory()];
    /// let mut graph = qgemm_api::cuda::capture_with(&**ctx.device(), &stream, memory, |[memory]| {
    ///     loaded.step_in(&stream, memory, weights)
    /// })?;
    /// let [memory] = graph.buffers_mut();
    /// ctx.upload_on(&stream, &[1u32], memory.slice(tokens)?)?;
    /// graph.replay(&stream)?;
    /// let [memory] = graph.buffers();
    /// let logits: Vec<f32> = ctx.download_on(&stream, memory.slice(logits)?)?;
    /// # drop(logits);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`LoadedPlan::step`]. [`Error::BufferTooShort`] for shorter memory.
    pub fn step_in(&self, stream: &Stream, memory: BufferMut<'_>, weights: &PlanWeights) -> Result<(), Error> {
        let (expected, got) = (self.regions.bytes(), memory.view().len());
        if got < expected {
            return Err(Error::BufferTooShort { operand: "memory of a plan", expected, got });
        }
        self.agree()?;
        let mut memory = RunMemory { memory, regions: &self.regions };
        self.forward()?.into_iter().try_for_each(|(place, op)| self.submit(stream, place, &mut memory, weights.of(op)))
    }

    /// Submits one operation to `stream`. Its activations are in `arena`.
    ///
    /// A routing, a norm of heads or an optimizer takes `OpWeights::default()`; the caller
    /// of an optimizer writes the numbers of
    /// [`OptimizerPlan::step`](crate::OptimizerPlan::step) to the step's region first.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist, [`Error::CallersStep`] when
    /// it is a caller's step. [`Error::MissingOperand`] without one of its weights.
    /// [`Error::CanaryOverwritten`] by canary checks. When a kernel cannot be made ready.
    pub fn run<'a>(
        &self,
        stream: &Stream,
        op_id: &str,
        arena: &mut PlanArena,
        weights: impl Into<OpWeights<'a>>,
    ) -> Result<(), Error> {
        self.run_place(stream, self.place(op_id)?, arena, weights.into())
    }

    /// Checks that a step is the library's alone.
    ///
    /// # Errors
    /// [`Error::CallersStep`] when a step of the caller stands between operations.
    pub fn check_step(&self) -> Result<(), Error> {
        self.forward().map(drop)
    }

    /// Operations of a step.
    fn forward(&self) -> Result<Vec<(usize, &PlannedOp)>, Error> {
        let plan = self.exec_plan();
        let is_input = |name: &String| {
            plan.memory.regions.iter().any(|region| region.name == *name && region.kind == RegionKind::Input)
        };
        // Inputs are written before a step, and logits read behind it.
        let is_between =
            |barrier: &&super::file::Barrier| barrier.step.is_some() && !barrier.writes.iter().all(is_input);
        match plan.barriers.iter().find(is_between).and_then(|barrier| barrier.step.clone()) {
            Some(step) => Err(Error::CallersStep { step }),
            None => Ok(plan.ops.iter().enumerate().filter(|(_, op)| op.phase == Phase::Forward).collect()),
        }
    }

    fn run_place(
        &self,
        stream: &Stream,
        place: usize,
        arena: &mut PlanArena,
        weights: OpWeights<'_>,
    ) -> Result<(), Error> {
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        self.submit(stream, place, &mut arena.run_memory(), weights)?;
        arena.check(device, stream, &self.exec_plan().ops[place].op_id)
    }

    fn submit(
        &self,
        stream: &Stream,
        place: usize,
        memory: &mut RunMemory<'_>,
        weights: OpWeights<'_>,
    ) -> Result<(), Error> {
        let mut run = OpRun { op: &self.exec_plan().ops[place], stream, memory, weights };
        match self.ready(place)? {
            Ready::Gemm(plan) => run.gemm(plan),
            Ready::Experts(plan) => run.experts(plan),
            Ready::Gradient(plan) => run.gradient(plan),
            Ready::Matmul(plan) => run.matmul(plan),
            Ready::Routing(plan) => run.routing(plan),
            Ready::Norm(plan) => run.norm(plan),
            Ready::KvAppend(plan) => run.kv_append(plan),
            Ready::Attention(plan) => run.attention(plan),
            Ready::ShortConv(plan) => run.short_conv(plan),
            Ready::LinearAttention(plan) => run.linear_attention(plan),
            Ready::Optimizer(plan) => run.optimizer(plan),
            Ready::GatherRows(plan) => run.gather_rows(plan),
            Ready::Sampling(plan) => run.sampling(plan),
            Ready::Collective(collective) => run.collective(&self.ctx, collective),
        }
    }
}

/// One operation with its memory and weights.
struct OpRun<'a, 'm> {
    op: &'a PlannedOp,
    stream: &'a Stream,
    memory: &'a mut RunMemory<'m>,
    weights: OpWeights<'a>,
}

impl OpRun<'_, '_> {
    fn gemm(&mut self, plan: &Plan) -> Result<(), Error> {
        /// Outputs behind D.
        const SEGMENTS: usize = qgemm_hal::Segment::MOST - 1;
        let (op, regions, weights) = (self.op, self.memory.regions, self.weights);
        let read = [regions.range(&op.x)?, regions.optional(op.residual.as_deref())?];
        let mut segments = [const { 0..0 }; SEGMENTS];
        for (range, segment) in segments.iter_mut().zip(&op.segments) {
            *range = regions.range(&segment.d)?;
        }
        let [second, third, fourth] = segments;
        let write = [regions.range(&op.d)?, second, third, fourth, regions.workspace(plan.workspace_bytes())?];
        let ([x, residual], [d, second, third, fourth, workspace]) = self.memory.parts(read, write)?;
        let args = Args {
            residual: op.residual.is_some().then_some(residual),
            bias: weights.bias,
            gamma: weights.gamma,
            beta: weights.beta,
            ..Args::new(x, weights.weight(op)?, d)
        };
        let others = [second, third, fourth].into_iter().take(op.segments.len());
        plan.run_segments(self.stream, args, others, Some(workspace))
    }

    fn experts(&mut self, plan: &ExpertPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let experts = self.weights.experts(op)?;
        let index = if op.offsets.is_some() { &op.offsets } else { &op.ids };
        let read = [
            regions.range(&op.x)?,
            regions.optional(index.as_deref())?,
            regions.optional(op.router_weights.as_deref())?,
            regions.optional(op.residual.as_deref())?,
        ];
        let write = [
            regions.range(&op.d)?,
            regions.optional(op.status.as_deref())?,
            regions.workspace(plan.workspace_bytes())?,
        ];
        let ([x, index, router_weights, residual], [d, status, workspace]) = self.memory.parts(read, write)?;
        let args = ExpertArgs {
            router_weights: op.router_weights.is_some().then_some(router_weights),
            residual: op.residual.is_some().then_some(residual),
            bias: self.weights.bias,
            status: op.status.is_some().then_some(status),
            ..ExpertArgs::new(x, experts, index, d)
        };
        plan.run_within(self.stream, args, Some(workspace))
    }

    fn gradient(&mut self, plan: &GradientPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let weight = match op.weight.as_ref().is_some_and(|weight| weight.experts.is_some()) {
            true => GradientWeight::Experts(self.weights.experts(op)?),
            false => GradientWeight::One(self.weights.weight(op)?),
        };
        let read = [regions.range(&op.x)?, regions.optional(op.offsets.as_deref())?];
        let write = [regions.range(&op.d)?, regions.workspace(plan.workspace_bytes())?];
        let ([dy, offsets], [dx, workspace]) = self.memory.parts(read, write)?;
        let offsets = op.offsets.is_some().then_some(offsets);
        plan.run_within(self.stream, GradientInputs { dy, weight, offsets }, dx, Some(workspace))
    }

    fn matmul(&mut self, plan: &MatmulPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let b = regions.range(op.b.as_deref().unwrap_or_default())?;
        let read = [regions.range(&op.x)?, b, regions.optional(op.offsets.as_deref())?];
        let write = [regions.range(&op.d)?, regions.workspace(plan.workspace_bytes())?];
        let ([a, b, offsets], [d, workspace]) = self.memory.parts(read, write)?;
        let offsets = op.offsets.is_some().then_some(offsets);
        plan.run_within(self.stream, MatmulArgs { offsets, ..MatmulArgs::new(a, b, d) }, Some(workspace))
    }

    fn routing(&mut self, plan: &RoutingPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let [ids, weights, status] =
            [&op.ids, &op.router_weights, &op.status].map(|name| regions.range(name.as_deref().unwrap_or_default()));
        let write = [ids?, weights?, status?, regions.workspace(plan.workspace_bytes())?];
        let ([logits], [ids, weights, status, workspace]) = self.memory.parts([regions.range(&op.x)?], write)?;
        plan.run_within(self.stream, RoutingArgs::of_logits(logits, ids, weights, status), Some(workspace))
    }

    fn norm(&mut self, plan: &NormPlan) -> Result<(), Error> {
        let (op, regions, weights) = (self.op, self.memory.regions, self.weights);
        let gamma = weights.gamma.ok_or_else(|| missing("gamma", op))?;
        // In place, X has an empty range.
        let is_in_place = op.x == op.d;
        let x = if is_in_place { 0..0 } else { regions.range(&op.x)? };
        let first = op.of_norm()?.first_byte(op.shape.n, op.x_dtype.parse()?);
        let last_rows = |range: Range<usize>| range.start + first.min(range.len())..range.end;
        let (sum, gate) = (op.of_norm()?.sum.as_deref(), op.of_norm()?.gate.as_ref().map(|gate| gate.z.as_str()));
        let read = [last_rows(x), last_rows(regions.optional(op.residual.as_deref())?), regions.optional(gate)?];
        let ([x, residual, z], [d, sums]) = self.memory.parts(read, [regions.range(&op.d)?, regions.optional(sum)?])?;
        let mut args = NormArgs::in_place(d).gamma(gamma);
        args.x = (!is_in_place).then_some(x);
        args.beta = weights.beta;
        args.gate = gate.map(|_| z);
        if sum.is_some() {
            (args.residual, args.sum) = (Some(residual), Some(sums));
        }
        plan.run(self.stream, args)
    }

    fn kv_append(&mut self, plan: &KvAppendPlan) -> Result<(), Error> {
        if self.op.rotation.is_some() {
            let ([], [heads]) = self.memory.parts([], [self.memory.regions.range(&self.op.d)?])?;
            return plan.run(self.stream, KvAppendArgs::in_place(heads));
        }
        let (op, heads, regions) = (self.op, self.op.of_heads()?, self.memory.regions);
        let (table, [k_scales, v_scales]) = heads.table_and_scales();
        let read = [
            regions.optional(heads.new_k.as_deref())?,
            regions.optional(heads.new_v.as_deref())?,
            regions.optional(heads.lengths.as_deref())?,
            regions.optional(table)?,
        ];
        let write = [
            regions.range(&op.x)?,
            regions.range(&heads.k)?,
            regions.range(&heads.v)?,
            regions.optional(k_scales)?,
            regions.optional(v_scales)?,
        ];
        let ([new_k, new_v, lengths, pages], [q, k, v, of_k, of_v]) = self.memory.parts(read, write)?;
        let mut args = KvAppendArgs::new(new_k, new_v, k, v).q(q);
        args.kv_lengths = heads.lengths.is_some().then_some(lengths);
        args.block_table = table.is_some().then_some(pages);
        (args.k_scales, args.v_scales) = (k_scales.map(|_| of_k), v_scales.map(|_| of_v));
        (args.k_factors, args.v_factors) = (self.weights.kv_factors, self.weights.kv_factors);
        let [cos, sin] = self.weights.cos_and_sin.map_or([None; 2], |tables| tables.map(Some));
        (args.cos, args.sin) = (cos, sin);
        if heads.head_norms.is_some() {
            let [q, k] = self.weights.head_gammas.ok_or_else(|| missing("gammas of heads", op))?;
            args = args.gammas(q, k);
        }
        plan.run(self.stream, args)
    }

    fn attention(&mut self, plan: &AttentionPlan) -> Result<(), Error> {
        let (op, heads, regions) = (self.op, self.op.of_heads()?, self.memory.regions);
        let (table, [k_scales, v_scales]) = heads.table_and_scales();
        let read = [
            regions.range(&op.x)?,
            regions.range(&heads.k)?,
            regions.range(&heads.v)?,
            regions.optional(heads.lengths.as_deref())?,
            regions.optional(table)?,
            regions.optional(k_scales)?,
            regions.optional(v_scales)?,
            regions.optional(heads.gate.as_deref())?,
        ];
        let write = [regions.range(&op.d)?, regions.workspace(plan.workspace_bytes())?];
        let ([q, k, v, lengths, pages, of_k, of_v, gate], [d, workspace]) = self.memory.parts(read, write)?;
        let mut args = AttentionArgs::new(q, k, v, d);
        args.kv_lengths = heads.lengths.is_some().then_some(lengths);
        args.block_table = table.is_some().then_some(pages);
        (args.k_scales, args.v_scales) = (k_scales.map(|_| of_k), v_scales.map(|_| of_v));
        (args.k_factors, args.v_factors) = (self.weights.kv_factors, self.weights.kv_factors);
        args.sinks = self.weights.sinks;
        args.gate = heads.gate.is_some().then_some(gate);
        plan.run_within(self.stream, args, Some(workspace))
    }

    fn short_conv(&mut self, plan: &ShortConvPlan) -> Result<(), Error> {
        let (op, of, regions, weights) = (self.op, self.op.of_conv()?, self.memory.regions, self.weights);
        let at = |first: Option<usize>| first.map_or(Ok(0..0), |first| self.columns(first));
        let read = [at(Some(of.first))?, at(of.input_gate)?, at(of.output_gate)?, regions.range(&of.state.indices)?];
        let write = [regions.range(&op.d)?, regions.range(&of.state.region)?];
        let ([x, input_gate, output_gate, slots], [d, state]) = self.memory.parts(read, write)?;
        let kernel = weights.conv.ok_or_else(|| missing("kernel", op))?;
        let mut args = ShortConvArgs::new(x, kernel, d).state(state).slots(slots);
        args.bias = weights.bias;
        args.input_gate = of.input_gate.map(|_| input_gate);
        args.output_gate = of.output_gate.map(|_| output_gate);
        plan.run(self.stream, args)
    }

    fn linear_attention(&mut self, plan: &LinearAttentionPlan) -> Result<(), Error> {
        let (op, of, regions, weights) = (self.op, self.op.of_linear()?, self.memory.regions, self.weights);
        let read = [
            self.columns(of.q)?,
            self.columns(of.k)?,
            self.columns(of.v)?,
            regions.range(&of.step)?,
            regions.optional(of.beta.as_deref())?,
            regions.range(&of.state.indices)?,
        ];
        let workspace = regions.workspace(plan.workspace_bytes())?;
        let write = [regions.range(&of.state.region)?, regions.range(&op.d)?, workspace];
        let ([q, k, v, step, beta, slots], [states, d, workspace]) = self.memory.parts(read, write)?;
        let [a_log, dt_bias] = weights.decay.ok_or_else(|| missing("decay", op))?;
        let mut args = LinearAttentionArgs::new(q, k, v, states, d).made_decay(step, a_log, dt_bias).slots(slots);
        args.beta = of.beta.as_ref().map(|_| beta);
        args.skip = weights.skip;
        plan.run_within(self.stream, args, Some(workspace))
    }

    /// Bytes of X from a column on.
    fn columns(&self, first: usize) -> Result<Range<usize>, Error> {
        let (range, dtype) = (self.memory.regions.range(&self.op.x)?, self.op.x_dtype.parse::<DType>()?);
        let start = range.start.saturating_add(first.saturating_mul(dtype.bytes()));
        Ok(start.min(range.end)..range.end)
    }

    fn optimizer(&mut self, plan: &OptimizerPlan) -> Result<(), Error> {
        let (op, of, regions) = (self.op, self.op.of_optimizer()?, self.memory.regions);
        let read = [regions.range(&op.x)?, regions.range(&of.step)?];
        let write = [regions.range(&op.d)?, regions.range(&of.moment1)?, regions.range(&of.moment2)?];
        let ([gradient, step], [weights, moment1, moment2]) = self.memory.parts(read, write)?;
        plan.run(self.stream, OptimizerArgs::new(weights, gradient, step).moment1(moment1).moment2(moment2))
    }

    fn sampling(&mut self, plan: &SamplingPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let read = [regions.range(&op.x)?, regions.optional(op.parameters.as_deref())?];
        let write = [regions.range(&op.d)?, regions.optional(op.status.as_deref())?];
        let ([logits, parameters], [ids, status]) = self.memory.parts(read, write)?;
        plan.run(self.stream, SamplingArgs::new(logits, parameters, ids, status))
    }

    fn collective(&mut self, ctx: &Context, collective: &Collective) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        // In place, X has an empty range.
        let is_in_place = op.x == op.d;
        let x = if is_in_place { 0..0 } else { regions.range(&op.x)? };
        let ([x], [d]) = self.memory.parts([x], [regions.range(&op.d)?])?;
        ctx.submit(self.stream, collective, (!is_in_place).then_some(x), d)
    }

    fn gather_rows(&mut self, plan: &GatherRowsPlan) -> Result<(), Error> {
        let (op, regions) = (self.op, self.memory.regions);
        let table = self.weights.weight(op)?;
        let write = [regions.range(&op.d)?, regions.optional(op.status.as_deref())?];
        let ([ids], [d, status]) = self.memory.parts([regions.range(&op.x)?], write)?;
        plan.run(self.stream, GatherRowsArgs::new(table, ids, d, status))
    }
}

impl<'a> OpWeights<'a> {
    fn weight(&self, op: &PlannedOp) -> Result<&'a Weight, Error> {
        self.weight.ok_or_else(|| missing("weight", op))
    }

    fn experts(&self, op: &PlannedOp) -> Result<&'a Experts, Error> {
        self.experts.ok_or_else(|| missing("weights of experts", op))
    }
}

fn missing(what: &'static str, op: &PlannedOp) -> Error {
    Error::MissingWeight { what, op: op.op_id.clone() }
}

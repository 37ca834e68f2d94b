//! [`Context::plan_model`]: from a model file to a plan.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use qgemm_formats::{DType, FormatError};
use qgemm_hal::{Activation, DeviceKind, XPrecision};

use super::architecture::{LayerTensors, Matrix, Network, NormTensors, fingerprint, network};
use super::backward::Taped;
use super::file::{
    Barrier, BarrierKind, EXEC_SCHEMA, ExecPlan, ModelRecord, Phase, PhaseRange, PlannedOp, PlannedWeight, RegionKind,
    Runtime, RuntimeMode,
};
use super::layout::{Wanted, place};
use super::operands::WORD;
use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::model::{config_of, open_model};
use crate::operand::check_dimension;
use crate::record::{DeviceRecord, PlanRecord, Sizes};

/// What [`Context::plan_model`] plans for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Tokens of a step.
    pub batch: usize,
    /// Sequences that these are of, in equal parts. Unless stated, each token is of a sequence of its own, and of encoders and in training
    /// all are of one.
    pub sequences: Option<usize>,
    /// Keys that the KV cache has room for, of each sequence. Unless stated, as many as the model is made for, at most 4096.
    pub context: Option<usize>,
    /// Type of the activations; logits are f32.
    pub x_dtype: DType,
    /// How far activations may be rounded.
    pub x_precision: XPrecision,
    /// With the gradients of a training step, and what an optimizer with two moments keeps.
    pub train: bool,
}

impl PlanOptions {
    /// A step of `batch` tokens, with activations in f16.
    pub fn new(batch: usize) -> Self {
        let (sequences, context, x_precision) = (None, None, XPrecision::default());
        Self { batch, sequences, context, x_dtype: DType::F16, x_precision, train: false }
    }
}

/// Keys of a sequence that there is room for, at most, unless more are asked for.
const MOST_CONTEXT: usize = 4096;
/// What the caller's last step comes before.
const END: &str = "end";
/// Bytes that the status of products with experts has.
const EXPERTS_STATUS_BYTES: usize = 8;

impl Context {
    /// Plans one step of the model at `path`: every operation of every layer, and where everything lies. Needs the file's table of
    /// contents and this context's device or a description of one; loads no weight and compiles nothing.
    ///
    /// Architectures: llama, qwen3, qwen3moe and bert, from GGUF or safetensors.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`], [`Error::IncompleteModel`], or what opening the model or planning a product fails with.
    pub fn plan_model(&self, path: impl AsRef<Path>, options: &PlanOptions) -> Result<ExecPlan, Error> {
        check_dimension("batch", options.batch)?;
        if options.batch == 0 {
            return Err(Error::OutOfRange { name: "batch", least: 1, most: u32::MAX as usize, got: 0 });
        }
        let path = path.as_ref();
        let model = open_model(path)?;
        let config = config_of(path)?;
        let network = network(&model, config.as_ref().map(|file| file.contents.as_str()))?;
        let info = self.info();
        let _span = tracing::info_span!("plan model", layers = network.layers.len(), batch = options.batch).entered();
        let (sequences, context) = sequences(options, &network)?;
        let mut builder = Builder {
            ctx: self,
            options,
            sequences,
            context,
            network: &network,
            planned: HashMap::new(),
            out: Steps::default(),
            tape: Vec::new(),
        };
        builder.network()?;
        let Steps { ops, barriers, wanted, .. } = builder.out;
        if ops.is_empty() {
            return Err(Error::IncompleteModel { what: "it has no layers".into() });
        }
        let phases = [Phase::Forward, Phase::Backward].into_iter().filter_map(|phase| PhaseRange::of(phase, &ops));
        let phases = phases.collect();
        let memory = place(wanted.into_values().collect()).ok_or_else(too_large)?;
        Ok(ExecPlan {
            schema: EXEC_SCHEMA.into(),
            runtime: Runtime {
                device: DeviceRecord::of(info),
                threads: if info.id.kind == DeviceKind::Cpu { info.units } else { 1 },
                mode: RuntimeMode::Deterministic,
            },
            model: ModelRecord {
                architecture: network.architecture.to_owned(),
                layers: network.layers.len(),
                batch: options.batch,
                sequences,
                context,
                tensors: fingerprint(&model),
            },
            ops,
            barriers,
            phases,
            memory,
        })
    }
}

/// Sequences of a step, and how many keys each has room for.
fn sequences(options: &PlanOptions, network: &Network) -> Result<(usize, usize), Error> {
    let PlanOptions { batch, train, .. } = *options;
    let decodes = network.pre_norm && !train;
    let sequences = options.sequences.unwrap_or(if decodes { batch } else { 1 });
    if sequences == 0 || !batch.is_multiple_of(sequences) {
        return Err(Error::UnevenSequences { batch, sequences });
    }
    let each = batch / sequences;
    if !decodes {
        return Ok((sequences, each));
    }
    let context =
        options.context.unwrap_or_else(|| network.context.map_or(MOST_CONTEXT, |n| n.min(MOST_CONTEXT)).max(each));
    check_dimension("context", context)?;
    match context < each {
        true => Err(Error::OutOfRange { name: "context", least: each, most: u32::MAX as usize, got: context }),
        false => Ok((sequences, context)),
    }
}

pub(super) fn too_large() -> Error {
    FormatError::Overflow { what: "an arena".into(), dims: Vec::new() }.into()
}

/// What has been planned so far.
#[derive(Default)]
pub(super) struct Steps {
    ops: Vec<PlannedOp>,
    barriers: Vec<Barrier>,
    wanted: BTreeMap<String, Wanted>,
    /// The operation that wrote a region last.
    pub writers: HashMap<String, String>,
}

impl Steps {
    /// That the operation which comes next uses a region.
    pub fn uses(&mut self, name: &str, kind: RegionKind, bytes: usize) {
        let op = self.ops.len();
        let wanted = self.wanted.entry(name.to_owned()).or_insert_with(|| Wanted {
            name: name.to_owned(),
            kind,
            bytes,
            first_op: op,
            last_op: op,
        });
        wanted.last_op = op;
        wanted.bytes = wanted.bytes.max(bytes);
    }
}

pub(super) struct Builder<'a> {
    pub ctx: &'a Context,
    pub options: &'a PlanOptions,
    pub network: &'a Network,
    /// Sequences of a step, and keys that each has room for.
    pub sequences: usize,
    pub context: usize,
    /// Records by what decides them: layers are alike.
    pub planned: HashMap<String, PlanRecord>,
    pub out: Steps,
    /// What the backward phase goes back over; nothing unless there is one.
    pub tape: Vec<Taped>,
}

/// One product to plan.
pub(super) struct Product<'p> {
    pub op_id: String,
    pub matrix: &'p Matrix,
    /// The up of a gated pair, whose gate is the matrix.
    pub up: Option<&'p Matrix>,
    pub x: Buffer,
    pub d: Buffer,
    pub residual: Option<Buffer>,
    pub activation: Activation,
    pub routed: Option<Routed<'p>>,
}

/// How rows are given to experts.
pub(super) struct Routed<'p> {
    pub experts: usize,
    pub top_k: usize,
    pub index: Index<'p>,
}

/// What says which rows are whose.
#[derive(Clone, Copy)]
pub(super) enum Index<'p> {
    /// Ids of each token's slots, and its router weights, where the slots are added up.
    Ids(&'p str, Option<&'p str>),
    /// Offsets of rows that are sorted by expert.
    Offsets(&'p str),
}

impl<'p> Index<'p> {
    fn ids(self) -> Option<&'p str> {
        if let Self::Ids(ids, _) = self { Some(ids) } else { None }
    }

    fn weights(self) -> Option<&'p str> {
        if let Self::Ids(_, weights) = self { weights } else { None }
    }

    fn offsets(self) -> Option<&'p str> {
        if let Self::Offsets(offsets) = self { Some(offsets) } else { None }
    }
}

/// A matrix that is read or written: a region of `rows` rows.
#[derive(Clone)]
pub(super) struct Buffer {
    pub name: String,
    pub kind: RegionKind,
    pub rows: usize,
    pub columns: usize,
    pub dtype: DType,
}

impl Buffer {
    pub fn bytes(&self) -> Result<usize, Error> {
        let values = self.rows.checked_mul(self.columns);
        values.and_then(|values| values.checked_mul(self.dtype.bytes())).ok_or_else(too_large)
    }
}

impl Builder<'_> {
    fn network(&mut self) -> Result<(), Error> {
        let network = self.network;
        let Some(first) = network.layers.first() else { return Ok(()) };
        let mut hidden = self.activation("hidden.0", first.q.k);
        let mut made = self.inputs();
        if network.pre_norm {
            made.insert(0, hidden.clone());
            self.step("embedding lookup", &hidden.name, &[], &made)?;
        } else {
            let embedded = self.activation("embeddings", first.q.k);
            self.step("embedding lookup", &embedded.name, &[], std::slice::from_ref(&embedded))?;
            hidden = self.norm("embedding_norm".into(), &network.outer_norm, &embedded, hidden)?;
        }
        for (i, layer) in network.layers.iter().enumerate() {
            hidden = self.layer(i, layer, hidden)?;
        }
        if let Some(head) = &network.head {
            let normed = self.activation("output_norm", head.k);
            let x = self.norm("output_norm".into(), &network.outer_norm, &hidden, normed)?;
            let d = Buffer { dtype: DType::F32, ..self.activation("logits", head.n) };
            self.product(Product::new("output", head, x, d.clone()))?;
            if !self.options.train {
                self.step("sampling", &d.name, std::slice::from_ref(&d), &[])?;
            }
        }
        if self.options.train {
            self.backward()?;
        }
        let last = self.out.ops.len().saturating_sub(1);
        for wanted in self.out.wanted.values_mut() {
            // These live from the first operation to the last, whichever use them.
            if matches!(
                wanted.kind,
                RegionKind::Weight | RegionKind::Workspace | RegionKind::KvCache | RegionKind::OptimizerState
            ) {
                (wanted.first_op, wanted.last_op) = (0, last);
            }
            // What the caller does at the end still belongs to the last one.
            (wanted.first_op, wanted.last_op) = (wanted.first_op.min(last), wanted.last_op.min(last));
        }
        for barrier in self.out.barriers.iter_mut().filter(|barrier| barrier.before.is_empty()) {
            barrier.before = END.into();
        }
        Ok(())
    }

    /// A layer on `hidden`; returns what the next one begins with.
    fn layer(&mut self, i: usize, layer: &LayerTensors, hidden: Buffer) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let pre_norm = self.network.pre_norm;
        let [before, behind] = &layer.norms;
        let normed = |builder: &mut Self, name: &str, of: &NormTensors, x: Buffer| match pre_norm {
            true => {
                let d = builder.activation(&id(name), x.columns);
                builder.norm(id(name), of, &x, d)
            }
            false => Ok(x),
        };
        let x = normed(self, "attn_norm", before, hidden.clone())?;
        let qkv = [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)].map(|(role, m)| self.activation(&id(role), m.n));
        for ((role, matrix), d) in
            [("attn_q", &layer.q), ("attn_k", &layer.k), ("attn_v", &layer.v)].into_iter().zip(&qkv)
        {
            self.product(Product::new(id(role), matrix, x.clone(), d.clone()))?;
        }
        let attended = self.attention(i, layer, qkv)?;
        let d = self.activation(&id("attn_residual"), layer.o.n);
        let product = Product::new(id("attn_output"), &layer.o, attended, d.clone());
        self.product(Product { residual: Some(hidden), ..product })?;
        let residual = match pre_norm {
            true => d,
            // The norm that follows makes what the feed-forward part and its residual begin with.
            false => {
                let normed = self.activation(&id("attn_norm"), d.columns);
                self.norm(id("attn_norm"), before, &d, normed)?
            }
        };
        let x = normed(self, "ffn_norm", behind, residual.clone())?;
        let out = self.feed_forward(i, &layer.feed_forward, x, residual)?;
        match pre_norm {
            true => Ok(out),
            false => {
                let name = format!("hidden.{}", i + 1);
                let normed = self.activation(&name, out.columns);
                self.norm(id("ffn_norm"), behind, &out, normed)
            }
        }
    }

    /// An activation of the batch.
    pub fn activation(&self, name: &str, columns: usize) -> Buffer {
        let PlanOptions { batch, x_dtype, .. } = *self.options;
        Buffer { name: name.to_owned(), kind: RegionKind::Activation, rows: batch, columns, dtype: x_dtype }
    }

    /// Work of the caller's before the next operation, which makes one buffer of others.
    pub fn caller(
        &mut self,
        what: &str,
        step: &str,
        reads: &[Buffer],
        makes: impl FnOnce(&Self) -> Buffer,
    ) -> Result<Buffer, Error> {
        let made = makes(self);
        self.step(step, what, reads, std::slice::from_ref(&made))?;
        if self.options.train {
            let (what, step, reads) = (what.to_owned(), step.to_owned(), reads.to_vec());
            let kept = Vec::new();
            self.tape.push(Taped::Caller { what, step, reads, kept, made: made.clone() });
        }
        Ok(made)
    }

    /// Work of the caller's before the next operation.
    pub fn step(&mut self, step: &str, what: &str, reads: &[Buffer], writes: &[Buffer]) -> Result<(), Error> {
        self.step_because(step, what, reads, writes, reason(step))
    }

    /// The same, for this reason.
    pub fn step_because(
        &mut self,
        step: &str,
        what: &str,
        reads: &[Buffer],
        writes: &[Buffer],
        reason: &str,
    ) -> Result<(), Error> {
        for buffer in reads.iter().chain(writes) {
            self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
        }
        let mut after: Vec<String> =
            reads.iter().filter_map(|buffer| self.out.writers.get(&buffer.name).cloned()).collect();
        after.dedup();
        self.out.barriers.push(Barrier {
            // Named when the operation is known.
            before: String::new(),
            after,
            kind: BarrierKind::Caller,
            step: Some(format!("{step}: {what}")),
            reason: Some(reason.to_owned()),
            reads: reads.iter().map(|buffer| buffer.name.clone()).collect(),
            writes: writes.iter().map(|buffer| buffer.name.clone()).collect(),
        });
        Ok(())
    }

    /// That the caller's last step writes another region, too.
    pub fn writes_too(&mut self, region: &str) {
        if let Some(barrier) = self.out.barriers.last_mut() {
            barrier.writes.push(region.to_owned());
        }
    }

    pub fn product(&mut self, product: Product<'_>) -> Result<(), Error> {
        let Product { op_id, matrix, up, x, d, residual, activation, routed } = product;
        let described = describe(self.ctx, matrix, up.is_some())?;
        let bias = match (&matrix.bias, up, &routed) {
            (Some(bias), None, None) => Some(bias.clone()),
            // Biases of pairs and of experts would have to be put together first.
            (Some((name, _)), ..) => {
                return Err(Error::IncompleteModel { what: format!("{name}: no plan for biases of pairs or experts") });
            }
            (None, ..) => None,
        };
        let state = |problem: crate::Problem| {
            let problem = problem.x_dtype(x.dtype).d_dtype(d.dtype).x_precision(self.options.x_precision);
            let problem = problem.activation(activation);
            let problem = bias.iter().fold(problem, |problem, (_, dtype)| problem.bias(*dtype));
            residual.iter().fold(problem, |problem, residual| problem.residual(residual.dtype))
        };
        let batch = self.options.batch;
        let ctx = self.ctx;
        let (record, bytes) = match &routed {
            None => {
                let problem = state(described.problem(batch));
                (known(&mut self.planned, format!("{problem:?}"), || ctx.explain(&problem))?, described.bytes())
            }
            Some(Routed { experts, top_k, index }) => {
                let experts = described.experts(*experts)?;
                let problem = match index {
                    Index::Ids(_, None) => experts.indexed(batch, *top_k).each(state),
                    Index::Ids(_, Some(_)) => experts.indexed(batch, *top_k).each(state).x_per_slot().combined(),
                    Index::Offsets(_) => experts.contiguous(x.rows).each(state),
                };
                (known(&mut self.planned, format!("{problem:?}"), || ctx.explain_experts(&problem))?, experts.bytes())
            }
        };
        let weight = PlannedWeight {
            region: format!("{op_id}.weight"),
            tensors: [Some(matrix), up].into_iter().flatten().map(|matrix| matrix.tensor.clone()).collect(),
            format: matrix.format.name.to_owned(),
            layout: format!("{:?}", described.shape().class),
            gated: up.is_some(),
            row_scale: matrix.row_scale,
            k_order: matrix.k_order,
            experts: routed.as_ref().map(|routed| routed.experts),
            row_bytes: matrix.format.row_bytes(matrix.k),
            bytes,
        };
        self.out.uses(&weight.region, RegionKind::Weight, bytes);
        for buffer in [Some(&x), residual.as_ref()].into_iter().flatten() {
            self.out.uses(&buffer.name, buffer.kind, buffer.bytes()?);
        }
        let bias_region = match &bias {
            None => None,
            Some((name, dtype)) => {
                self.out.uses(name, RegionKind::Weight, matrix.n * dtype.bytes());
                Some(name.clone())
            }
        };
        let status = routed.as_ref().map(|_| format!("{op_id}.status"));
        if let (Some(routed), Some(status)) = (&routed, &status) {
            let slots = batch.checked_mul(routed.top_k * WORD).ok_or_else(too_large)?;
            let words = if routed.index.offsets().is_some() { (routed.experts + 1) * WORD } else { slots };
            let (Index::Ids(index, _) | Index::Offsets(index)) = routed.index;
            self.out.uses(index, RegionKind::Temporary, words);
            routed.index.weights().iter().for_each(|name| self.out.uses(name, RegionKind::Temporary, slots));
            self.out.uses(status, RegionKind::Temporary, EXPERTS_STATUS_BYTES);
        }
        let op = PlannedOp {
            weight: Some(weight),
            bias: bias_region,
            bias_dtype: bias.map(|(_, dtype)| dtype.name().to_owned()),
            residual: residual.as_ref().map(|buffer| buffer.name.clone()),
            ids: routed.as_ref().and_then(|routed| routed.index.ids()).map(str::to_owned),
            offsets: routed.as_ref().and_then(|routed| routed.index.offsets()).map(str::to_owned),
            router_weights: routed.as_ref().and_then(|routed| routed.index.weights()).map(str::to_owned),
            status,
            top_k: routed.as_ref().filter(|routed| routed.index.ids().is_some()).map(|routed| routed.top_k),
            ..op(op_id, [&x, &d], (activation, self.options.x_precision), &record)?
        };
        let index = [op.ids.as_ref(), op.offsets.as_ref(), op.router_weights.as_ref()];
        let reads = [Some(&x.name), residual.as_ref().map(|r| &r.name)].into_iter().chain(index);
        let reads: Vec<String> = reads.flatten().cloned().collect();
        if let (true, Some(weight)) = (self.options.train, &op.weight) {
            let (op_id, weight, d) = (op.op_id.clone(), Box::new(weight.clone()), d.clone());
            let offsets = op.offsets.clone();
            self.tape.push(Taped::Product { op_id, matrix: matrix.clone(), weight, offsets, x, d, residual });
        }
        self.push(op, &d, &reads)
    }

    /// Adds an operation that reads some regions and writes `d`.
    pub fn push(&mut self, op: PlannedOp, d: &Buffer, reads: &[String]) -> Result<(), Error> {
        self.out.uses(&d.name, d.kind, d.bytes()?);
        if op.workspace_bytes > 0 {
            self.out.uses("workspace", RegionKind::Workspace, op.workspace_bytes);
        }
        for barrier in self.out.barriers.iter_mut().rev().take_while(|barrier| barrier.before.is_empty()) {
            barrier.before.clone_from(&op.op_id);
        }
        let mut after: Vec<String> = reads.iter().filter_map(|name| self.out.writers.get(name).cloned()).collect();
        after.sort();
        after.dedup();
        if !after.is_empty() {
            self.out.barriers.push(Barrier {
                before: op.op_id.clone(),
                after,
                kind: BarrierKind::Stream,
                step: None,
                reason: None,
                reads: Vec::new(),
                writes: Vec::new(),
            });
        }
        self.out.writers.insert(d.name.clone(), op.op_id.clone());
        self.out.ops.push(op);
        Ok(())
    }
}

/// Why a step is the caller's.
fn reason(step: &str) -> &'static str {
    match step {
        "embedding lookup" => "the library has no lookup of rows by tokens, and lengths are the caller's to say",
        "sampling" => "the library has no softmax over a vocabulary, and which token follows is the caller's choice",
        "loss" => "what is trained for is the caller's choice",
        "add" => "the library adds only behind a product or before a norm",
        "sum of rows" => "the library has no sum over tokens",
        "sort rows by expert" => "plans have no operation that gathers rows",
        "sum of slots" => "the library adds up slots only behind a product whose rows are not sorted",
        "store" => "the library makes weights of plain numbers on the host",
        step if step.ends_with("backward") => "the library has no backward pass of it",
        _ => "the library applies functions and multiplies pairs only behind a product",
    }
}

impl<'p> Product<'p> {
    pub fn new(op_id: impl Into<String>, matrix: &'p Matrix, x: Buffer, d: Buffer) -> Self {
        let (activation, op_id) = (Activation::Identity, op_id.into());
        Self { op_id, matrix, up: None, x, d, residual: None, activation, routed: None }
    }
}

impl Matrix {
    /// Whether two weights make a pair.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.format, m.n, m.k, m.k_order, m.bias.is_some());
        shape(self) == shape(other) && !self.k_order
    }
}

/// A weight as plans see it.
pub(super) fn describe(ctx: &Context, matrix: &Matrix, is_pair: bool) -> Result<DescribedWeight, Error> {
    let described = ctx.describe_weight(matrix.format, matrix.n, matrix.k)?;
    let described = if matrix.row_scale { described.row_scaled() } else { described };
    let described = if matrix.k_order { described.permuted() } else { described };
    if is_pair { described.gated() } else { Ok(described) }
}

/// The record of a problem like which there may have been one.
pub(super) fn known(
    planned: &mut HashMap<String, PlanRecord>,
    key: String,
    make: impl FnOnce() -> Result<PlanRecord, Error>,
) -> Result<PlanRecord, Error> {
    if let Some(record) = planned.get(&key) {
        return Ok(record.clone());
    }
    let record = make()?;
    planned.insert(key, record.clone());
    Ok(record)
}

/// What all operations have.
pub(super) fn op(
    op_id: String,
    [x, d]: [&Buffer; 2],
    (activation, x_precision): (Activation, XPrecision),
    record: &PlanRecord,
) -> Result<PlannedOp, Error> {
    let (Some(chosen), Some(kernel_id), Some(source_hash)) =
        (record.chosen(), record.kernel_id.clone(), record.source_hash.clone())
    else {
        let refusals = record.refused.iter().map(|r| format!("{} {}", r.family, r.why)).collect::<Vec<_>>().join("; ");
        return Err(Error::IncompleteModel {
            what: format!("{op_id}: no kernel serves {}: {refusals}", record.problem),
        });
    };
    Ok(PlannedOp {
        op_id,
        phase: Phase::Forward,
        operation: record.operation.clone(),
        kernel_id,
        source_hash,
        shape: record.shape.unwrap_or(Sizes { m: d.rows, n: d.columns, k: x.columns }),
        weight: None,
        x: x.name.clone(),
        x_dtype: x.dtype.name().to_owned(),
        x_precision: x_precision.name().to_owned(),
        b: None,
        b_dtype: None,
        d: d.name.clone(),
        d_dtype: d.dtype.name().to_owned(),
        bias: None,
        bias_dtype: None,
        residual: None,
        ids: None,
        offsets: None,
        products: None,
        router_weights: None,
        status: None,
        activation: activation.name().to_owned(),
        norm: None,
        heads: None,
        optimizer: None,
        top_k: None,
        dispatch: record.dispatch.clone(),
        reduction: record.reduction.clone(),
        prologue: record.prologue.clone(),
        workspace_bytes: record.workspace_bytes,
        workspace: record.workspace.clone(),
        estimate_seconds: chosen.measured_seconds.unwrap_or(chosen.seconds),
        bound: chosen.bound,
        candidates: record.candidates.len(),
        rejected: record.refused.clone(),
    })
}

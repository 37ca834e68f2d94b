//! Plan builder ([`Context::plan_model`]): from a model file to a plan.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use qgemm_formats::DType;
use qgemm_hal::{DeviceKind, KvFormat, XPrecision};

use super::backward::Taped;
use super::file::{
    Barrier, BarrierKind, EXEC_SCHEMA, ExecPlan, ModelRecord, Phase, PhaseRange, PlannedOp, RegionKind, Runtime,
    RuntimeMode,
};
use super::layout::{Wanted, place};
use super::parallel::Part;
use super::product::Product;
use super::ranks::Ranks;
use super::sizes::too_large;
use crate::architecture::{ExpertTensors, FeedForward, LayerTensors, Mixer, Network, NormTensors};
use crate::context::Context;
use crate::error::Error;
use crate::model::open_model;
use crate::operand::check_dimension;
use crate::record::{DeviceRecord, PlanRecord};

/// Options of [`Context::plan_model`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Tokens per step.
    pub batch: usize,
    /// Sequences, with equal shares of the tokens. By default one per token; one in all
    /// for encoders and training.
    pub sequences: Option<usize>,
    /// KV-cache capacity per sequence, in keys. By default the model's
    /// context length, at most 4096.
    pub context: Option<usize>,
    /// Format of keys and values in the cache. By default the type of activations.
    pub kv_format: Option<KvFormat>,
    /// Tokens of a page of the cache, whose block table is an input of the step. By default
    /// each sequence has rows of its own.
    pub page_size: Option<usize>,
    /// Pages of the cache, which plans of other batches share. By default enough for the
    /// capacity of all sequences.
    pub pages: Option<usize>,
    /// Slots of recurrent states, which plans of other batches share. By default one for each
    /// sequence. The slot of each sequence is an input of the step.
    pub slots: Option<usize>,
    /// Hadamard rotation of cached keys and values, which formats of few bits lose less of. A step behind
    /// each attention undoes it on the result. Logits do not change, but for rounding.
    pub rotate_cache: bool,
    /// Element type of activations. Logits, and the residual stream in inference of decoders,
    /// are f32.
    pub x_dtype: DType,
    /// Allowed rounding of activations.
    pub x_precision: XPrecision,
    /// Whether the results of a sequence are independent of the others of its step, to the bit.
    pub batch_invariant: bool,
    /// Whether the head computes logits of all tokens, as in training, instead of each
    /// sequence's last token.
    pub all_logits: bool,
    /// Whether the step samples the next token of each sequence. A decoding step writes it to
    /// its own `tokens`, for the next step; a prompt writes it to `sampled`.
    pub sampling: bool,
    /// Whether to add a training step: gradients and two-moment optimizer state.
    pub train: bool,
    /// Rank whose part of the model is planned. By default that of the context's communicator; the whole
    /// model without one.
    pub ranks: Option<Ranks>,
    /// Expert parallelism: ranks have whole experts each, instead of a slice of every expert.
    pub expert_parallel: bool,
}

impl PlanOptions {
    /// Inference step of `batch` tokens with f16 activations.
    pub fn new(batch: usize) -> Self {
        let (sequences, context, x_precision) = (None, None, XPrecision::default());
        let (kv_format, page_size, pages, slots) = (None, None, None, None);
        Self {
            batch,
            sequences,
            context,
            kv_format,
            page_size,
            pages,
            slots,
            rotate_cache: false,
            x_dtype: DType::F16,
            x_precision,
            batch_invariant: false,
            all_logits: false,
            sampling: false,
            train: false,
            ranks: None,
            expert_parallel: false,
        }
    }
}

/// Maximum default KV-cache capacity per sequence.
const MOST_CONTEXT: usize = 4096;
/// Barrier of the caller's last step.
pub(super) const END: &str = "end";

impl Context {
    /// Plans one step of the model at `path`: all operations of all
    /// layers, and their memory.
    ///
    /// It reads the file's table of contents only. It needs this context's device or
    /// a device description. It loads no weight and compiles nothing.
    ///
    /// [`Network::read`] says which architectures it serves.
    ///
    /// # Errors
    /// Errors of opening the model, of [`Network::read`], and of planning a product.
    pub fn plan_model(&self, path: impl AsRef<Path>, options: &PlanOptions) -> Result<ExecPlan, Error> {
        let path = path.as_ref();
        self.plan_network(&Network::read(&open_model(path)?, path)?, options)
    }

    /// [`Context::plan_model`] for a model whose tables of contents are read already.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for options, and errors of planning a product.
    pub fn plan_network(&self, network: &Network, options: &PlanOptions) -> Result<ExecPlan, Error> {
        check_dimension("batch", options.batch)?;
        if options.batch == 0 {
            return Err(Error::OutOfRange { name: "batch", least: 1, most: u32::MAX as usize, got: 0 });
        }
        for (name, stated) in [("page size", options.page_size), ("slots", options.slots)] {
            if stated == Some(0) {
                return Err(Error::OutOfRange { name, least: 1, most: u32::MAX as usize, got: 0 });
            }
        }
        let info = self.info();
        let _span = tracing::info_span!("plan model", layers = network.layers.len(), batch = options.batch).entered();
        let (sequences, context) = sequences(options, network)?;
        let ranks = self.communicator().map(|group| Ranks { rank: group.rank(), world: group.world() });
        let part = Part::of(network, options.ranks.or(ranks), options.train, options.expert_parallel)?;
        let network = part.network(network);
        let mut builder = Builder {
            ctx: self,
            options,
            sequences,
            context,
            network,
            part: &part,
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
                ranks: part.ranks(),
            },
            model: ModelRecord {
                architecture: network.architecture.to_owned(),
                layers: network.layers.len(),
                batch: options.batch,
                sequences,
                context,
                tensors: network.fingerprint.clone(),
            },
            ops,
            barriers,
            phases,
            memory,
        })
    }
}

/// Sequences of a step, and KV-cache capacity of each.
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

/// Plan under construction.
#[derive(Default)]
pub(super) struct Steps {
    ops: Vec<PlannedOp>,
    barriers: Vec<Barrier>,
    wanted: BTreeMap<String, Wanted>,
    /// Last writer of each region.
    pub writers: HashMap<String, String>,
}

impl Steps {
    /// Records that the next operation uses a region.
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
    /// This rank's part of the network.
    pub part: &'a Part,
    /// Sequences of a step, and KV-cache capacity of each.
    pub sequences: usize,
    pub context: usize,
    /// Records by their inputs, cached: layers are alike.
    pub planned: HashMap<String, PlanRecord>,
    pub out: Steps,
    /// Tape of the backward phase. Empty in inference.
    pub tape: Vec<Taped>,
}

/// Matrix operand: a region of `rows` rows.
#[derive(Clone)]
pub(super) struct Buffer {
    pub name: String,
    pub kind: RegionKind,
    pub rows: usize,
    pub columns: usize,
    pub dtype: DType,
    /// Format of a cache in which elements are not of `dtype`.
    pub kv: Option<KvFormat>,
}

impl Buffer {
    pub fn bytes(&self) -> Result<usize, Error> {
        let bits = self.kv.map_or(8 * self.dtype.bytes(), KvFormat::bits);
        let values = self.rows.checked_mul(self.columns);
        values.and_then(|values| values.checked_mul(bits)).map(|bits| bits / 8).ok_or_else(too_large)
    }
}

/// The residual stream between layers.
pub(super) enum Hidden {
    /// Its rows.
    Rows(Buffer),
    /// The normed result of a part, which the next norm
    /// adds to the rows.
    Addends(Buffer, Buffer),
}

/// Input of a part of a layer.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    /// Rows and the norm before the part. Encoders have it behind.
    Rows(&'a Buffer, &'a NormTensors),
    /// Normed rows, where the norm was an operation of its own.
    Normed(&'a Buffer),
}

impl Builder<'_> {
    fn network(&mut self) -> Result<(), Error> {
        let network = self.network;
        if network.layers.is_empty() {
            return Ok(());
        }
        if self.options.train
            && let Some(what) = network.layers.iter().find_map(untrained)
        {
            return Err(Error::IncompleteModel { what: format!("no training of {what}") });
        }
        let mut hidden = Hidden::Rows(self.embedding(network.hidden)?);
        for (i, layer) in network.layers.iter().enumerate() {
            hidden = self.layer(i, layer, hidden)?;
        }
        self.head(&hidden)?;
        if self.options.train {
            self.backward()?;
        }
        let last = self.out.ops.len().saturating_sub(1);
        for wanted in self.out.wanted.values_mut() {
            // These regions live through all operations, whichever use them.
            if matches!(
                wanted.kind,
                RegionKind::Weight
                    | RegionKind::Workspace
                    | RegionKind::Input
                    | RegionKind::KvCache
                    | RegionKind::RecurrentState
                    | RegionKind::OptimizerState
            ) {
                (wanted.first_op, wanted.last_op) = (0, last);
            }
            // The caller's last step extends the lifetime to the last operation.
            (wanted.first_op, wanted.last_op) = (wanted.first_op.min(last), wanted.last_op.min(last));
        }
        for barrier in self.out.barriers.iter_mut().filter(|barrier| barrier.before.is_empty()) {
            barrier.before = END.into();
        }
        Ok(())
    }

    /// Adds a layer on `hidden`. Returns the input of the next layer.
    fn layer(&mut self, i: usize, layer: &LayerTensors, hidden: Hidden) -> Result<Hidden, Error> {
        match (&layer.post_norms, hidden) {
            (Some(norms), hidden) => self.addends_layer(i, layer, Some(norms), hidden),
            (None, hidden) if self.part.is_one_of_many() => self.addends_layer(i, layer, None, hidden),
            (None, Hidden::Rows(rows)) => Ok(Hidden::Rows(self.residual_layer(i, layer, rows)?)),
            (None, Hidden::Addends(..)) => {
                Err(Error::IncompleteModel { what: format!("layer {i} lacks the second norms of the others") })
            }
        }
    }

    /// Adds a layer whose parts add their result as it is.
    fn residual_layer(&mut self, i: usize, layer: &LayerTensors, hidden: Buffer) -> Result<Buffer, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let pre_norm = self.network.pre_norm;
        let mut rows = hidden;
        if let Some((norm, mixer)) = &layer.mixer {
            let mixed = self.mixed(i, mixer, Input::Rows(&rows, norm))?;
            let (prefix, o) = (mixer.name(), mixer.output());
            let d = self.hidden(&id(&format!("{prefix}_residual")), o.n);
            let product = Product::new(id(&format!("{prefix}_output")), o, mixed, d.clone());
            self.product(Product { residual: Some(rows), ..product })?;
            rows = match pre_norm {
                true => d,
                // The following norm makes the input and the residual of the feed-forward part.
                false => {
                    let normed = self.activation(&id("attn_norm"), d.columns);
                    self.norm(id("attn_norm"), norm, &d, normed)?
                }
            };
        }
        let Some((norm, part)) = &layer.feed_forward else { return Ok(rows) };
        let out = self.feed_forward(i, part, pre_norm.then_some(norm), rows.clone(), Some(rows))?;
        match pre_norm {
            true => Ok(out),
            false => {
                let name = format!("hidden.{}", i + 1);
                let normed = self.activation(&name, out.columns);
                self.norm(id("ffn_norm"), norm, &out, normed)
            }
        }
    }

    /// Adds a token mixer without its output projection.
    pub(super) fn mixed(&mut self, i: usize, mixer: &Mixer, input: Input<'_>) -> Result<Buffer, Error> {
        match mixer {
            Mixer::Attention(tensors) => self.attention(i, tensors, input),
            Mixer::ShortConv(tensors) => self.short_conv(i, tensors, input),
            Mixer::Linear(tensors) => self.linear_attention(i, tensors, input),
        }
    }

    /// Activation of the batch.
    pub fn activation(&self, name: &str, columns: usize) -> Buffer {
        let PlanOptions { batch, x_dtype, .. } = *self.options;
        Buffer { name: name.to_owned(), kind: RegionKind::Activation, rows: batch, columns, dtype: x_dtype, kv: None }
    }

    /// Residual stream of the batch: f32 in inference of decoders.
    pub fn hidden(&self, name: &str, columns: usize) -> Buffer {
        let activation = self.activation(name, columns);
        let dtype = if self.network.pre_norm && !self.options.train { DType::F32 } else { activation.dtype };
        Buffer { dtype, ..activation }
    }

    /// Caller's step before the next operation, from some buffers to one.
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

    /// Caller's step before the next operation.
    pub fn step(&mut self, step: &str, what: &str, reads: &[Buffer], writes: &[Buffer]) -> Result<(), Error> {
        self.step_because(step, what, reads, writes, reason(step))
    }

    /// Caller's step with this reason.
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
            // Set when the operation is known.
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

    /// Adds a written region to the caller's last step.
    pub fn writes_too(&mut self, region: &str) {
        if let Some(barrier) = self.out.barriers.last_mut() {
            barrier.writes.push(region.to_owned());
        }
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

/// Part of a layer that no backward phase is planned for.
fn untrained(layer: &LayerTensors) -> Option<&'static str> {
    let (mixer, part) = (layer.mixer.as_ref(), layer.feed_forward.as_ref());
    let attention = match mixer {
        Some((_, Mixer::Attention(attention))) => Some(attention),
        _ => None,
    };
    let experts = match part {
        Some((_, FeedForward::Experts(experts))) => Some(experts),
        _ => None,
    };
    let has_bias = |of: &ExpertTensors| [&of.gate, &of.up, &of.down].iter().any(|m| m.bias.is_some());
    let parts = [
        (layer.post_norms.is_some(), "layers with second norms"),
        (part.is_none() || attention.is_none(), "recurrent layers, nor of layers with one part"),
        (attention.is_some_and(|of| of.sinks.is_some()), "attention sinks"),
        (attention.is_some_and(|of| of.gate.is_some()), "gated attention"),
        (experts.is_some_and(has_bias), "biases of experts"),
        (experts.is_some_and(|of| of.shared.is_some()), "shared experts"),
    ];
    parts.into_iter().find(|(has, _)| *has).map(|(_, what)| what)
}

/// Reason why a step is the caller's.
fn reason(step: &str) -> &'static str {
    match step {
        "inputs" => "which tokens come, and how many keys there are, is the caller's to say",
        "embedding lookup" => "the library adds no rows of several tables",
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

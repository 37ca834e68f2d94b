//! What a plan file holds: the schemas `qgemm.exec.v1` and, within it, `qgemm.memory.v1` (`docs/`).

use qgemm_sched::Bound;
use serde::{Deserialize, Serialize};

use super::operands::{PlannedHeads, PlannedNorm, PlannedOptimizer};
use crate::record::{DeviceRecord, Dispatch, PrologueRecord, Reduction, RefusalRecord, Sizes, WorkspaceRegion};

/// Schema of an execution plan.
pub(super) const EXEC_SCHEMA: &str = "qgemm.exec.v1";
/// Schema of the memory plan within it.
pub(super) const MEMORY_SCHEMA: &str = "qgemm.memory.v1";

/// Every operation of qgemm in one step of a model, in order, with the memory that they work in. Made by
/// [`Context::plan_model`](crate::Context::plan_model), read by [`Context::load_plan`](crate::Context::load_plan).
///
/// What the library has no operation for (looking up embeddings, drawing tokens; of training the loss and the backward passes of norms and
/// attention) is the caller's: barriers say where, why, and what it reads and writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExecPlan {
    /// `qgemm.exec.v1`.
    pub schema: String,
    /// Where it runs, and how.
    pub runtime: Runtime,
    /// The model that it is of.
    pub model: ModelRecord,
    /// The operations in order.
    pub ops: Vec<PlannedOp>,
    /// What each operation waits for.
    pub barriers: Vec<Barrier>,
    /// Phases of the step, each a range of operations.
    pub phases: Vec<PhaseRange>,
    /// Where everything lies.
    pub memory: MemoryPlan,
}

/// Where a plan runs, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Runtime {
    /// The device.
    pub device: DeviceRecord,
    /// Threads that the host works with: cores of a processor; 1 where a device does the work.
    pub threads: u32,
    /// Whether bits are the same in every run.
    pub mode: RuntimeMode,
}

/// Whether bits are the same in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RuntimeMode {
    /// They are, on one device.
    Deterministic,
    /// They may differ. No plan of ours is such a one today.
    NotDeterministic,
}

/// The model that a plan is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelRecord {
    /// Architecture: `llama`, `qwen3`, `qwen3moe`, `bert`.
    pub architecture: String,
    /// Layers.
    pub layers: usize,
    /// Tokens of a step.
    pub batch: usize,
    /// Sequences that these are of, in equal parts.
    pub sequences: usize,
    /// Keys that each sequence has room for.
    pub context: usize,
    /// SHA-256 of the names, kinds, shapes and sizes of all tensors, in hexadecimal digits.
    pub tensors: String,
}

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// From tokens to logits.
    Forward,
    /// From gradients of the outputs to those of weights and inputs.
    Backward,
}

/// The operations of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseRange {
    /// The phase.
    pub phase: Phase,
    /// Its first operation.
    pub first: String,
    /// Its last operation; the phase ends when that is done.
    pub last: String,
}

impl PhaseRange {
    /// The operations of a phase among all of them.
    pub(super) fn of(phase: Phase, ops: &[PlannedOp]) -> Option<Self> {
        let mut ids = ops.iter().filter(|op| op.phase == phase).map(|op| op.op_id.clone());
        let first = ids.next()?;
        let last = ids.next_back().unwrap_or_else(|| first.clone());
        Some(Self { phase, first, last })
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedOp {
    /// Name, unique in the plan: `blk.0.attn_q`.
    pub op_id: String,
    /// Its phase.
    pub phase: Phase,
    /// `gemm`, `experts`, `routing`, `norm`, `kv_append` or `attention`; of the backward phase `gradient`, dX of a weight, `matmul`, dW, or
    /// `optimizer`.
    pub operation: String,
    /// Identity of the kernel.
    pub kernel_id: String,
    /// Hash of the kernel's sources, in hexadecimal digits.
    pub source_hash: String,
    /// Tokens (of experts, slots), output and input features, which change places in `gradient`; of routing tokens, experts and experts of
    /// a token; of `matmul` output and input features, and tokens; of norms rows and columns; of attention and the KV cache tokens, features
    /// of the result (of a key), and features of queries; of the optimizer rows and columns.
    pub shape: Sizes,
    /// The weight, where there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub weight: Option<PlannedWeight>,
    /// Region of the activations; of the backward phase, of the gradient by the output.
    pub x: String,
    /// Their element type.
    pub x_dtype: String,
    /// How far they may be rounded.
    pub x_precision: String,
    /// Region of the second factor of `matmul`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub b: Option<String>,
    /// Its element type.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub b_dtype: Option<String>,
    /// Region of the output.
    pub d: String,
    /// Its element type.
    pub d_dtype: String,
    /// Region of the bias.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bias: Option<String>,
    /// Its element type.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bias_dtype: Option<String>,
    /// Region of the residual, which has the type of the output; that itself where `gradient` adds to what is there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub residual: Option<String>,
    /// Region of the experts' ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ids: Option<String>,
    /// Region of the offsets of rows that are sorted by expert: u32 each, one more than experts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub offsets: Option<String>,
    /// Of `matmul`: products, one an expert, each of its rows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub products: Option<usize>,
    /// Region of the router's weights.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub router_weights: Option<String>,
    /// Region of the status.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub status: Option<String>,
    /// Of `norm`: what becomes of a row.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub norm: Option<PlannedNorm>,
    /// Of `kv_append` and `attention`: sequences and heads.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub heads: Option<PlannedHeads>,
    /// Of `optimizer`: its numbers.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub optimizer: Option<PlannedOptimizer>,
    /// Function in the epilogue: `silu`.
    pub activation: String,
    /// Experts of a token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub top_k: Option<usize>,
    /// How the work is shared; absent of operations without a kernel of their own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub dispatch: Option<Dispatch>,
    /// How partial sums come together; absent of operations without sums over CTAs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reduction: Option<Reduction>,
    /// The launch that makes the kernel's X.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub prologue: Option<PrologueRecord>,
    /// Bytes of the workspace that it uses.
    pub workspace_bytes: usize,
    /// What lies where in it.
    pub workspace: Vec<WorkspaceRegion>,
    /// Seconds that it should take.
    pub estimate_seconds: f64,
    /// What takes longest.
    pub bound: Bound,
    /// Candidates that were weighed.
    pub candidates: usize,
    /// Families that do not serve it.
    pub rejected: Vec<RefusalRecord>,
}

/// The weight of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedWeight {
    /// Its region, named like the operation's tensors.
    pub region: String,
    /// Tensors of the model: one, or gate and up; of experts that are stored one by one, those of the first.
    pub tensors: Vec<String>,
    /// Format.
    pub format: String,
    /// Layout on the device.
    pub layout: String,
    /// Whether it is a gated pair.
    pub gated: bool,
    /// Whether rows have factors.
    pub row_scale: bool,
    /// Whether columns are permuted (act-order).
    pub k_order: bool,
    /// Experts, where it is a layer of them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub experts: Option<usize>,
    /// Bytes from one stored row to the next.
    pub row_bytes: usize,
    /// Bytes on the device.
    pub bytes: usize,
}

/// What an operation waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Barrier {
    /// The operation that waits, or `end` of the step.
    pub before: String,
    /// Those that it waits for; none at the beginning of a step.
    pub after: Vec<String>,
    /// Who fulfils it.
    pub kind: BarrierKind,
    /// Of the caller's work: what it is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub step: Option<String>,
    /// Of the caller's work: why it is that.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// Regions that the caller's work reads.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub reads: Vec<String>,
    /// Regions that it writes.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub writes: Vec<String>,
}

/// Who fulfils a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BarrierKind {
    /// The order of one stream.
    Stream,
    /// Work of the caller's that lies between, on the same stream.
    Caller,
}

/// One arena for all that the operations of a step work on.
///
/// Two regions share bytes only where their lives do not overlap. Behind each lies its canary, `canary_bytes` or a little more up to
/// the next multiple of `alignment`, which is the region's own as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// `qgemm.memory.v1`.
    pub schema: String,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// Where weights end and what changes begins. Who loads weights into memory of their own allocates from here on.
    pub weights_end: usize,
    /// What every region begins at a multiple of.
    pub alignment: usize,
    /// Fewest bytes of a canary.
    pub canary_bytes: usize,
    /// Value of these bytes.
    pub canary_value: u8,
    /// Bytes that regions would take without sharing any.
    pub bytes_without_reuse: usize,
    /// The regions, in the order of their offsets.
    pub regions: Vec<Region>,
}

/// Bytes of an arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Region {
    /// Name, unique in the plan.
    pub name: String,
    /// What it is for.
    pub kind: RegionKind,
    /// First byte.
    pub offset: usize,
    /// Bytes, exactly.
    pub bytes: usize,
    /// Bytes with the canary behind them.
    pub reserved: usize,
    /// Place among the operations of the first that reads or writes it, or before which the caller writes it.
    pub first_op: usize,
    /// Place of the last.
    pub last_op: usize,
}

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RegionKind {
    /// Weights and biases, for the whole life of the arena.
    Weight,
    /// What layers hand to one another.
    Activation,
    /// What is used within a layer by qgemm alone.
    Temporary,
    /// What the caller says of a step: lengths of sequences, numbers of an optimizer.
    Input,
    /// Keys and values of earlier steps, which stay from step to step.
    KvCache,
    /// Partial sums, counters and converted activations, zeroed before the first operation.
    Workspace,
    /// Of training: gradients of weights.
    Gradient,
    /// Of training: gradients of activations.
    GradientActivation,
    /// Of training: what the optimizer keeps.
    OptimizerState,
}

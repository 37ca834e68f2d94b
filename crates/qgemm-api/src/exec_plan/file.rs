//! Plan file: the schemas `qgemm.exec.v1` and, within it, `qgemm.memory.v1` (`docs/`).

use qgemm_sched::Bound;
use serde::{Deserialize, Serialize};

use super::operands::{PlannedHeads, PlannedNorm, PlannedOptimizer, PlannedRotation, PlannedSegment};
use super::ranks::{PlannedShard, Ranks};
use super::recurrent::{PlannedConv, PlannedLinear};
use crate::record::{DeviceRecord, Dispatch, PrologueRecord, Reduction, RefusalRecord, Sizes, WorkspaceRegion};

/// Schema of an execution plan.
pub(super) const EXEC_SCHEMA: &str = "qgemm.exec.v1";
/// Schema of the memory plan within it.
pub(super) const MEMORY_SCHEMA: &str = "qgemm.memory.v1";

/// Execution plan: all qgemm operations of one step of a model, in
/// order, with their memory.
///
/// [`Context::plan_model`](crate::Context::plan_model) makes it,
/// [`Context::load_plan`](crate::Context::load_plan) reads it.
///
/// Steps without an operation in the library are the caller's: inputs, sampling, and
/// in training the loss and the backward passes of norms and attention.
/// Barriers state their position, reason, inputs and outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExecPlan {
    /// `qgemm.exec.v1`.
    pub schema: String,
    /// Device and mode.
    pub runtime: Runtime,
    /// Model.
    pub model: ModelRecord,
    /// Operations in order.
    pub ops: Vec<PlannedOp>,
    /// Dependencies of operations.
    pub barriers: Vec<Barrier>,
    /// Phases of the step, each a range of operations.
    pub phases: Vec<PhaseRange>,
    /// Memory plan.
    pub memory: MemoryPlan,
}

/// Device and mode of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Runtime {
    /// Device.
    pub device: DeviceRecord,
    /// Host threads: the cores of a CPU, or 1 for other devices.
    pub threads: u32,
    /// Reproducibility of results.
    pub mode: RuntimeMode,
    /// Rank whose part of the model it is. Absent for the whole model.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ranks: Option<Ranks>,
}

/// Reproducibility of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RuntimeMode {
    /// Bit-identical in every run on one device.
    Deterministic,
    /// Run-to-run differences are possible. No current plan has them.
    NotDeterministic,
}

/// Model of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelRecord {
    /// Architecture: `llama`, `qwen3`, `bert`.
    pub architecture: String,
    /// Number of layers.
    pub layers: usize,
    /// Tokens per step.
    pub batch: usize,
    /// Sequences, with equal shares of the tokens.
    pub sequences: usize,
    /// KV-cache capacity per sequence, in keys.
    pub context: usize,
    /// Fingerprint: SHA-256 of names, kinds, shapes and sizes of all
    /// tensors, in hexadecimal.
    pub tensors: String,
}

/// Phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// Forward, from tokens to logits.
    Forward,
    /// Backward, from output gradients to those of weights and inputs.
    Backward,
}

/// Operations of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseRange {
    /// Phase.
    pub phase: Phase,
    /// First operation.
    pub first: String,
    /// Last operation, which ends the phase.
    pub last: String,
}

impl PhaseRange {
    /// Range of a phase in the list of operations.
    pub(super) fn of(phase: Phase, ops: &[PlannedOp]) -> Option<Self> {
        let mut ids = ops.iter().filter(|op| op.phase == phase).map(|op| op.op_id.clone());
        let first = ids.next()?;
        let last = ids.next_back().unwrap_or_else(|| first.clone());
        Some(Self { phase, first, last })
    }
}

/// Planned operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedOp {
    /// Name, unique in the plan: `blk.0.attn_q`.
    pub op_id: String,
    /// Phase.
    pub phase: Phase,
    /// Operation: `gather_rows`, `gemm`, `experts`, `routing`, `norm`, `kv_append`,
    /// `attention`, `short_conv`, `linear_attention` or `sampling`; on several ranks also `all_reduce` (in place)
    /// and `all_gather`.
    /// In the backward phase `gradient` (dX), `matmul` (dW) or `optimizer`.
    pub operation: String,
    /// Kernel id; of a collective, its name.
    pub kernel_id: String,
    /// Hash of the kernel's sources, in hexadecimal; 0 for a collective.
    pub source_hash: String,
    /// M, N and K, by operation:
    ///
    /// - `gemm`, `experts`: tokens (slots), output features, input features.
    ///   `gradient` swaps N and K.
    /// - `routing`: tokens, experts, experts per token.
    /// - `gather_rows`: tokens, features, rows of the table.
    /// - `sampling`: rows of logits, vocabulary, 1.
    /// - `matmul`: output features, input features, tokens.
    /// - `norm`, `optimizer`: rows, columns.
    /// - `short_conv`, `linear_attention`: tokens, features of the result, columns of X.
    /// - `all_reduce`, `all_gather`: rows, columns of D, columns of X.
    /// - `attention`, `kv_append`: tokens, features of the result (of a
    ///   key), features of queries.
    pub shape: Sizes,
    /// Weight, if any.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub weight: Option<PlannedWeight>,
    /// Region of X. In the backward phase, of the output gradient.
    pub x: String,
    /// Element type of X.
    pub x_dtype: String,
    /// Allowed rounding of X.
    pub x_precision: String,
    /// Whether the result of a token is independent of the others of its step.
    pub batch_invariant: bool,
    /// Region of B (`matmul`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub b: Option<String>,
    /// Element type of B.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub b_dtype: Option<String>,
    /// Region of D.
    pub d: String,
    /// Element type of D.
    pub d_dtype: String,
    /// Region of the bias.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bias: Option<String>,
    /// Element type of the bias.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bias_dtype: Option<String>,
    /// Region of the residual, in the type of D; of a `norm`, in the type of X. It is D itself
    /// where a `gradient` accumulates.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub residual: Option<String>,
    /// Region of the expert ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ids: Option<String>,
    /// Region of the row offsets by expert: `experts + 1` u32.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub offsets: Option<String>,
    /// Factor of the rows of a `gather_rows`. 1 if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scale: Option<f32>,
    /// Number of grouped products (`matmul`): one per expert, each over its own rows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub products: Option<usize>,
    /// Columns of each rank (`all_gather`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub columns: Option<Vec<usize>>,
    /// How the group that planned a collective runs it: `one_shot`, `nccl`, `host_memory`. Absent in
    /// plans without a group; whoever runs the plan chooses anew.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub algorithm: Option<String>,
    /// Region of the router weights.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub router_weights: Option<String>,
    /// Region of the parameters of a `sampling`: 10 words a row
    /// ([`SamplingParameters::words`](crate::SamplingParameters::words)).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub parameters: Option<String>,
    /// Region of the status. Absent where `experts` does not check ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub status: Option<String>,
    /// Parameters of a `norm`, or of the norm of a product's X.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub norm: Option<PlannedNorm>,
    /// Segments of a product's features behind those of D.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub segments: Vec<PlannedSegment>,
    /// Sequences and heads of `kv_append` and `attention`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub heads: Option<PlannedHeads>,
    /// Heads of a `kv_append` in place, whose X and D are one region.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rotation: Option<PlannedRotation>,
    /// Kernel and state of a `short_conv`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub conv: Option<PlannedConv>,
    /// Heads and state of a `linear_attention`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub linear: Option<PlannedLinear>,
    /// Parameters of an `optimizer`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub optimizer: Option<PlannedOptimizer>,
    /// Epilogue activation: `silu`, `clamped_swiglu(1.702,1,7)`.
    pub activation: String,
    /// Experts per token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub top_k: Option<usize>,
    /// Experts that the rows of an `experts` are routed to, where the rank has some of them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub routed_to: Option<usize>,
    /// Whether a `routing` scales the weights of a token's experts to a sum of 1.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub renormalized: Option<bool>,
    /// Scoring of a `routing`: `sigmoid`, `sqrt_softplus`. Softmax if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scoring: Option<String>,
    /// Experts whose weights the rank has, of a `routing` that chooses among all. Ids count from the
    /// first of them; those of other experts are -2. All if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub local_experts: Option<PlannedShard>,
    /// Work partition. Absent for operations without their own kernel.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub dispatch: Option<Dispatch>,
    /// Reduction of partial sums. Absent for operations that split no sum over CTAs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reduction: Option<Reduction>,
    /// X prologue: the launch that makes the kernel's X.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub prologue: Option<PrologueRecord>,
    /// Workspace of the operation, in bytes.
    pub workspace_bytes: usize,
    /// Regions of the workspace.
    pub workspace: Vec<WorkspaceRegion>,
    /// Estimated seconds; 0 for a collective.
    pub estimate_seconds: f64,
    /// Bottleneck.
    pub bound: Bound,
    /// Number of candidates.
    pub candidates: usize,
    /// Refusals of other families.
    pub rejected: Vec<RefusalRecord>,
}

/// Weight of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedWeight {
    /// Region, named like the operation's tensors.
    pub region: String,
    /// Tensors of the model: one, gate and up, or segments that are stacked by rows.
    /// For experts with their own tensors, those of the first.
    pub tensors: Vec<String>,
    /// Rows of each of the tensors, where not all are those of one in their order.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub rows: Vec<Option<PlannedRows>>,
    /// This rank's part of each tensor. Empty for whole tensors.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub shards: Vec<PlannedShard>,
    /// Format.
    pub format: String,
    /// Packed layout on the device.
    pub layout: String,
    /// Whether it is a gated pair.
    pub gated: bool,
    /// Whether rows have factors.
    pub row_scale: bool,
    /// Whether columns are permuted (act-order).
    pub k_order: bool,
    /// Number of experts, in a layer of experts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub experts: Option<usize>,
    /// Stored row stride in bytes.
    pub row_bytes: usize,
    /// Bytes on the device.
    pub bytes: usize,
}

/// Rows of a tensor: `first..first + count` of every `every` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedRows {
    /// First row of each range.
    pub first: usize,
    /// Rows of a range.
    pub count: usize,
    /// Rows from one range to the next.
    pub every: usize,
}

/// Dependency of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Barrier {
    /// Waiting operation, or `end` of the step.
    pub before: String,
    /// Operations that it waits for. Empty at the start of a step.
    pub after: Vec<String>,
    /// Kind of dependency.
    pub kind: BarrierKind,
    /// Name of the caller's step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub step: Option<String>,
    /// Reason for the caller's step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// Regions that the caller's step reads.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub reads: Vec<String>,
    /// Regions that the caller's step writes.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub writes: Vec<String>,
}

/// Kind of dependency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BarrierKind {
    /// Stream order.
    Stream,
    /// Caller's step in between, on the same stream.
    Caller,
}

/// Memory plan: one arena for all working memory of a step.
///
/// Regions share bytes only if their lifetimes do not overlap. A canary follows
/// each region. It has `canary_bytes` or slightly more, up to the next multiple
/// of `alignment`, and belongs to the region for its lifetime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// `qgemm.memory.v1`.
    pub schema: String,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// End of weights and start of mutable regions. Callers with separate
    /// weights allocate from here on.
    pub weights_end: usize,
    /// Alignment of every region.
    pub alignment: usize,
    /// Minimum canary length in bytes.
    pub canary_bytes: usize,
    /// Byte value of canaries.
    pub canary_value: u8,
    /// Total bytes without sharing.
    pub bytes_without_reuse: usize,
    /// Regions by offset.
    pub regions: Vec<Region>,
}

/// Region of an arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Region {
    /// Name, unique in the plan.
    pub name: String,
    /// Kind of contents.
    pub kind: RegionKind,
    /// First byte.
    pub offset: usize,
    /// Exact length in bytes.
    pub bytes: usize,
    /// Length in bytes with the canary.
    pub reserved: usize,
    /// Index of the first operation that uses it, or that a caller's write precedes.
    pub first_op: usize,
    /// Index of the last operation.
    pub last_op: usize,
}

/// Contents of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RegionKind {
    /// Weights and biases, for the lifetime of the arena.
    Weight,
    /// Activations between layers.
    Activation,
    /// Temporaries within a layer, used by qgemm alone.
    Temporary,
    /// Step inputs of the caller: tokens, sequence lengths, optimizer numbers.
    Input,
    /// Keys and values of previous steps, persistent.
    KvCache,
    /// States of recurrent mixers, by slot, persistent.
    RecurrentState,
    /// Partial sums, counters and converted activations, zeroed before the first operation.
    Workspace,
    /// Weight gradients (training).
    Gradient,
    /// Activation gradients (training).
    GradientActivation,
    /// Optimizer state (training).
    OptimizerState,
}

impl RegionKind {
    /// Whether steps leave its contents to later steps of any plan with the same regions.
    pub fn is_persistent(self) -> bool {
        matches!(self, Self::KvCache | Self::RecurrentState)
    }
}

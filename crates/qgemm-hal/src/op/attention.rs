//! `attention`: softmax attention for prefill and decode, with
//! causal, window and bit masks.

mod addressing;
mod kv_format;

use std::hash::{Hash, Hasher};

use qgemm_formats::DType;

pub use addressing::{Addressing, HeadRows, KvAddressing, KvRows, MaskBits, Paging, QueryLengths};
pub use kv_format::{KV_BLOCK, KV_SCALE_BYTES, KV_SCALES, KvFormat, KvFormats};

use super::gemm::WorkspaceLayout;
use super::{Operation, operands};
use crate::axis::{KernelDType, axis};
use crate::caps::Math;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Head dimensions are multiples of this.
pub const HEAD_DIM_STEP: usize = 8;
/// Largest head dimension.
pub const MOST_HEAD_DIM: usize = 512;

/// Softmax attention; validated by the API.
///
/// A sequence has `q_len` queries and `kv_len` keys. Query `i` of
/// head `h` attends to keys `j < kv_len` of KV head
/// `h / (heads / kv_heads)`, restricted as follows:
///
/// - `causal`: only keys `j ≤ kv_len − q_len + i`;
/// - `window`: only the last `window` keys up to that position;
/// - `mask`: only keys whose bit is set.
///
/// With `s_j = scale · (q · k_j)`, or
/// `cap · tanh(s_j / cap)` with a soft cap, the result
/// is `Σ exp(s_j) v_j / Σ exp(s_j)`, and the log-sum-exp is
/// `ln Σ exp(s_j)`. If no key is visible or every `s_j`
/// is −∞, the result is zeros and the log-sum-exp is −∞.
/// A sink of the head adds `exp(sink)` to both sums of weights:
/// the denominator, and what the log-sum-exp is of.
/// Masked keys have no effect, whatever they hold.
/// A gate multiplies the result by its sigmoid, at the very end;
/// the log-sum-exp stays.
///
/// Lengths are clamped to [`CheckedAttention::most_keys`]. Offsets and page
/// numbers outside an operand denote absent keys or queries.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedAttention {
    /// Sequences; at least 1.
    pub sequences: usize,
    /// Query tokens of all sequences; at least 1.
    pub tokens: usize,
    /// Query tokens of each sequence.
    pub queries: QueryLengths,
    /// Maximum keys of a sequence.
    pub most_keys: usize,
    /// Addressing of keys.
    pub places: KvAddressing,
    /// As in [`Addressing::keys_ready`].
    pub keys_ready: bool,
    /// Query heads.
    pub heads: usize,
    /// KV heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Features of a query and a key.
    pub qk_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
    /// Element type of Q and D.
    pub dtype: DType,
    /// Formats of K and V.
    pub kv: KvFormats,
    /// Q.
    pub q: HeadRows,
    /// K.
    pub k: KvRows,
    /// V.
    pub v: KvRows,
    /// D.
    pub d: HeadRows,
    /// Causal mask.
    pub causal: bool,
    /// Sliding window: maximum visible keys, counted back
    /// from the query's position.
    pub window: Option<usize>,
    /// Bit mask, combined with the other masks.
    pub mask: Option<MaskBits>,
    /// Whether each query head has a sink: a logit that joins
    /// the softmax denominator.
    pub sinks: bool,
    /// Output gate, of D's shape and type: results are multiplied by
    /// its sigmoid.
    pub gate: Option<HeadRows>,
    /// Softmax scale.
    pub scale: f32,
    /// Soft cap of the scores.
    pub soft_cap: Option<f32>,
    /// Whether the log-sum-exp is written: f32 `[tokens][heads]`.
    pub lse: bool,
    /// Whether the result bits of a sequence must not
    /// depend on the other sequences.
    pub batch_invariant: bool,
}

operands! {
    /// Operands of `attention`.
    pub enum AttentionOperand {
        /// Queries.
        Q: "the queries" Read,
        /// Keys.
        K: "the keys" Read,
        /// Values.
        V: "the values" Read,
        /// Factor of each head of keys: f32.
        KFactors: "the factors of the keys" Read,
        /// Factor of each head of values: f32.
        VFactors: "the factors of the values" Read,
        /// Scale of each block of keys: f16.
        KScales: "the scales of the keys" Read,
        /// Scale of each block of values: f16.
        VScales: "the scales of the values" Read,
        /// Query offsets: u32 `[sequences + 1]`.
        QOffsets: "the offsets of the queries" Read,
        /// Key offsets: u32 `[sequences + 1]`.
        KvOffsets: "the offsets of the keys" Read,
        /// Key count of each sequence: u32.
        KvLengths: "the lengths" Read,
        /// Page numbers of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Bit mask: u32.
        Mask: "the mask" Read,
        /// Sink of each query head: f32.
        Sinks: "the sinks" Read,
        /// Output gate, of D's shape.
        Gate: "the gate" Read,
        /// The results.
        D: "d" Write,
        /// Log-sum-exp of each token and head: f32.
        Lse: "the log-sum-exp" Write,
        /// Counters and split-KV partial results.
        Workspace: "the workspace" Accumulate,
    }
}

axis! {
    /// Kernel step of `attention`.
    pub enum AttentionStep: "step of attention" {
        /// Attention itself, or split-KV partial results.
        Attend: "attend",
        /// Split-KV combine.
        Combine: "combine",
        /// Lists of key tiles with visible keys, from a bit mask.
        ListTiles: "list_tiles",
        /// Quantized keys and values to plain rows.
        Dequantize: "dequantize",
        /// Log-sum-exp alone.
        LogSumExp: "log_sum_exp",
    }
}

axis! {
    /// How a kernel finds and copies keys and values.
    pub enum KvPaging: "paging of keys and values" {
        /// Pages or contiguous keys, chosen at run time.
        Any: "any",
        /// Contiguous keys, a tile at a time.
        Contiguous: "contiguous",
        /// Pages in pieces that divide page and tile.
        Pieces: "pieces",
        /// Pages, row by row.
        Rows: "rows",
    }
}

spec! {
    /// Kernel identity keys of `attention`.
    pub struct AttentionSpec {
        /// Kernel step.
        step: AttentionStep,
        /// Element type of queries.
        x: KernelDType,
        /// Formats of keys and values.
        kv: KvFormats,
        /// Addressing and copying of keys and values.
        paging: KvPaging,
        /// Whether a bit mask is read.
        masked: bool,
        /// Whether scores may be other than the product times a
        /// positive factor: with a soft cap, or a scale that is
        /// not positive.
        bounded: bool,
        /// Maximum features of queries and keys.
        qk: u32,
        /// Maximum features of values.
        v: u32,
        /// KV heads of a CTA.
        kv_heads: u32,
        /// Query rows of a CTA, of one head or of all
        /// heads that share a KV head.
        rows: u32,
        /// Keys of a tile.
        keys: u32,
    }
}

impl AttentionSpec {
    /// Keys of a kernel without specialization that attends to keys
    /// and values in `kv`.
    pub const fn attend(kv: KvFormats, [qk, v]: [u32; 2], rows: u32, keys: u32) -> Self {
        Self {
            step: AttentionStep::Attend,
            x: KernelDType::Any,
            kv,
            paging: KvPaging::Any,
            masked: false,
            bounded: true,
            qk,
            v,
            kv_heads: 1,
            rows,
            keys,
        }
    }
}

/// Candidate kernels of a family, with what the
/// scheduler ranks them by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// The main kernel.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Maximum split-KV parts of a sequence.
    pub parts: u32,
    /// Keys of a split-KV part.
    pub part_keys: u32,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Workspace bytes of keys and values that a launch in
    /// front dequantizes; 0 without such a launch.
    pub dequantized_bytes: usize,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Tile rows divided by query rows. A partly filled tile
    /// takes as long as a full one.
    pub padding: f64,
    /// Reached shares of the device's bandwidth and arithmetic rate, per mille.
    pub efficiency: (u32, u32),
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPlan {
    /// The config.
    pub config: AttentionConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedAttention {
    /// Sequence layout: the queries and keys of each sequence.
    pub fn addressing(&self) -> Addressing {
        let &Self { sequences, tokens, queries, most_keys, places, keys_ready, .. } = self;
        Addressing { sequences, tokens, queries, most_keys, places, keys_ready }
    }

    /// Maximum query tokens of a sequence.
    pub fn most_queries(&self) -> usize {
        self.addressing().most_queries()
    }

    /// Query heads of a KV head (GQA group size).
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Page geometry for finding keys.
    pub fn paging(&self) -> Paging {
        self.addressing().paging()
    }

    /// Words of the mask; 0 without one. The API checked that
    /// the size fits the address space.
    pub fn mask_words(&self) -> usize {
        let words = |mask: MaskBits| mask.all_words(&self.addressing(), self.heads).unwrap_or(usize::MAX);
        self.mask.map_or(0, words)
    }

    /// Average number of visible keys, for full-length sequences
    /// and a mask with all bits set.
    fn mean_visible_keys(&self) -> f64 {
        let (keys, queries) = (self.most_keys as f64, self.most_queries() as f64);
        let visible = if self.causal { (keys - queries.min(keys) / 2.0).max(keys / 2.0) } else { keys };
        self.window.map_or(visible, |window| visible.min(window as f64))
    }

    /// Workspace bytes of the counters and of `parts` partial
    /// results for each query and head.
    pub fn partial_bytes(&self, parts: usize) -> usize {
        self.partial_bytes_of(parts, self.v_dim)
    }

    /// As [`Self::partial_bytes`], with room for `v_dim` value features.
    pub fn partial_bytes_of(&self, parts: usize, v_dim: usize) -> usize {
        WorkspaceLayout::RESERVED + self.tokens * self.heads * parts * (v_dim + 4) * size_of::<f32>()
    }
}

/// Plan cache key: floats are finite and are
/// compared by their bits.
impl Eq for CheckedAttention {}

impl Hash for CheckedAttention {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.sequences, self.tokens, self.queries, self.most_keys, self.places, self.keys_ready).hash(state);
        (self.heads, self.kv_heads, self.qk_dim, self.v_dim, self.dtype, self.kv).hash(state);
        (self.q, self.k, self.v, self.d, self.causal, self.window, self.mask, self.sinks, self.gate).hash(state);
        (self.scale.to_bits(), self.soft_cap.map(f32::to_bits), self.lse, self.batch_invariant).hash(state);
    }
}

impl Operation for CheckedAttention {
    type Operand = AttentionOperand;
    type Config = AttentionConfig;
    type Plan = AttentionPlan;
    const WORKSPACE: Option<AttentionOperand> = Some(AttentionOperand::Workspace);

    fn operands(&self) -> Vec<AttentionOperand> {
        use AttentionOperand as O;
        let has_table = matches!(self.places, KvAddressing::Table { .. });
        let optional = [
            (true, O::Q),
            (true, O::K),
            (true, O::V),
            (self.kv.k.has_factors(), O::KFactors),
            (self.kv.v.has_factors(), O::VFactors),
            (self.kv.k.has_scales(), O::KScales),
            (self.kv.v.has_scales(), O::VScales),
            (matches!(self.queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (matches!(self.places, KvAddressing::Offsets { .. }), O::KvOffsets),
            (has_table || matches!(self.places, KvAddressing::Pages { lengths: true, .. }), O::KvLengths),
            (has_table, O::BlockTable),
            (self.mask.is_some(), O::Mask),
            (self.sinks, O::Sinks),
            (self.gate.is_some(), O::Gate),
            (true, O::D),
            (self.lse, O::Lse),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let rows = (self.tokens * self.heads) as f64;
        let dims = (self.qk_dim + self.v_dim) as f64;
        // The queries of a sequence read their windows together.
        let keys = match self.window {
            Some(window) => (window as f64 + self.most_queries() as f64).min(self.most_keys as f64),
            None => self.most_keys as f64,
        };
        let keys = match self.places {
            KvAddressing::Offsets { rows } => (rows as f64).min(keys * self.sequences as f64),
            _ => keys * self.sequences as f64,
        };
        let of_key = self.qk_dim as f64 * self.kv.k.mean_bytes() + self.v_dim as f64 * self.kv.v.mean_bytes();
        let kv = keys * self.kv_heads as f64 * of_key;
        let lse = if self.lse { rows * 4.0 } else { 0.0 };
        let gated = if self.gate.is_some() { self.v_dim as f64 } else { 0.0 };
        rows * (dims + gated) * self.dtype.bytes() as f64 + kv + lse + self.mask_words() as f64 * 4.0
    }

    fn macs(&self) -> f64 {
        (self.tokens * self.heads) as f64 * self.mean_visible_keys() * (self.qk_dim + self.v_dim) as f64
    }

    fn describe(&self) -> String {
        let Self { sequences, tokens, heads, kv_heads, qk_dim, v_dim, dtype, kv, mask, sinks, gate, .. } = self;
        let masked = match (mask.is_some(), sinks) {
            (false, false) => "",
            (true, false) => ", with a bit mask",
            (false, true) => ", with sinks",
            (true, true) => ", with a bit mask and sinks",
        };
        let gated = if gate.is_some() { ", gated" } else { "" };
        format!(
            "{tokens} tokens of {sequences} sequences in {dtype}, {heads} heads of {qk_dim} and {v_dim} features over {kv_heads} in {kv}{masked}{gated}"
        )
    }

    fn is_nothing(&self) -> bool {
        self.sequences == 0 || self.tokens == 0 || self.most_queries() == 0
    }

    fn config(plan: &AttentionPlan) -> &AttentionConfig {
        &plan.config
    }

    fn estimate(plan: &AttentionPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &AttentionPlan) -> KernelId {
        plan.config.kernel
    }

    fn math(plan: &AttentionPlan) -> Option<Math> {
        Some(plan.config.math)
    }

    fn matrix_type(&self) -> Option<DType> {
        let has_type = !self.kv.are_plain() || self.kv == KvFormats::both(KvFormat::Plain(self.dtype));
        (has_type && self.dtype != DType::F32).then_some(self.dtype)
    }

    fn workspace_bytes(&self, plan: &AttentionPlan) -> usize {
        plan.config.workspace_bytes
    }

    fn noop_config(&self) -> Result<AttentionConfig, Unsupported> {
        let (qk, v) = (self.qk_dim as u32, self.v_dim as u32);
        let spec = AttentionSpec::attend(self.kv, [qk, v], 1, 1);
        Ok(AttentionConfig {
            kernel: KernelId::new("noop", None, Spec::Attention(spec)),
            launches: 1,
            parts: 1,
            part_keys: self.most_keys as u32,
            // Operations with many queries have a workspace, so that
            // higher layers can test with one.
            workspace_bytes: if self.tokens > 64 { 1024 } else { 0 },
            dequantized_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (1000, 1000),
        })
    }
}

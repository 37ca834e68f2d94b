//! `kv_append`: rotary embedding and Hadamard rotation of heads, and
//! KV-cache append.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::DType;

use super::attention::{Addressing, HeadRows, KvAddressing, KvFormat, KvRows, QueryLengths};
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Largest head dimension of appended keys and values.
pub const MOST_APPENDED_DIM: usize = 256;

/// Pairing of rotated features within the first `dim` of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryPairs {
    /// `i` and `i + dim / 2`: GPT-NeoX, and Llama as
    /// stored by Hugging Face.
    Neox,
    /// `2i` and `2i + 1`: GPT-J and the original Llama.
    Interleaved,
}

impl RotaryPairs {
    /// Both.
    pub const ALL: [RotaryPairs; 2] = [RotaryPairs::Neox, RotaryPairs::Interleaved];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            RotaryPairs::Neox => "neox",
            RotaryPairs::Interleaved => "interleaved",
        }
    }
}

impl fmt::Display for RotaryPairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Features of a block of the Hadamard rotation: the largest
/// power of two that divides the head dimension.
///
/// All backends add in the same order: butterflies of strides
/// 1, 2, 4, …, then one multiplication by [`hadamard_scale`].
pub const fn hadamard_block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

/// Root of `1 / block`, in f32.
pub fn hadamard_scale(block: usize) -> f32 {
    (1.0 / (block as f64).sqrt()) as f32
}

/// Source of the rotation angles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RotaryAngles {
    /// Rotation per position of each pair: a u64 fraction of
    /// a turn in units of 2⁻⁶⁴.
    Frequencies,
    /// Tables of cosines and sines, f32 `[positions][pairs]`.
    Tables {
        /// Rows.
        positions: usize,
        /// Row stride in elements.
        row_stride: u64,
    },
}

/// Rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedRotary {
    /// Rotated features of a head; even. The other features are copied.
    pub dim: usize,
    /// Pairing of rotated features.
    pub pairs: RotaryPairs,
    /// Source of the angles.
    pub angles: RotaryAngles,
    /// Factor of the rotated features.
    pub amplitude: f32,
    /// Rotation by −φ, after the Hadamard rotation instead of
    /// before.
    pub inverse: bool,
}

impl CheckedRotary {
    /// Factor of the sines: the amplitude with the sign
    /// of the rotation.
    pub fn sine_amplitude(&self) -> f32 {
        if self.inverse { -self.amplitude } else { self.amplitude }
    }
}

/// Plan cache key: the amplitude is finite and is
/// compared by its bits.
impl Eq for CheckedRotary {}

impl Hash for CheckedRotary {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.dim, self.pairs, self.angles, self.amplitude.to_bits(), self.inverse).hash(state);
    }
}

/// RMS norm of each query and key head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm {
    /// Epsilon, added to the mean of squares.
    pub eps: f32,
    /// Element type of gamma.
    pub gamma: DType,
}

/// Plan cache key: epsilon is finite and is
/// compared by its bits.
impl Eq for HeadNorm {}

impl Hash for HeadNorm {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.eps.to_bits(), self.gamma).hash(state);
    }
}

/// Rotates queries in place, and writes rotated keys and the values
/// to the KV cache; validated by the API.
///
/// Sequences are addressed as in the attention that follows.
/// With `q_len` new tokens among `kv_len` keys, token `i`
/// has key `kv_len − q_len + i`, which is also its
/// position unless positions are given. A pair `(a, b)`
/// becomes `(a cos − b sin, b cos + a sin)`
/// in f32. A head norm comes first: queries and keys become
/// `x / sqrt(mean x² + eps) · gamma`, in f32. A Hadamard rotation multiplies blocks of a head's
/// features by the Walsh–Hadamard matrix in Sylvester's order over
/// the root of its size, in f32: see [`hadamard_block`].
/// Results are rounded once.
///
/// Without KV heads, queries are all there is, and nothing
/// is appended.
///
/// Tokens before the first key or at a position outside the
/// tables are skipped: their queries stay, and no key or value
/// is written. If the block table has no valid page for
/// a token, only its queries are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedKvAppend {
    /// Sequence layout of tokens and keys.
    pub addressing: Addressing,
    /// Query heads; 0 when there are no queries.
    pub heads: usize,
    /// KV heads; 0 when heads are rotated in place alone.
    pub kv_heads: usize,
    /// Features of a query and a key.
    pub qk_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
    /// Element type of queries, and of new keys and values.
    pub dtype: DType,
    /// Format of the cache.
    pub kv: KvFormat,
    /// Queries.
    pub q: HeadRows,
    /// New keys.
    pub new_k: HeadRows,
    /// New values.
    pub new_v: HeadRows,
    /// Keys of the cache.
    pub k: KvRows,
    /// Values of the cache.
    pub v: KvRows,
    /// Norm of query and key heads, if any.
    pub head_norm: Option<HeadNorm>,
    /// Rotary embedding, if any.
    pub rotary: Option<CheckedRotary>,
    /// Hadamard rotation of queries and keys.
    pub rotate_k: bool,
    /// Hadamard rotation of values.
    pub rotate_v: bool,
    /// Whether explicit positions are given.
    pub positions: bool,
}

operands! {
    /// Operands of `kv_append`.
    pub enum KvAppendOperand {
        /// Queries.
        Q: "the queries" Accumulate,
        /// New keys.
        NewK: "the new keys" Read,
        /// New values.
        NewV: "the new values" Read,
        /// The keys of the cache.
        K: "the cached keys" State,
        /// The values of the cache.
        V: "the cached values" State,
        /// Gamma of the query heads: `[qk_dim]`.
        QGamma: "the gamma of the queries" Read,
        /// Gamma of the key heads: `[qk_dim]`.
        KGamma: "the gamma of the keys" Read,
        /// Factor of each head of cached keys: f32.
        KFactors: "the factors of the keys" Read,
        /// Factor of each head of cached values: f32.
        VFactors: "the factors of the values" Read,
        /// Scale of each block of cached keys: f16, written.
        KScales: "the scales of the keys" State,
        /// Scale of each block of cached values: f16, written.
        VScales: "the scales of the values" State,
        /// Query offsets: u32 `[sequences + 1]`.
        QOffsets: "the offsets of the queries" Read,
        /// Key offsets: u32 `[sequences + 1]`.
        KvOffsets: "the offsets of the keys" Read,
        /// Key count of each sequence: u32.
        KvLengths: "the lengths" Read,
        /// Page numbers of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Position of each token: u32.
        Positions: "the positions" Read,
        /// Rotation per position of each pair: u64.
        Frequencies: "the frequencies" Constant,
        /// Cosines: f32.
        Cos: "the cosines" Read,
        /// Sines: f32.
        Sin: "the sines" Read,
    }
}

spec! {
    /// Kernel identity keys of `kv_append`.
    pub struct KvAppendSpec {
        /// Outputs of the kernel: `all`, `q`, `k` or `v`.
        step: KvAppendStep,
        /// Element type of queries, and of new keys and values.
        x: DType,
        /// Format of the cache.
        kv: KvFormat,
    }
}

/// Outputs of a `kv_append` kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvAppendStep {
    /// Everything.
    All,
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
}

impl KvAppendStep {
    /// All steps.
    pub const ALL: [KvAppendStep; 4] = [KvAppendStep::All, KvAppendStep::Q, KvAppendStep::K, KvAppendStep::V];

    const fn name(self) -> &'static str {
        match self {
            KvAppendStep::All => "all",
            KvAppendStep::Q => "q",
            KvAppendStep::K => "k",
            KvAppendStep::V => "v",
        }
    }
}

impl fmt::Display for KvAppendStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvAppendStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|step| step.name() == text);
        found.ok_or_else(|| format!("`{text}` is no part of kv_append"))
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppendConfig {
    /// The kernel, or the first of several.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppendLaunch {
    /// The config.
    pub config: KvAppendConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedKvAppend {
    /// Source of the angles, if queries and keys are rotated.
    pub fn angles(&self) -> Option<RotaryAngles> {
        self.rotary.map(|rotary| rotary.angles)
    }

    /// Whether keys and values are appended.
    pub fn appends(&self) -> bool {
        self.kv_heads > 0
    }

    /// Whether queries and keys change before they are stored.
    pub fn rotates_queries(&self) -> bool {
        self.rotary.is_some() || self.rotate_k || self.head_norm.is_some()
    }

    /// Whether the rotary embedding follows the Hadamard rotation.
    pub fn turns_last(&self) -> bool {
        self.rotate_k && self.rotary.is_some_and(|rotary| rotary.inverse)
    }
}

impl Operation for CheckedKvAppend {
    type Operand = KvAppendOperand;
    type Config = KvAppendConfig;
    type Plan = KvAppendLaunch;

    fn operands(&self) -> Vec<KvAppendOperand> {
        use KvAppendOperand as O;
        let appends = self.appends();
        let (factors, scales) = (appends && self.kv.has_factors(), appends && self.kv.has_scales());
        let Addressing { queries, places, .. } = self.addressing;
        let has_table = matches!(places, KvAddressing::Table { .. });
        let has_tables = matches!(self.angles(), Some(RotaryAngles::Tables { .. }));
        let optional = [
            (self.heads > 0, O::Q),
            (appends, O::NewK),
            (appends, O::NewV),
            (appends, O::K),
            (appends, O::V),
            (self.head_norm.is_some() && self.heads > 0, O::QGamma),
            (self.head_norm.is_some() && appends, O::KGamma),
            (factors, O::KFactors),
            (factors, O::VFactors),
            (scales, O::KScales),
            (scales, O::VScales),
            (matches!(queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (matches!(places, KvAddressing::Offsets { .. }), O::KvOffsets),
            (has_table || matches!(places, KvAddressing::Pages { lengths: true, .. }), O::KvLengths),
            (has_table, O::BlockTable),
            (self.positions, O::Positions),
            (self.angles() == Some(RotaryAngles::Frequencies), O::Frequencies),
            (has_tables, O::Cos),
            (has_tables, O::Sin),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let (tokens, width) = (self.addressing.tokens as f64, self.dtype.bytes() as f64);
        let rotated = if self.rotates_queries() { 2.0 * (self.heads * self.qk_dim) as f64 * width } else { 0.0 };
        let appended = (self.kv_heads * (self.qk_dim + self.v_dim)) as f64;
        let tables = match self.rotary {
            Some(CheckedRotary { dim, angles: RotaryAngles::Tables { .. }, .. }) => dim as f64 * 4.0,
            _ => 0.0,
        };
        tokens * (rotated + appended * (width + self.kv.mean_bytes()) + tables)
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { addressing, heads, kv_heads, qk_dim, dtype, kv, .. } = self;
        let normed = if self.head_norm.is_some() { ", normed" } else { "" };
        let rotated = if self.rotary.is_some() { ", rotated" } else { "" };
        let hadamard = match (self.rotate_k, self.rotate_v) {
            (false, false) => "",
            (true, false) if !self.appends() => ", Hadamard",
            (true, false) => ", Hadamard of keys",
            (false, true) => ", Hadamard of values",
            (true, true) => ", Hadamard of keys and values",
        };
        let tokens = addressing.tokens;
        if !self.appends() {
            return format!(
                "{tokens} tokens of {heads} heads x {qk_dim} in {dtype}, in place{normed}{rotated}{hadamard}"
            );
        }
        let of = format!("{tokens} tokens of {heads} heads and {kv_heads} KV heads x {qk_dim} from {dtype} to {kv}");
        format!("{of}{normed}{rotated}{hadamard}")
    }

    fn is_nothing(&self) -> bool {
        let has_work = self.appends() || (self.heads > 0 && self.rotates_queries());
        self.addressing.tokens == 0 || self.addressing.sequences == 0 || !has_work
    }

    fn config(plan: &KvAppendLaunch) -> &KvAppendConfig {
        &plan.config
    }

    fn estimate(plan: &KvAppendLaunch) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &KvAppendLaunch) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<KvAppendConfig, Unsupported> {
        let spec = KvAppendSpec { step: KvAppendStep::All, x: self.dtype, kv: self.kv };
        let kernel = KernelId::new("noop", None, Spec::KvAppend(spec));
        Ok(KvAppendConfig { kernel, launches: 1, efficiency: 1000 })
    }
}

memory_bound!(CheckedKvAppend, KvAppendConfig, KvAppendLaunch, |config| config.launches);

//! `kv_append`: rotary embedding of queries and keys, and new keys and values on their way into the cache.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::DType;

use super::attention::{Addressing, HeadRows, KvFormat, KvPlaces, KvRows, QueryLengths};
use super::{Operation, operands};
use crate::kernel_id::{KernelId, spec};

/// Which two features are turned together, of the first `dim` of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryPairs {
    /// `i` and `i + dim / 2`, as GPT-NeoX and Llama in the layout of Hugging Face have them.
    Neox,
    /// `2i` and `2i + 1`, as GPT-J and the original Llama have them.
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

/// Where the angles of a position come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RotaryAngles {
    /// Of each pair, the part of a turn that it makes from one position to the next, as a u64 in units of 2⁻⁶⁴.
    Frequencies,
    /// Tables of cosines and sines, f32: a row a position, an element a pair.
    Tables {
        /// Rows.
        positions: usize,
        /// Elements from one row to the next.
        row_stride: u64,
    },
}

/// How heads are turned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedRotary {
    /// Features of a head that are turned; even, the others stay.
    pub dim: usize,
    /// Which of them form pairs.
    pub pairs: RotaryPairs,
    /// Where angles come from.
    pub angles: RotaryAngles,
    /// What turned features are multiplied with.
    pub amplitude: f32,
}

/// Descriptions are keys of plans: the amplitude is finite, and told apart by its bits.
impl Eq for CheckedRotary {}

impl Hash for CheckedRotary {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.dim, self.pairs, self.angles, self.amplitude.to_bits()).hash(state);
    }
}

/// Turns queries in place and writes new keys, turned, and values to the cache; validated by the API.
///
/// Sequences have tokens and keys as those of an attention that follows: of `q_len` new tokens and `kv_len` keys, among which theirs are,
/// token `i` has the key `kv_len − q_len + i`, and that is its position unless positions are given. In f32, rounded once, a pair `(a, b)`
/// becomes `(a cos − b sin, b cos + a sin)`. A token before the first key, or whose position the tables do not have, is left alone: its
/// queries stay, its key and value are not written. One whose page the table does not name has its queries turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedKvAppend {
    /// Sequences, their tokens and where their keys are.
    pub addressing: Addressing,
    /// Heads of queries; 0 where there are none to turn.
    pub heads: usize,
    /// Heads of keys and values; at least 1.
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
    /// How queries and keys are turned, if they are.
    pub rotary: Option<CheckedRotary>,
    /// Whether the position of each token is given.
    pub positions: bool,
}

operands! {
    /// What `kv_append` reads and writes.
    pub enum KvAppendOperand {
        /// Queries.
        Q: "the queries" Accumulate,
        /// New keys.
        NewK: "the new keys" Read,
        /// New values.
        NewV: "the new values" Read,
        /// The keys of the cache.
        K: "the cached keys" Write,
        /// The values of the cache.
        V: "the cached values" Write,
        /// What each head of cached keys is multiplied with when it is read: f32.
        KFactors: "the factors of the keys" Read,
        /// What each head of cached values is multiplied with when it is read: f32.
        VFactors: "the factors of the values" Read,
        /// Written: what each block of cached keys is multiplied with when it is read: f16.
        KScales: "the scales of the keys" Write,
        /// Written: what each block of cached values is multiplied with when it is read: f16.
        VScales: "the scales of the values" Write,
        /// Where the tokens of each sequence begin, and where the last end: u32.
        QOffsets: "the offsets of the queries" Read,
        /// Where the rows of keys of each sequence begin, and where the last end: u32.
        KvOffsets: "the offsets of the keys" Read,
        /// How many keys each sequence has: u32.
        KvLengths: "the lengths" Read,
        /// The pages of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Position of each token: u32.
        Positions: "the positions" Read,
        /// Parts of a turn: u64.
        Frequencies: "the frequencies" Constant,
        /// Cosines: f32.
        Cos: "the cosines" Read,
        /// Sines: f32.
        Sin: "the sines" Read,
    }
}

spec! {
    /// What tells the kernels of `kv_append` apart.
    pub struct KvAppendSpec {
        /// What the kernel writes: `all`, `q`, `k` or `v`.
        step: KvAppendStep,
        /// Element type of queries, and of new keys and values.
        x: DType,
        /// Format of the cache.
        kv: KvFormat,
    }
}

/// What a kernel of `kv_append` writes.
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
    /// Every one.
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

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppendConfig {
    /// The kernel, or the first of several.
    pub kernel: KernelId,
    /// Kernels that a run launches.
    pub launches: u32,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppendLaunch {
    /// The configuration.
    pub config: KvAppendConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedKvAppend {
    /// Where angles come from, if there are any.
    pub fn angles(&self) -> Option<RotaryAngles> {
        self.rotary.map(|rotary| rotary.angles)
    }
}

impl Operation for CheckedKvAppend {
    const NAME: &'static str = "kv_append";
    type Operand = KvAppendOperand;
    type Config = KvAppendConfig;
    type Plan = KvAppendLaunch;

    fn operands(&self) -> Vec<KvAppendOperand> {
        use KvAppendOperand as O;
        let factors = self.kv.has_factors();
        let Addressing { queries, places, .. } = self.addressing;
        let has_table = matches!(places, KvPlaces::Table { .. });
        let has_tables = matches!(self.angles(), Some(RotaryAngles::Tables { .. }));
        let optional = [
            (self.heads > 0, O::Q),
            (true, O::NewK),
            (true, O::NewV),
            (true, O::K),
            (true, O::V),
            (factors, O::KFactors),
            (factors, O::VFactors),
            (self.kv.has_scales(), O::KScales),
            (self.kv.has_scales(), O::VScales),
            (matches!(queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (matches!(places, KvPlaces::Offsets { .. }), O::KvOffsets),
            (has_table || matches!(places, KvPlaces::Pages { lengths: true, .. }), O::KvLengths),
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
        let turned = if self.rotary.is_some() { 2.0 * (self.heads * self.qk_dim) as f64 * width } else { 0.0 };
        let appended = (self.kv_heads * (self.qk_dim + self.v_dim)) as f64;
        let tables = match self.rotary {
            Some(CheckedRotary { dim, angles: RotaryAngles::Tables { .. }, .. }) => dim as f64 * 4.0,
            _ => 0.0,
        };
        tokens * (turned + appended * (width + self.kv.mean_bytes()) + tables)
    }

    fn macs(&self) -> f64 {
        0.0
    }
}

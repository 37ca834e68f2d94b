//! A case of `attention`, as data.

use std::fmt;

use qgemm_formats::DType;
use qgemm_hal::op::attention::KV_BLOCK;
use qgemm_hal::{KvFormat, KvFormats};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::mask::AttentionMask;
use crate::activations::normal;

/// Storage of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionStorage {
    /// Equal numbers of keys.
    Each,
    /// Room for this many keys beyond the longest sequence;
    /// lengths are given.
    Lengths(usize),
    /// Contiguous segments, by offsets.
    Offsets,
    /// Pages of this many keys, in any order.
    Paged(usize),
}

/// Kind of Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionValues {
    /// Normal.
    Normal,
    /// Queries thirty times as large: one key gets nearly all the
    /// weight.
    Huge,
    /// Queries near 30: scores are small compared to their summands.
    Cancelling,
    /// Equal keys: D is the mean of V.
    Equal,
    /// NaN in the last key of every sequence and an infinity in the
    /// value before it; NaN if the format has no infinity.
    NotFinite,
    /// Keys with scores of minus infinity: some in each sequence, all
    /// in every third.
    MinusInfinity,
    /// Some invalid page indices.
    BadPages,
    /// Scales of every third row so large that numbers overflow f16,
    /// for formats with scales.
    LargeScales,
}

impl AttentionValues {
    /// Every kind.
    pub const ALL: [AttentionValues; 8] = [
        AttentionValues::Normal,
        AttentionValues::Huge,
        AttentionValues::Cancelling,
        AttentionValues::Equal,
        AttentionValues::NotFinite,
        AttentionValues::MinusInfinity,
        AttentionValues::BadPages,
        AttentionValues::LargeScales,
    ];

    fn name(self) -> &'static str {
        match self {
            AttentionValues::Normal => "normal",
            AttentionValues::Huge => "huge",
            AttentionValues::Cancelling => "cancelling",
            AttentionValues::Equal => "equal",
            AttentionValues::NotFinite => "not-finite",
            AttentionValues::MinusInfinity => "minus-infinity",
            AttentionValues::BadPages => "bad-pages",
            AttentionValues::LargeScales => "large-scales",
        }
    }
}

/// An attention to check.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCase {
    /// Number of queries and keys of each sequence.
    pub lengths: Vec<(usize, usize)>,
    /// Whether offsets give the queries of sequences. A token before
    /// the first sequence then belongs to none.
    pub ragged: bool,
    /// Storage of K and V.
    pub places: AttentionStorage,
    /// Heads of Q, and of K and V.
    pub heads: (usize, usize),
    /// Features of Q and K, and of V.
    pub dims: (usize, usize),
    /// Element type of Q and D.
    pub dtype: DType,
    /// Format of K, and of V unless that has another.
    pub kv: KvFormat,
    /// Format of V, if not that of K.
    pub v_format: Option<KvFormat>,
    /// Causal mask.
    pub causal: bool,
    /// Sliding window, in keys.
    pub window: Option<usize>,
    /// Bit mask over these keys.
    pub mask: Option<AttentionMask>,
    /// Whether each query head has a sink.
    pub sinks: bool,
    /// Whether results have an output gate.
    pub gated: bool,
    /// Softmax scale, if given.
    pub scale: Option<f32>,
    /// Soft cap of scores.
    pub soft_cap: Option<f32>,
    /// Whether the log-sum-exp is written.
    pub lse: bool,
    /// Checks that each sequence alone gives the same bits.
    pub batch_invariant: bool,
    /// Whether pages are head-major.
    pub head_major: bool,
    /// Runs every kernel that the plan may choose, not only the
    /// fastest.
    pub every_kernel: bool,
    /// Kind of Q, K and V.
    pub values: AttentionValues,
    /// Elements between rows of heads, filled with NaN.
    pub gap: usize,
    /// Offset of operands from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl AttentionCase {
    /// Causal attention in `dtype`, for sequences with these numbers
    /// of queries and keys.
    pub fn new(lengths: &[(usize, usize)], heads: (usize, usize), dim: usize, dtype: DType) -> Self {
        let (queries, keys) = lengths[0];
        let alike = lengths.iter().all(|&(q, _)| q == queries);
        let places =
            if lengths.iter().all(|&(_, k)| k == keys) { AttentionStorage::Each } else { AttentionStorage::Lengths(3) };
        Self {
            lengths: lengths.to_vec(),
            ragged: !alike,
            places,
            heads,
            dims: (dim, dim),
            dtype,
            kv: KvFormat::Plain(dtype),
            v_format: None,
            causal: true,
            window: None,
            mask: None,
            sinks: false,
            gated: false,
            scale: None,
            soft_cap: None,
            lse: true,
            batch_invariant: false,
            head_major: false,
            every_kernel: false,
            values: AttentionValues::Normal,
            gap: 0,
            offset: 0,
            seed: 1,
        }
    }

    /// Tokens before the first sequence, of no sequence.
    pub(crate) fn spare_tokens(&self) -> usize {
        usize::from(self.ragged)
    }

    /// Query tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.spare_tokens() + self.lengths.iter().map(|&(q, _)| q).sum::<usize>()
    }

    /// The first token of every sequence, and the end of the last.
    pub(crate) fn q_offsets(&self) -> Vec<u32> {
        let ends = self.lengths.iter().scan(self.spare_tokens(), |end, &(q, _)| {
            *end += q;
            Some(*end as u32)
        });
        std::iter::once(self.spare_tokens() as u32).chain(ends).collect()
    }

    /// Most queries of a sequence.
    pub(crate) fn most_queries(&self) -> usize {
        self.lengths.iter().map(|&(q, _)| q).max().unwrap_or(0)
    }

    /// Most keys of a sequence.
    pub(crate) fn most_keys(&self) -> usize {
        self.lengths.iter().map(|&(_, k)| k).max().unwrap_or(0)
    }

    /// Formats of K and V.
    pub(crate) fn formats(&self) -> KvFormats {
        KvFormats { k: self.kv, v: self.v_format.unwrap_or(self.kv) }
    }

    fn rng(&self, salt: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ salt << 32)
    }

    /// Q, contiguous and representable in its type.
    pub(crate) fn queries(&self) -> Vec<f32> {
        let mut rng = self.rng(1);
        let count = self.tokens() * self.heads.0 * self.dims.0;
        let values: Vec<f32> = (0..count)
            .map(|_| match self.values {
                AttentionValues::Huge => 30.0 * normal(&mut rng),
                AttentionValues::Cancelling => 30.0 + normal(&mut rng),
                // Positive, so that products with minus infinity are minus
                // infinity.
                AttentionValues::MinusInfinity => normal(&mut rng).abs() + 0.01,
                _ => normal(&mut rng),
            })
            .collect();
        self.dtype.decode(&self.dtype.encode(&values))
    }

    /// Number of rows of head 0 in [`Self::keys`].
    pub(crate) fn rows(&self) -> usize {
        match self.places {
            AttentionStorage::Each => self.lengths.len() * self.most_keys(),
            AttentionStorage::Lengths(spare) => self.lengths.len() * (self.most_keys() + spare),
            AttentionStorage::Offsets => self.lengths.iter().map(|&(_, k)| k).sum::<usize>() + 1,
            AttentionStorage::Paged(size) => self.pages() * size,
        }
    }

    /// Pages of the cache; 1 without pages.
    pub(crate) fn pages(&self) -> usize {
        match self.places {
            AttentionStorage::Each | AttentionStorage::Lengths(_) => self.lengths.len(),
            AttentionStorage::Offsets => 1,
            AttentionStorage::Paged(size) => self.lengths.iter().map(|&(_, k)| k.div_ceil(size)).sum::<usize>() + 2,
        }
    }

    /// Page-table entries per sequence.
    pub(crate) fn table_width(&self, page_size: usize) -> usize {
        self.most_keys().div_ceil(page_size) + 1
    }

    /// The page table. Sequences have separate pages, in no order.
    pub(crate) fn table(&self, page_size: usize) -> Vec<u32> {
        let (width, pages) = (self.table_width(page_size), self.pages());
        // A step that is coprime to the number of pages.
        let step = (pages / 2 + 1..).find(|step| gcd(*step, pages) == 1).unwrap_or(1);
        let (mut next, mut table) = (0, Vec::new());
        for &(_, keys) in &self.lengths {
            for place in 0..width {
                let is_used = place < keys.div_ceil(page_size);
                let page = (next * step + 1) % pages;
                next += usize::from(is_used);
                let is_bad = self.values == AttentionValues::BadPages && place % 3 == 1;
                table.push(if is_used && !is_bad { page as u32 } else { [u32::MAX, pages as u32][place % 2] });
            }
        }
        table
    }

    /// Row of a sequence's key; `None` if its page is invalid.
    pub(crate) fn row(&self, sequence: usize, key: usize, table: &[u32]) -> Option<usize> {
        match self.places {
            AttentionStorage::Each => Some(sequence * self.most_keys() + key),
            AttentionStorage::Lengths(spare) => Some(sequence * (self.most_keys() + spare) + key),
            AttentionStorage::Offsets => Some(self.kv_offsets()[sequence] as usize + key),
            AttentionStorage::Paged(size) => {
                let page = table[sequence * self.table_width(size) + key / size] as usize;
                (page < self.pages()).then_some(page * size + key % size)
            }
        }
    }

    /// First row of every sequence, and the end of the last. The
    /// first row belongs to no sequence.
    pub(crate) fn kv_offsets(&self) -> Vec<u32> {
        let ends = self.lengths.iter().scan(1, |end, &(_, k)| {
            *end += k as u32;
            Some(*end)
        });
        std::iter::once(1).chain(ends).collect()
    }

    /// Keys (`salt` 2) or values (3): `[row][head][feature]`,
    /// representable in the format.
    /// NaN in rows of no sequence.
    pub(crate) fn keys(&self, salt: u64) -> Vec<f32> {
        let mut rng = self.rng(salt);
        let is_keys = salt == 2;
        let columns = if is_keys { self.dims.0 } else { self.dims.1 };
        let format = if is_keys { self.formats().k } else { self.formats().v };
        let width = self.heads.1 * columns;
        let mut all = vec![f32::NAN; self.rows() * width];
        let table = match self.places {
            AttentionStorage::Paged(size) => self.table(size),
            _ => Vec::new(),
        };
        let alike: Vec<f32> = (0..width).map(|_| normal(&mut rng)).collect();
        for (sequence, &(_, keys)) in self.lengths.iter().enumerate() {
            for key in 0..keys {
                let values: Vec<f32> = (0..width).map(|_| normal(&mut rng)).collect();
                let special = rng.random_range(0..width);
                let Some(row) = self.row(sequence, key, &table) else { continue };
                let to = &mut all[row * width..][..width];
                to.copy_from_slice(if is_keys && self.values == AttentionValues::Equal { &alike } else { &values });
                match self.values {
                    AttentionValues::NotFinite if is_keys && key + 1 == keys => to[special] = f32::NAN,
                    AttentionValues::NotFinite if !is_keys && key + 2 == keys => {
                        to[special] = if format == KvFormat::E4M3 { f32::NAN } else { f32::INFINITY };
                    }
                    AttentionValues::MinusInfinity if is_keys && (key % 5 == 2 || sequence % 3 == 2) => {
                        to.iter_mut().step_by(columns).for_each(|value| *value = f32::NEG_INFINITY);
                    }
                    AttentionValues::LargeScales => (0..self.heads.1).for_each(|head| {
                        let factor = self.largeness(row * self.heads.1 + head);
                        to[head * columns..][..columns].iter_mut().for_each(|value| *value *= factor);
                    }),
                    _ => {}
                }
            }
        }
        let place = |i: usize| (i / columns, i % columns / KV_BLOCK);
        all.iter_mut().enumerate().for_each(|(i, value)| *value = self.stored(format, *value, place(i)));
        all
    }

    /// Rounds a number to a format of K or V.
    fn stored(&self, format: KvFormat, value: f32, (row, block): (usize, usize)) -> f32 {
        let of_block = |low: f32, high: f32| {
            let scale = self.block_scale(format, row, block);
            (value / scale).round().clamp(low, high) * scale
        };
        match format {
            KvFormat::Q8_0 => of_block(-127.0, 127.0),
            KvFormat::Q4_0 => of_block(-8.0, 7.0),
            KvFormat::Plain(dtype) => dtype.decode(&dtype.encode(&[value]))[0],
            _ => qgemm_formats::float8::e4m3_to_f32(e4m3(value)),
        }
    }

    /// Scale of a block in a head's row, representable in f16.
    pub(crate) fn block_scale(&self, format: KvFormat, row: usize, block: usize) -> f32 {
        let step = if format == KvFormat::Q4_0 { 0.5 } else { 1.0 / 32.0 };
        step * (1.0 + ((row * 5 + block * 3) % 7) as f32 / 8.0) * self.largeness(row)
    }

    /// Extra magnitude of a row's numbers.
    fn largeness(&self, row: usize) -> f32 {
        if self.values == AttentionValues::LargeScales && row % 3 == 1 { 16384.0 } else { 1.0 }
    }

    /// Sinks of the query heads, some of which have no effect.
    pub(crate) fn head_sinks(&self) -> Vec<f32> {
        let mut rng = self.rng(6);
        let sink = |head: usize| if head % 5 == 3 { f32::NEG_INFINITY } else { 3.0 * normal(&mut rng) };
        (0..self.heads.0).map(sink).collect()
    }

    /// Output gates `[token][head][feature]`, representable in D's
    /// type, with infinities.
    pub(crate) fn gates(&self) -> Vec<f32> {
        let mut rng = self.rng(7);
        let gate = |i: usize| match i % 97 {
            13 => f32::INFINITY,
            31 => f32::NEG_INFINITY,
            _ => 2.0 * normal(&mut rng),
        };
        let gates: Vec<f32> = (0..self.tokens() * self.heads.0 * self.dims.1).map(gate).collect();
        self.dtype.decode(&self.dtype.encode(&gates))
    }

    /// Scales of the heads of keys (`salt` 4) or values (5).
    pub(crate) fn factors(&self, salt: u64) -> Vec<f32> {
        let mut rng = self.rng(salt);
        (0..self.heads.1).map(|_| rng.random_range(0.25..2.0)).collect()
    }
}

/// E4M3 code of a number.
pub(crate) fn e4m3(value: f32) -> u8 {
    if value.is_nan() { 0x7f } else { qgemm_formats::float8::f32_to_e4m3(value) }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A line for tables: `3x(1,70) 8/2x64 f16`, then non-default fields.
impl fmt::Display for AttentionCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.lengths[0];
        match self.lengths.iter().all(|&lengths| lengths == first) {
            true => write!(f, "{}x({},{})", self.lengths.len(), first.0, first.1)?,
            false => {
                let all: Vec<String> = self.lengths.iter().map(|(q, k)| format!("{q},{k}")).collect();
                write!(f, "({})", all.join(" "))?;
            }
        }
        let ((heads, kv_heads), (qk, v)) = (self.heads, self.dims);
        write!(f, " {heads}/{kv_heads}x{qk}")?;
        if qk != v {
            write!(f, "/{v}")?;
        }
        write!(f, " {}", self.dtype)?;
        if self.formats() != KvFormat::Plain(self.dtype).into() {
            write!(f, " kv={}", self.formats())?;
        }
        match self.places {
            AttentionStorage::Each => {}
            AttentionStorage::Lengths(spare) => write!(f, " lengths+{spare}")?,
            AttentionStorage::Offsets => f.write_str(" offsets")?,
            AttentionStorage::Paged(size) => write!(f, " pages={size}")?,
        }
        if self.values != AttentionValues::Normal {
            write!(f, " {}", self.values.name())?;
        }
        let flags = [
            (self.ragged, "ragged"),
            (!self.causal, "full"),
            (!self.lse, "no-lse"),
            (self.batch_invariant, "invariant"),
            (self.head_major, "head-major"),
            (self.sinks, "sinks"),
            (self.gated, "gated"),
            (self.every_kernel, "every kernel"),
        ];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, " {name}")?;
        }
        if let Some(window) = self.window {
            write!(f, " window={window}")?;
        }
        if let Some(mask) = self.mask {
            write!(f, " {}", mask.label())?;
        }
        if let Some(scale) = self.scale {
            write!(f, " scale={scale}")?;
        }
        if let Some(cap) = self.soft_cap {
            write!(f, " cap={cap}")?;
        }
        for (name, value) in [("gap", self.gap), ("offset", self.offset)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={}", self.seed)
    }
}

/// Types of activations, in turn.
pub(super) fn types(i: usize) -> DType {
    [DType::F16, DType::BF16, DType::F32][i % 3]
}

/// Numbers the seeds of cases, so that random values differ.
pub(super) fn numbered(cases: Vec<AttentionCase>) -> Vec<AttentionCase> {
    cases.into_iter().enumerate().map(|(i, case)| AttentionCase { seed: i as u64, ..case }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_share_no_pages_and_have_all_of_their_keys() {
        let case = AttentionCase {
            places: AttentionStorage::Paged(3),
            ..AttentionCase::new(&[(1, 7), (2, 3), (0, 0), (1, 1)], (2, 1), 8, DType::F32)
        };
        let table = case.table(3);
        let mut rows: Vec<usize> = Vec::new();
        for (sequence, &(_, keys)) in case.lengths.iter().enumerate() {
            rows.extend((0..keys).map(|key| case.row(sequence, key, &table).expect("all pages are good")));
        }
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 11);
        assert!(rows.iter().all(|row| *row < case.rows()));
        let keys = case.keys(2);
        assert_eq!(keys.iter().filter(|value| !value.is_nan()).count(), 11 * 8);
    }
}

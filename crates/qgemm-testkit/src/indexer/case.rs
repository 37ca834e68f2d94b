//! A case of `indexer`, as data.

use std::fmt;
use std::ops::Range;

use qgemm_hal::KvFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::activations::normal;
use crate::attention::e4m3;

/// Visible keys of the queries.
#[derive(Clone, Debug, PartialEq)]
pub enum IndexedKeys {
    /// All of this many keys.
    All(usize),
    /// Half-open ranges, one per query, in this many keys. Ranges may
    /// be invalid.
    Ranges(usize, Vec<(u32, u32)>),
    /// Keys of sequences, in pages of this size.
    Paged(usize, Vec<usize>),
}

/// Kind of queries, keys and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerValues {
    /// Normal numbers; NaN in keys that no query attends to.
    Normal,
    /// Small integers and powers of two: scores are exact, and many
    /// are equal.
    Integers,
    /// Normal, and NaN in every fifth key and in every fourth query.
    Nan,
    /// Normal, with an infinity in every fifth key if the format has
    /// one.
    Infinite,
    /// Integers, and a table with invalid pages.
    BadPages,
    /// No product above 0 in every second key: scores are zeros of
    /// both signs.
    Zeros,
}

/// An indexer run to check.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerCase {
    /// Queries, of all sequences.
    pub queries: usize,
    /// Heads per query.
    pub heads: usize,
    /// Features of a head.
    pub features: usize,
    /// Format of queries and keys.
    pub format: KvFormat,
    /// The keys.
    pub keys: IndexedKeys,
    /// Whether heads of queries have scales.
    pub q_scales: bool,
    /// Kind of queries, keys and weights.
    pub values: IndexerValues,
    /// The k of top-k, if keys are chosen.
    pub best: Option<usize>,
    /// Elements between rows of all operands, and between pages.
    pub gap: usize,
    /// Offset of operands from an aligned address, in elements.
    pub offset: usize,
    /// Whether a page's scales are behind its keys.
    pub scales_in_pages: bool,
    /// Seed of all values.
    pub seed: u64,
}

impl IndexerCase {
    /// Scores of normal numbers, contiguous.
    pub fn new(queries: usize, (heads, features): (usize, usize), format: KvFormat, keys: IndexedKeys) -> Self {
        Self {
            queries,
            heads,
            features,
            format,
            keys,
            q_scales: false,
            values: IndexerValues::Normal,
            best: None,
            gap: 0,
            offset: 0,
            scales_in_pages: false,
            seed: 0,
        }
    }

    /// Columns of scores.
    pub(super) fn most_keys(&self) -> usize {
        match &self.keys {
            IndexedKeys::All(keys) | IndexedKeys::Ranges(keys, _) => *keys,
            IndexedKeys::Paged(size, _) => self.table_width() * size,
        }
    }

    /// Queries per sequence.
    pub(super) fn each(&self) -> usize {
        match &self.keys {
            IndexedKeys::Paged(_, lengths) => self.queries.checked_div(lengths.len()).unwrap_or(0),
            _ => self.queries,
        }
    }

    /// Table entries per sequence: one more than the longest needs.
    pub(super) fn table_width(&self) -> usize {
        let IndexedKeys::Paged(size, lengths) = &self.keys else { return 0 };
        1 + lengths.iter().map(|keys| keys.div_ceil(*size)).max().unwrap_or(0)
    }

    /// Pages of the cache, one of them unused, and rows per page.
    /// Keys without pages are one page.
    pub(super) fn pages(&self) -> (usize, usize) {
        match &self.keys {
            IndexedKeys::All(keys) | IndexedKeys::Ranges(keys, _) => (1, *keys),
            IndexedKeys::Paged(size, lengths) => {
                (1 + lengths.iter().map(|keys| keys.div_ceil(*size)).sum::<usize>(), *size)
            }
        }
    }

    /// The page table. Pages are in any order; entries past the last
    /// are invalid.
    pub(super) fn table(&self) -> Vec<u32> {
        let IndexedKeys::Paged(size, lengths) = &self.keys else { return Vec::new() };
        let (pages, _) = self.pages();
        let mut order: Vec<u32> = (0..pages as u32).collect();
        order.shuffle(&mut self.rng(9));
        let (mut table, width) = (vec![u32::MAX; self.table_width() * lengths.len()], self.table_width());
        let mut next = order.into_iter();
        for (row, keys) in table.chunks_exact_mut(width).zip(lengths) {
            for place in &mut row[..keys.div_ceil(*size)] {
                *place = next.next().unwrap_or(0);
            }
        }
        if self.values == IndexerValues::BadPages {
            table.iter_mut().skip(1).step_by(3).for_each(|page| *page = pages as u32 + *page % 2);
        }
        table
    }

    /// Visible keys of a query, including those in invalid pages.
    pub(super) fn visible(&self, query: usize) -> Range<usize> {
        match &self.keys {
            IndexedKeys::All(keys) => 0..*keys,
            IndexedKeys::Ranges(keys, ranges) => {
                let (start, end) = ranges[query];
                start as usize..(end as usize).min(*keys)
            }
            IndexedKeys::Paged(_, lengths) => {
                let (sequence, i) = (query / self.each(), query % self.each());
                0..(lengths[sequence] + i + 1).saturating_sub(self.each())
            }
        }
    }

    /// Row of a visible key, counted through all pages; `None` in an
    /// invalid page.
    pub(super) fn row(&self, query: usize, key: usize, table: &[u32]) -> Option<usize> {
        let IndexedKeys::Paged(size, _) = &self.keys else { return Some(key) };
        let page = table[query / self.each() * self.table_width() + key / size] as usize;
        (page < self.pages().0).then_some(page * size + key % size)
    }

    fn rng(&self, salt: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ salt << 40)
    }

    fn is_exact(&self) -> bool {
        matches!(self.values, IndexerValues::Integers | IndexerValues::BadPages)
    }

    /// Whether every score is exact in f32, in any order of
    /// summation.
    pub(super) fn has_exact_scores(&self) -> bool {
        self.is_exact()
    }

    /// Queries `[queries, heads, features]`, representable in the
    /// format.
    pub(super) fn queries(&self) -> Vec<f32> {
        let mut rng = self.rng(1);
        let of_query = self.heads * self.features;
        let mut all: Vec<f32> = (0..self.queries * of_query).map(|_| self.stored(self.number(&mut rng))).collect();
        if self.values == IndexerValues::Nan {
            all.chunks_mut(of_query).skip(3).step_by(4).for_each(|query| query[of_query / 3] = f32::NAN);
        }
        all
    }

    /// Keys `[pages · page size, features]`, representable in the
    /// format. NaN in keys that no query attends to.
    pub(super) fn keys(&self, table: &[u32]) -> Vec<f32> {
        let mut rng = self.rng(2);
        let (pages, size) = self.pages();
        let mut is_visible = vec![false; pages * size];
        for query in 0..self.queries {
            self.visible(query).filter_map(|key| self.row(query, key, table)).for_each(|row| is_visible[row] = true);
        }
        let mut all = vec![f32::NAN; pages * size * self.features];
        for (row, (is_visible, values)) in is_visible.into_iter().zip(all.chunks_exact_mut(self.features)).enumerate() {
            let special = rng.random_range(0..self.features);
            values.iter_mut().for_each(|value| *value = self.stored(self.number(&mut rng)));
            let is_infinite = self.values == IndexerValues::Infinite && row % 5 == 2 && self.format.is_plain();
            match self.values {
                _ if !is_visible => values.fill(f32::NAN),
                IndexerValues::Nan if row % 5 == 2 => values[special] = f32::NAN,
                _ if is_infinite => values[special] = f32::INFINITY,
                IndexerValues::Zeros if row % 2 == 0 => values.fill(0.0),
                _ => {}
            }
        }
        all
    }

    /// Weights of heads, `[queries, heads]` (`salt` 3), or their
    /// scales (4).
    pub(super) fn of_heads(&self, salt: u64) -> Vec<f32> {
        let mut rng = self.rng(salt);
        let scale = |rng: &mut StdRng| if self.is_exact() { 0.5 } else { rng.random_range(0.25..2.0) };
        let number = |rng: &mut StdRng| if salt == 4 { scale(rng) } else { self.number(rng) };
        (0..self.queries * self.heads).map(|_| number(&mut rng)).collect()
    }

    /// Scales of keys. NaN for keys that no query attends to, and in
    /// the rest of the last page.
    pub(super) fn key_scales(&self, keys: &[f32]) -> Vec<f32> {
        let mut rng = self.rng(5);
        let scale = |keys: &[f32]| {
            let scale =
                if self.is_exact() { [0.5, 1.0, 2.0][rng.random_range(0..3)] } else { rng.random_range(0.25..2.0) };
            if keys.iter().all(|key| key.is_nan()) { f32::NAN } else { scale }
        };
        keys.chunks_exact(self.features).map(scale).collect()
    }

    fn number(&self, rng: &mut StdRng) -> f32 {
        if self.is_exact() { rng.random_range(-2..=2i8).into() } else { normal(rng) }
    }

    /// Rounds a number to the format.
    fn stored(&self, value: f32) -> f32 {
        match self.format {
            KvFormat::Plain(dtype) => dtype.decode(&dtype.encode(&[value]))[0],
            _ => qgemm_formats::float8::e4m3_to_f32(e4m3(value)),
        }
    }
}

/// A line for tables: `3 64x128 e4m3 ranges of 100`, then
/// non-default fields.
impl fmt::Display for IndexerCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queries, heads, features, format, gap, offset, seed, .. } = self;
        write!(f, "{queries} {heads}x{features} {format}")?;
        match &self.keys {
            IndexedKeys::All(keys) => write!(f, " {keys} keys")?,
            IndexedKeys::Ranges(keys, ranges) => {
                let all: Vec<String> = ranges.iter().map(|(start, end)| format!("{start}-{end}")).collect();
                write!(f, " {keys} keys ({})", all.join(" "))?;
            }
            IndexedKeys::Paged(size, lengths) => write!(f, " pages of {size} {lengths:?}")?,
        }
        if self.q_scales {
            f.write_str(" q-scales")?;
        }
        if self.values != IndexerValues::Normal {
            write!(f, " {:?}", self.values)?;
        }
        if let Some(best) = self.best {
            write!(f, " best={best}")?;
        }
        if self.scales_in_pages {
            f.write_str(" scales-in-pages")?;
        }
        for (name, value) in [("gap", *gap as u64), ("offset", *offset as u64), ("seed", *seed)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        Ok(())
    }
}

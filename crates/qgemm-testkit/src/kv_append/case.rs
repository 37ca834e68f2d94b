//! One appending to check: sequences and the cache as those of an attention, and how heads are turned.

use std::fmt;

use qgemm_api::{Rotary, RotaryScaling};
use qgemm_hal::RotaryPairs;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::activations::normal;
use crate::attention::AttentionCase;

/// How heads are turned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryCase {
    /// Features that are turned.
    pub dim: usize,
    /// Which of them form pairs.
    pub pairs: RotaryPairs,
    /// Base of the frequencies.
    pub base: f64,
    /// How frequencies are scaled.
    pub scaling: RotaryScaling,
    /// Angles come from tables of so many positions.
    pub tables: Option<usize>,
}

impl RotaryCase {
    /// All of a head, base 10000.
    pub fn new(dim: usize, pairs: RotaryPairs) -> Self {
        Self { dim, pairs, base: 10_000.0, scaling: RotaryScaling::None, tables: None }
    }

    /// As the API is told.
    pub(super) fn rotary(&self) -> Rotary {
        let rotary = match self.pairs {
            RotaryPairs::Neox => Rotary::neox(self.dim),
            RotaryPairs::Interleaved => Rotary::interleaved(self.dim),
        };
        match self.tables {
            // A gap between rows.
            Some(positions) => rotary.tables(positions).table_row_stride(self.table_row() as u64),
            None => rotary.base(self.base).scaling(self.scaling),
        }
    }

    /// Elements from one row of the tables to the next.
    pub(super) fn table_row(&self) -> usize {
        self.dim / 2 + 1
    }
}

/// One appending to check.
#[derive(Clone, Debug, PartialEq)]
pub struct KvAppendCase {
    /// Sequences, heads, types and where everything lies. Queries and keys are counted as those of an attention; what it says of masks and
    /// values plays no part.
    pub of: AttentionCase,
    /// Whether there are queries.
    pub has_queries: bool,
    /// How heads are turned, if they are.
    pub rotary: Option<RotaryCase>,
    /// Offset from key indices to positions, if positions are given.
    pub positions_from: Option<u32>,
}

impl KvAppendCase {
    /// Turned as NeoX.
    pub fn new(of: AttentionCase) -> Self {
        let rotary = RotaryCase::new(of.dims.0, RotaryPairs::Neox);
        Self { of, has_queries: true, rotary: Some(rotary), positions_from: None }
    }

    /// Values `[tokens, heads, columns]`: queries (`salt` 1), new keys (2) or new values (3). Every value is one of the type.
    pub(super) fn values(&self, salt: u64, heads: usize, columns: usize) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.of.seed ^ salt << 40);
        let count = self.of.tokens() * heads * columns;
        let values: Vec<f32> = (0..count).map(|_| normal(&mut rng)).collect();
        self.of.dtype.decode(&self.of.dtype.encode(&values))
    }

    /// Cosines (`salt` 6) or sines (7), with gaps between rows: any numbers, so that nothing is computed in their place.
    pub(super) fn table(&self, salt: u64) -> Vec<f32> {
        let Some(RotaryCase { tables: Some(positions), .. }) = self.rotary else { return Vec::new() };
        let mut rng = StdRng::seed_from_u64(self.of.seed ^ salt << 40);
        let row = self.rotary.map_or(0, |rotary| rotary.table_row());
        (0..positions * row).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    /// Key of each token, as place in its sequence; none of tokens that have none. With the sequence.
    pub(super) fn keys(&self) -> Vec<Option<(usize, usize)>> {
        let mut all = vec![None; self.of.tokens()];
        let offsets = self.of.q_offsets();
        for (sequence, &(queries, keys)) in self.of.lengths.iter().enumerate() {
            for i in 0..queries {
                if let Some(key) = (keys + i).checked_sub(queries) {
                    all[offsets[sequence] as usize + i] = Some((sequence, key));
                }
            }
        }
        all
    }

    /// Position of each token; of those without a key any.
    pub(super) fn positions(&self) -> Vec<u32> {
        let from = self.positions_from.unwrap_or(0);
        self.keys().iter().map(|key| key.map_or(u32::MAX, |(_, key)| from + key as u32)).collect()
    }
}

/// A line for tables: the sequences as those of an attention, then how heads are turned.
impl fmt::Display for KvAppendCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.of)?;
        if !self.has_queries {
            f.write_str(" no-queries")?;
        }
        match &self.rotary {
            None => f.write_str(" not turned")?,
            Some(RotaryCase { dim, pairs, base, scaling, tables }) => {
                write!(f, " {pairs}={dim}")?;
                match tables {
                    Some(positions) => write!(f, " tables={positions}")?,
                    None => write!(f, " base={base} {scaling:?}")?,
                }
            }
        }
        self.positions_from.map_or(Ok(()), |from| write!(f, " positions-from={from}"))
    }
}

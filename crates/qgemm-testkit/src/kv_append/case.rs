//! A case of `kv_append` (rotary embedding and KV-cache append),
//! as data.

use std::fmt;

use qgemm_api::{Rotary, RotaryScaling};
use qgemm_formats::DType;
use qgemm_hal::RotaryPairs;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::activations::normal;
use crate::attention::AttentionCase;

/// Rotary embedding of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryCase {
    /// Rotated features.
    pub dim: usize,
    /// Pairing of features.
    pub pairs: RotaryPairs,
    /// Base of the frequencies.
    pub base: f64,
    /// Scaling of frequencies.
    pub scaling: RotaryScaling,
    /// Positions in the cos/sin tables, if angles come from tables.
    pub tables: Option<usize>,
    /// Whether the rotation is the inverse one.
    pub inverse: bool,
}

impl RotaryCase {
    /// All features of a head, base 10000.
    pub fn new(dim: usize, pairs: RotaryPairs) -> Self {
        Self { dim, pairs, base: 10_000.0, scaling: RotaryScaling::None, tables: None, inverse: false }
    }

    /// The description for the API.
    pub(super) fn rotary(&self) -> Rotary {
        let rotary = match self.pairs {
            RotaryPairs::Neox => Rotary::neox(self.dim),
            RotaryPairs::Interleaved => Rotary::interleaved(self.dim),
        };
        let rotary = if self.inverse { rotary.inverse() } else { rotary };
        match self.tables {
            // Tables have a gap between rows.
            Some(positions) => rotary.tables(positions).table_row_stride(self.table_row() as u64),
            None => rotary.base(self.base).scaling(self.scaling),
        }
    }

    /// Elements from one row of the tables to the next.
    pub(super) fn table_row(&self) -> usize {
        self.dim / 2 + 1
    }
}

/// A KV-cache append to check.
#[derive(Clone, Debug, PartialEq)]
pub struct KvAppendCase {
    /// Sequences, heads, types and layout, as in `attention`. Masks
    /// and kinds of values do not apply.
    pub of: AttentionCase,
    /// Whether there are queries.
    pub has_queries: bool,
    /// Whether heads are rotated in place alone, without keys.
    pub in_place: bool,
    /// Hadamard rotation of queries and keys, and of values.
    pub hadamard: [bool; 2],
    /// Epsilon and type of gamma of the norm of query and key heads, if any.
    pub head_norm: Option<(f32, DType)>,
    /// The rotary embedding, if any.
    pub rotary: Option<RotaryCase>,
    /// Offset from key indices to positions, if positions are given.
    pub positions_from: Option<u32>,
}

impl KvAppendCase {
    /// With NeoX rotary pairs.
    pub fn new(of: AttentionCase) -> Self {
        let rotary = RotaryCase::new(of.dims.0, RotaryPairs::Neox);
        Self {
            of,
            has_queries: true,
            in_place: false,
            hadamard: [false; 2],
            head_norm: None,
            rotary: Some(rotary),
            positions_from: None,
        }
    }

    /// Whether queries change.
    pub(super) fn rotates_queries(&self) -> bool {
        self.has_queries && (self.rotary.is_some() || self.hadamard[0] || self.head_norm.is_some())
    }

    /// Values `[tokens, heads, columns]`, representable in the type:
    /// queries (`salt` 1), new keys (2) or new values (3).
    pub(super) fn values(&self, salt: u64, heads: usize, columns: usize) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.of.seed ^ salt << 40);
        let count = self.of.tokens() * heads * columns;
        let values: Vec<f32> = (0..count).map(|_| normal(&mut rng)).collect();
        self.of.dtype.decode(&self.of.dtype.encode(&values))
    }

    /// Gamma of queries (`salt` 8) or keys (9), representable in its type.
    pub(super) fn gamma(&self, salt: u64) -> Vec<f32> {
        let Some((_, dtype)) = self.head_norm else { return Vec::new() };
        let mut rng = StdRng::seed_from_u64(self.of.seed ^ salt << 40);
        let values: Vec<f32> = (0..self.of.dims.0).map(|_| rng.random_range(0.5..1.5)).collect();
        dtype.decode(&dtype.encode(&values))
    }

    /// Cosines (`salt` 6) or sines (7), with gaps between rows. They
    /// are random, so a kernel that computes angles fails.
    pub(super) fn table(&self, salt: u64) -> Vec<f32> {
        let Some(RotaryCase { tables: Some(positions), .. }) = self.rotary else { return Vec::new() };
        let mut rng = StdRng::seed_from_u64(self.of.seed ^ salt << 40);
        let row = self.rotary.map_or(0, |rotary| rotary.table_row());
        (0..positions * row).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    /// Sequence and key index of each token; `None` for tokens of no
    /// sequence.
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

    /// Position of each token; any number for tokens without a key.
    pub(super) fn positions(&self) -> Vec<u32> {
        let from = self.positions_from.unwrap_or(0);
        self.keys().iter().map(|key| key.map_or(u32::MAX, |(_, key)| from + key as u32)).collect()
    }
}

/// A line for tables: the text of `attention`, then the
/// rotations.
impl fmt::Display for KvAppendCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.of)?;
        if !self.has_queries {
            f.write_str(" no-queries")?;
        }
        if self.in_place {
            f.write_str(" in-place")?;
        }
        for (name, _) in ["k", "v"].into_iter().zip(self.hadamard).filter(|(_, is_rotated)| *is_rotated) {
            write!(f, " hadamard-{name}")?;
        }
        if let Some((eps, dtype)) = self.head_norm {
            write!(f, " head-norm={dtype},{eps}")?;
        }
        match &self.rotary {
            None => f.write_str(" not rotated")?,
            Some(RotaryCase { dim, pairs, base, scaling, tables, inverse }) => {
                write!(f, " {}{pairs}={dim}", if *inverse { "inverse-" } else { "" })?;
                match tables {
                    Some(positions) => write!(f, " tables={positions}")?,
                    None => write!(f, " base={base} {scaling:?}")?,
                }
            }
        }
        self.positions_from.map_or(Ok(()), |from| write!(f, " positions-from={from}"))
    }
}

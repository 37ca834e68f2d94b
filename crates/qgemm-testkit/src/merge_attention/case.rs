//! A case of `merge_attention`, as data.

use std::fmt;

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Kind of a case's log-sum-exps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeAttentionValues {
    /// Parts of the same order of magnitude.
    Similar,
    /// Magnitudes so different that one part outweighs the others.
    Different,
    /// Half of the parts −∞, with NaN in their results; every
    /// part in each fourth row.
    Empty,
    /// NaN or +∞ in some rows.
    Broken,
}

impl MergeAttentionValues {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Similar, Self::Different, Self::Empty, Self::Broken];
}

/// Order of the partial results in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeAttentionLayout {
    /// `[parts, tokens, heads, dim]`.
    PartsFirst,
    /// `[parts, heads, tokens, dim]`; D is `[heads, tokens, dim]`.
    HeadsFirst,
    /// `[tokens, parts, heads, dim]`.
    TokensFirst,
}

impl MergeAttentionLayout {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::PartsFirst, Self::HeadsFirst, Self::TokensFirst];
}

/// A merge to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeAttentionCase {
    /// Parts.
    pub parts: usize,
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Head dimension.
    pub dim: usize,
    /// Type of the partial results.
    pub dtype: DType,
    /// Type of D.
    pub d_dtype: DType,
    /// Kind of the log-sum-exps.
    pub values: MergeAttentionValues,
    /// Order in memory.
    pub layout: MergeAttentionLayout,
    /// Whether the log-sum-exp is written.
    pub lse: bool,
    /// Elements between the rows of the partial results.
    pub gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Offset of all operands from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl MergeAttentionCase {
    /// Similar parts in f32 without gaps, and the log-sum-exp.
    pub fn new(parts: usize, [tokens, heads, dim]: [usize; 3]) -> Self {
        Self {
            parts,
            tokens,
            heads,
            dim,
            dtype: DType::F32,
            d_dtype: DType::F32,
            values: MergeAttentionValues::Similar,
            layout: MergeAttentionLayout::PartsFirst,
            lse: true,
            gap: 0,
            d_gap: 0,
            offset: 0,
            seed: 1,
        }
    }

    /// Rows of D.
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.heads
    }

    /// Log-sum-exps, `[parts, tokens, heads]`.
    pub(super) fn log_sums(&self) -> Vec<f32> {
        use MergeAttentionValues as V;
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x3e26_0000_0000_0000);
        let rows = self.rows();
        let mut of_row = |row: usize| match self.values {
            V::Similar => rng.random_range(-3.0f32..8.0),
            V::Different => match rng.random_range(0..8) {
                0 => rng.random_range(-1.0f32..1.0) * 3e38,
                1 => rng.random_range(-1.0f32..1.0) * 1e-38,
                2 => rng.random_range(-1.0f32..1.0) * 1e5,
                _ => rng.random_range(-90.0..90.0),
            },
            V::Empty if row % 4 == 3 || rng.random_bool(0.5) => f32::NEG_INFINITY,
            V::Broken if rng.random_bool(0.2) => f32::NEG_INFINITY,
            V::Broken if row.is_multiple_of(3) && rng.random_bool(0.6) => [f32::NAN, f32::INFINITY][row / 3 % 2],
            V::Empty | V::Broken => rng.random_range(-9.0..9.0),
        };
        (0..self.parts * rows).map(|i| of_row(i % rows)).collect()
    }

    /// Partial results, `[parts, tokens, heads, dim]`, as stored. Parts
    /// without weight are NaN or infinite.
    pub(super) fn partial(&self, log_sums: &[f32]) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x3e26_0001_0000_0000);
        let mut number = |lse: f32| match lse == f32::NEG_INFINITY {
            true => [f32::NAN, f32::INFINITY][rng.random_range(0..2)],
            false => rng.random_range(-2.0..2.0),
        };
        let values = (0..log_sums.len() * self.dim).map(|i| number(log_sums[i / self.dim])).collect::<Vec<_>>();
        self.dtype.decode(&self.dtype.encode(&values))
    }
}

/// A line for tables: `3 parts of 5x2x64 f16->f32 Similar`, then
/// non-default fields.
impl fmt::Display for MergeAttentionCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parts, tokens, heads, dim, dtype, d_dtype, values, layout, lse, gap, d_gap, offset, seed } = self;
        write!(f, "{parts} parts of {tokens}x{heads}x{dim} {dtype}->{d_dtype} {values:?}")?;
        if *layout != MergeAttentionLayout::PartsFirst {
            write!(f, " {layout:?}")?;
        }
        if !lse {
            write!(f, " no-lse")?;
        }
        for (name, value) in [("gap", gap), ("d-gap", d_gap), ("offset", offset)] {
            if *value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}

//! A case of `linear_attention`, as data.

use std::fmt;

use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::{BetaSource, DecayPer, DecaySource};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::random::pick;

/// Kind of a case's decays and betas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearAttentionGates {
    /// Decays from 0.2 to 1, betas from 0 to 1.
    Usual,
    /// States that last for thousands of tokens.
    Slow,
    /// Betas of exactly 0, 1 and 2.
    Whole,
    /// Log-decays of 0, −∞, subnormals, and a few that underflow.
    Extreme,
    /// Log-decays that are NaN for some heads.
    Broken,
}

impl LinearAttentionGates {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Usual, Self::Slow, Self::Whole, Self::Extreme, Self::Broken];
}

/// A linear attention to check.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAttentionCase {
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
    /// Heads of values, and of keys.
    pub heads: (usize, usize),
    /// Features of a key, and of a value.
    pub dims: (usize, usize),
    /// Type of Q, K, V and D.
    pub dtype: DType,
    /// Decay; `None` without.
    pub decay: Option<(DecayPer, DecaySource)>,
    /// Whether there is a delta term.
    pub delta: bool,
    /// Source of beta; `None` for 1.
    pub beta: Option<BetaSource>,
    /// Whether value head `h` has key head `h % key_heads`.
    pub tiled: bool,
    /// Whether V is added to D.
    pub skip: bool,
    /// Whether queries and keys are normalized by the operation.
    /// Otherwise keys have a norm near 1.
    pub norm: bool,
    /// Kind of the gates.
    pub gates: LinearAttentionGates,
    /// Whether tokens are found by offsets.
    pub ragged: bool,
    /// Slots, and whether indices say which: some sequences have none then.
    pub slots: (usize, bool),
    /// Whether states begin as zero.
    pub from_zero: bool,
    /// Whether some tokens do not enter the stored state.
    pub advance: bool,
    /// Whether some tokens have no output.
    pub pending: bool,
    /// Whether tokens are processed one by one.
    pub batch_invariant: bool,
    /// Limit of the workspace, if it is not the default.
    pub max_workspace: Option<usize>,
    /// Elements between rows of Q, K and V, between tokens of gates,
    /// and, times 4, between slots.
    pub gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Offset of Q, K, V and D from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl LinearAttentionCase {
    /// Gated delta rule in f32 with normalized keys, a slot for each
    /// sequence.
    pub fn new(lengths: &[usize], heads: (usize, usize), dims: (usize, usize)) -> Self {
        Self {
            lengths: lengths.to_vec(),
            heads,
            dims,
            dtype: DType::F32,
            decay: Some((DecayPer::Head, DecaySource::Log)),
            delta: true,
            beta: Some(BetaSource::Given),
            tiled: false,
            skip: false,
            norm: true,
            gates: LinearAttentionGates::Usual,
            ragged: lengths.iter().any(|length| *length != lengths[0]),
            slots: (lengths.len(), false),
            from_zero: false,
            advance: false,
            pending: false,
            batch_invariant: false,
            max_workspace: None,
            gap: 0,
            d_gap: 0,
            offset: 0,
            seed: 1,
        }
    }

    /// KDA: a decay for each key feature.
    pub fn per_feature(self) -> Self {
        Self { decay: Some((DecayPer::Feature, DecaySource::Log)), ..self }
    }

    /// Mamba-2: no delta term, and V added to D.
    pub fn mamba(self) -> Self {
        Self { delta: false, skip: true, norm: false, ..self }
    }

    /// The decay is made of activations of type `dtype`.
    pub fn made(self, dtype: DType) -> Self {
        Self { decay: self.decay.map(|(per, _)| (per, DecaySource::Softplus(dtype))), ..self }
    }

    /// Tokens of all sequences. With offsets some belong to none.
    pub(super) fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + if self.ragged { 2 } else { 0 }
    }

    /// First token of each sequence, and the end of the last.
    pub(super) fn offsets(&self) -> Vec<u32> {
        let mut offsets = vec![u32::from(self.ragged)];
        for length in &self.lengths {
            offsets.push(offsets[offsets.len() - 1] + *length as u32);
        }
        offsets
    }

    /// Slot of each sequence; every third has none.
    pub(super) fn slot_of_each(&self) -> Vec<i32> {
        let (slots, by_index) = self.slots;
        let of = |sequence: usize| match by_index {
            false => sequence as i32,
            true if sequence % 3 == 2 => [-1, i32::MIN, slots as i32][sequence / 3 % 3],
            // Backwards, past slots of no sequence.
            true => (slots - 1 - sequence) as i32,
        };
        (0..self.lengths.len()).map(of).collect()
    }

    /// Counts of the tokens of each sequence, of which some exceed them.
    fn counts(&self, number: u64) -> Vec<u32> {
        let mut rng = self.rng(number);
        self.lengths.iter().map(|&length| rng.random_range(0..=length as u32 + 1)).collect()
    }

    /// Tokens of each sequence that enter its state.
    pub(super) fn advances(&self) -> Vec<u32> {
        self.counts(1)
    }

    /// First tokens of each sequence without output.
    pub(super) fn pendings(&self) -> Vec<u32> {
        self.counts(2)
    }

    /// Decays of a head.
    pub(super) fn head_decays(&self) -> usize {
        match self.decay {
            None => 0,
            Some((DecayPer::Head, _)) => 1,
            Some((DecayPer::Feature, _)) => self.dims.0,
        }
    }

    fn rng(&self, number: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ 0x11ea_0000_0000_0000 ^ number << 32)
    }

    /// Rows of `columns` numbers from −1 to 1 times `scale`, as stored.
    fn rows(&self, number: u64, rows: usize, columns: usize, scale: f32) -> Vec<f32> {
        let mut rng = self.rng(number);
        let values = (0..rows * columns).map(|_| rng.random_range(-1.0f32..1.0) * scale).collect::<Vec<_>>();
        self.dtype.decode(&self.dtype.encode(&values))
    }

    /// Queries, keys and values, as stored.
    pub(super) fn inputs(&self) -> [Vec<f32>; 3] {
        let ((heads, key_heads), (qk_dim, v_dim), tokens) = (self.heads, self.dims, self.tokens());
        // Rows with a norm near 1, or 2 when it does not matter.
        let unit = (3.0 / qk_dim as f32).sqrt();
        let of_keys = if self.norm { 2.0 * unit } else { 0.8 * unit };
        [
            self.rows(3, tokens * key_heads, qk_dim, 2.0 * unit),
            self.rows(4, tokens * key_heads, qk_dim, of_keys),
            self.rows(5, tokens * heads, v_dim, 2.0),
        ]
    }

    /// Log-decays, or `a`, as stored.
    pub(super) fn decays(&self) -> Vec<f32> {
        use LinearAttentionGates as G;
        let Some((_, source)) = self.decay else { return Vec::new() };
        let (mut rng, columns) = (self.rng(6), self.head_decays());
        let count = self.tokens() * self.heads.0 * columns;
        let extremes = [0.0, -0.0, f32::NEG_INFINITY, -1e-42, -1e-38, -3e38, -86.9, -87.5, -104.0];
        if let DecaySource::Softplus(dtype) = source {
            let of = |_| match self.gates {
                G::Slow => rng.random_range(-9.0f32..-6.0),
                G::Extreme => pick(&mut rng, &[-60.0, -17.0, -15.5, 0.0, 1.0, 60.0, f32::NEG_INFINITY, f32::INFINITY]),
                _ => rng.random_range(-4.0..3.0),
            };
            return dtype.decode(&dtype.encode(&(0..count).map(of).collect::<Vec<_>>()));
        }
        let heads = self.heads.0;
        let of = |i: usize| match self.gates {
            G::Slow => rng.random_range(-1e-3f32..0.0),
            G::Extreme if rng.random_bool(0.4) => pick(&mut rng, &extremes),
            G::Broken if i / columns % heads % 3 == 1 && rng.random_bool(0.02) => f32::NAN,
            _ => rng.random_range(-1.5..0.0),
        };
        (0..count).map(of).collect()
    }

    /// A_log and dt_bias.
    pub(super) fn decay_parameters(&self) -> [Vec<f32>; 2] {
        let (mut rng, heads) = (self.rng(7), self.heads.0);
        let rates = (0..heads).map(|_| rng.random_range(-1.0f32..0.5)).collect();
        let biases = (0..heads * self.head_decays().max(1)).map(|_| rng.random_range(-1.0f32..1.0)).collect();
        [rates, biases]
    }

    /// Betas.
    pub(super) fn betas(&self) -> Vec<f32> {
        let mut rng = self.rng(8);
        let of = |_| match self.gates {
            _ if self.beta == Some(BetaSource::Sigmoid) => rng.random_range(-6.0f32..6.0),
            LinearAttentionGates::Whole => pick(&mut rng, &[0.0, 1.0, 2.0]),
            _ => rng.random_range(0.0f32..1.0),
        };
        (0..self.tokens() * self.heads.0).map(of).collect()
    }

    /// Factors of V in D.
    pub(super) fn skips(&self) -> Vec<f32> {
        let mut rng = self.rng(9);
        (0..self.heads.0).map(|_| rng.random_range(-1.0f32..1.0)).collect()
    }

    /// States of all slots.
    pub(super) fn states(&self) -> Vec<f32> {
        let mut rng = self.rng(10);
        let count = self.slots.0 * self.heads.0 * self.dims.0 * self.dims.1;
        (0..count).map(|_| rng.random_range(-1.0f32..1.0)).collect()
    }
}

/// A line for tables: `3 + 1 tokens of 4/2x64/64 f16 head Usual`, then
/// non-default fields.
impl fmt::Display for LinearAttentionCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let lengths: Vec<String> = self.lengths.iter().take(SHOWN).map(usize::to_string).collect();
        let others = self.lengths.len().saturating_sub(SHOWN);
        let more = if others > 0 { format!(" + {others} more") } else { String::new() };
        let ((heads, key_heads), (qk_dim, v_dim)) = (self.heads, self.dims);
        let decay = match self.decay {
            None => "no-decay".to_owned(),
            Some((per, source)) => format!("{per:?}{source:?}").to_lowercase(),
        };
        let Self { dtype, gates, seed, .. } = self;
        let lengths = lengths.join(" + ");
        write!(f, "{lengths}{more} tokens of {heads}/{key_heads}x{qk_dim}/{v_dim} {dtype} {decay} {gates:?}")?;
        let flags = [
            (!self.delta, "no-delta"),
            (self.beta.is_none(), "no-beta"),
            (self.beta == Some(BetaSource::Sigmoid), "beta-logits"),
            (self.beta == Some(BetaSource::TimeStep), "time-step"),
            (self.tiled, "tiled"),
            (self.skip, "skip"),
            (!self.norm, "no-norm"),
            (self.ragged, "ragged"),
            (self.slots.1, "indices"),
            (self.from_zero, "from-zero"),
            (self.advance, "advance"),
            (self.pending, "pending"),
            (self.batch_invariant, "invariant"),
        ];
        flags.into_iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, name)| write!(f, " {name}"))?;
        if self.slots.0 != self.lengths.len() {
            write!(f, " slots={}", self.slots.0)?;
        }
        let workspace = self.max_workspace.unwrap_or(0);
        let numbers = [("gap", self.gap), ("d-gap", self.d_gap), ("offset", self.offset), ("workspace", workspace)];
        for (name, value) in numbers {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}

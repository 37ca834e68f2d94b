//! A case of `short_conv`, as data.

use std::fmt;

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::activations::normal;

/// Numbers of tokens that enter the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortConvAdvance {
    /// All, without counts.
    All,
    /// None: guesses are verified.
    None,
    /// Any number up to all.
    Some,
    /// More than there are.
    Beyond,
}

impl ShortConvAdvance {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::All, Self::None, Self::Some, Self::Beyond];
}

/// State of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvState {
    /// Slots of no sequence.
    pub spare: usize,
    /// Whether every third sequence has a slot that does not exist.
    pub absent: bool,
    /// Whether sequences start from zeros.
    pub from_zeros: bool,
    /// Tokens that enter.
    pub advance: ShortConvAdvance,
    /// Elements between slots.
    pub gap: usize,
}

impl ShortConvState {
    /// A slot for each sequence, read and written.
    pub const PLAIN: Self = Self { spare: 1, absent: false, from_zeros: false, advance: ShortConvAdvance::All, gap: 0 };
}

/// A convolution to check.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvCase {
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
    /// Whether sequences are found by offsets.
    pub ragged: bool,
    /// Bound for the tokens of a ragged sequence.
    pub most: Option<usize>,
    /// Tokens before the first ragged sequence.
    pub before: usize,
    /// Channels.
    pub channels: usize,
    /// Kernel width.
    pub width: usize,
    /// Type of X, D, gates and state.
    pub dtype: DType,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether SiLU follows.
    pub silu: bool,
    /// Input gate and output gate.
    pub gates: [bool; 2],
    /// The state, if there is one.
    pub state: Option<ShortConvState>,
    /// Elements between the rows of X and the gates.
    pub gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Offset of all operands from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl ShortConvCase {
    /// Equal sequences in f32 with bias, SiLU and state, without gates
    /// and gaps.
    pub fn new([sequences, count]: [usize; 2], channels: usize, width: usize) -> Self {
        Self {
            lengths: vec![count; sequences],
            ragged: false,
            most: None,
            before: 0,
            channels,
            width,
            dtype: DType::F32,
            bias: true,
            silu: true,
            gates: [false; 2],
            state: Some(ShortConvState::PLAIN),
            gap: 0,
            d_gap: 0,
            offset: 0,
            seed: 1,
        }
    }

    /// Ragged sequences of these lengths.
    pub fn ragged(lengths: &[usize], channels: usize, width: usize) -> Self {
        Self { lengths: lengths.to_vec(), ragged: true, ..Self::new([0, 0], channels, width) }
    }

    /// Tokens, also those of no sequence.
    pub(super) fn tokens(&self) -> usize {
        self.before + self.lengths.iter().sum::<usize>()
    }

    /// Maximum tokens of a sequence.
    pub(super) fn most(&self) -> usize {
        self.most.unwrap_or_else(|| self.lengths.iter().copied().max().unwrap_or(0))
    }

    /// Token offsets of the sequences, and their end.
    pub(super) fn offsets(&self) -> Vec<u32> {
        let ends = self.lengths.iter().scan(self.before as u32, |end, &count| {
            *end += count as u32;
            Some(*end)
        });
        std::iter::once(self.before as u32).chain(ends).collect()
    }

    /// First token of each sequence, and its number of tokens.
    pub(super) fn spans(&self) -> Vec<(usize, usize)> {
        let offsets = self.offsets();
        offsets.iter().zip(&self.lengths).map(|(&first, &count)| (first as usize, count.min(self.most()))).collect()
    }

    fn rng(&self, salt: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ 0xc0 << 56 ^ salt << 40)
    }

    /// `count` numbers, representable in `dtype`.
    pub(super) fn numbers(&self, salt: u64, count: usize, dtype: DType) -> Vec<f32> {
        let mut rng = self.rng(salt);
        let values: Vec<f32> = (0..count).map(|_| normal(&mut rng)).collect();
        dtype.decode(&dtype.encode(&values))
    }

    /// Number of slots.
    pub(super) fn slots(&self) -> usize {
        self.state.map_or(0, |state| (self.lengths.len() + state.spare).max(1))
    }

    /// Slot of each sequence: distinct ones, and some that do not exist.
    pub(super) fn slot_of_each(&self) -> Vec<i32> {
        let mut rng = self.rng(8);
        let mut slots: Vec<i32> = (0..self.slots() as i32).collect();
        slots.shuffle(&mut rng);
        slots.truncate(self.lengths.len());
        if self.state.is_some_and(|state| state.absent) {
            let absent = [-1, self.slots() as i32, i32::MIN, i32::MAX];
            slots.iter_mut().step_by(3).zip(absent.into_iter().cycle()).for_each(|(slot, absent)| *slot = absent);
        }
        slots
    }

    /// Given number of entering tokens of each sequence.
    pub(super) fn advance(&self) -> Option<Vec<u32>> {
        let mut rng = self.rng(9);
        let of_each: fn(&mut StdRng, usize) -> u32 = match self.state?.advance {
            ShortConvAdvance::All => return None,
            ShortConvAdvance::None => |_, _| 0,
            ShortConvAdvance::Some => |rng, count| rng.random_range(0..=count as u32),
            ShortConvAdvance::Beyond => |_, count| if count % 2 == 0 { u32::MAX } else { count as u32 + 1 },
        };
        Some(self.lengths.iter().map(|&count| of_each(&mut rng, count)).collect())
    }
}

/// A line for tables: `3x5 tokens x 64, width 4 f16 bias silu`, then
/// the other fields in use.
impl fmt::Display for ShortConvCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ragged, &self.lengths[..]) {
            (false, lengths) => write!(f, "{}x{}", lengths.len(), self.most())?,
            (true, lengths) if lengths.len() <= 12 => write!(f, "{lengths:?}")?,
            (true, lengths) => write!(f, "{} ragged of {}", lengths.len(), self.tokens())?,
        }
        write!(f, " tokens x {}, width {} {}", self.channels, self.width, self.dtype)?;
        let words =
            [(self.bias, "bias"), (self.silu, "silu"), (self.gates[0], "input-gate"), (self.gates[1], "output-gate")];
        words.into_iter().filter(|(is_there, _)| *is_there).try_for_each(|(_, word)| write!(f, " {word}"))?;
        match self.state {
            None => write!(f, " no-state")?,
            Some(ShortConvState { spare, absent, from_zeros, advance, gap }) => {
                write!(f, " spare={spare}")?;
                let words = [(absent, "absent"), (from_zeros, "from-zeros")];
                words.into_iter().filter(|(is_there, _)| *is_there).try_for_each(|(_, word)| write!(f, " {word}"))?;
                if advance != ShortConvAdvance::All {
                    write!(f, " advance={advance:?}")?;
                }
                if gap > 0 {
                    write!(f, " slot-gap={gap}")?;
                }
            }
        }
        let numbers = [
            ("most", self.most.unwrap_or(0)),
            ("before", self.before),
            ("gap", self.gap),
            ("d-gap", self.d_gap),
            ("offset", self.offset),
        ];
        for (name, value) in numbers.into_iter().filter(|(_, value)| *value > 0) {
            write!(f, " {name}={value}")?;
        }
        write!(f, " seed={}", self.seed)
    }
}

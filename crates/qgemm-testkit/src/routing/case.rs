//! A case of `routing` (router top-k and expert lists), as data.

use std::fmt;
use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::{ExpertGroups, Scoring};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::activations::normal;

/// Input of the routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingFrom {
    /// Logits of this type.
    Logits(DType),
    /// Given ids.
    Ids,
}

/// Kind of logits or ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingValues {
    /// Normal logits; distinct experts at random.
    Random,
    /// Normal logits, two per token of far larger magnitude; most
    /// slots have one expert.
    Skewed,
    /// Integers from −2 to 2, so that most are equal, with zeros of
    /// both signs; a token's experts are adjacent.
    Ties,
    /// One logit everywhere; one expert everywhere.
    AllEqual,
    /// NaN, infinities and the ends of the type's range among normal
    /// logits. Ids include −1, the number of experts, and the ends of
    /// i32.
    Special,
    /// Mostly NaN, with numbers in few tokens; nearly all ids are
    /// invalid.
    NearlyNone,
}

impl RoutingValues {
    /// Every kind.
    pub const ALL: [RoutingValues; 6] = [
        RoutingValues::Random,
        RoutingValues::Skewed,
        RoutingValues::Ties,
        RoutingValues::AllEqual,
        RoutingValues::Special,
        RoutingValues::NearlyNone,
    ];

    fn name(self) -> &'static str {
        match self {
            RoutingValues::Random => "random",
            RoutingValues::Skewed => "skewed",
            RoutingValues::Ties => "ties",
            RoutingValues::AllEqual => "all-equal",
            RoutingValues::Special => "special",
            RoutingValues::NearlyNone => "nearly-none",
        }
    }
}

/// A routing to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingCase {
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// The input.
    pub from: RoutingFrom,
    /// Scoring function of logits.
    pub scoring: Scoring,
    /// Whether weights are renormalized.
    pub renormalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether scores have a bias.
    pub bias: bool,
    /// Expert groups, if any.
    pub groups: Option<ExpertGroups>,
    /// Whether lists are made; always true for ids.
    pub lists: bool,
    /// Whether every token has a shared expert, in one more slot.
    pub shared: bool,
    /// First local expert and the end of them; all if none are stated.
    pub local: Option<[usize; 2]>,
    /// Kind of logits or ids.
    pub values: RoutingValues,
    /// Elements between the rows of the logits, filled with NaN.
    pub gap: usize,
    /// Offset of operands from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl RoutingCase {
    /// Softmax of normal f32 logits, with lists.
    pub fn new(tokens: usize, experts: usize, top_k: usize) -> Self {
        Self {
            tokens,
            experts,
            top_k,
            from: RoutingFrom::Logits(DType::F32),
            scoring: Scoring::Softmax,
            renormalize: false,
            scale: 1.0,
            bias: false,
            groups: None,
            lists: true,
            shared: false,
            local: None,
            values: RoutingValues::Random,
            gap: 0,
            offset: 0,
            seed: 1,
        }
    }

    /// Given ids.
    pub fn of_ids(tokens: usize, experts: usize, top_k: usize) -> Self {
        Self { from: RoutingFrom::Ids, ..Self::new(tokens, experts, top_k) }
    }

    /// Type of the logits; any type without logits.
    pub(super) fn dtype(&self) -> DType {
        match self.from {
            RoutingFrom::Logits(dtype) => dtype,
            RoutingFrom::Ids => DType::F32,
        }
    }

    /// Number of slots.
    pub(super) fn slots(&self) -> usize {
        self.tokens * self.slots_of_token()
    }

    /// Slots per token.
    pub(super) fn slots_of_token(&self) -> usize {
        self.top_k + usize::from(self.shared)
    }

    /// Experts, the shared one included.
    pub(super) fn all_experts(&self) -> usize {
        self.experts + usize::from(self.shared)
    }

    /// Experts with lists.
    pub(super) fn local_experts(&self) -> Range<usize> {
        self.local.map_or(0..self.all_experts(), |[first, end]| first..end)
    }

    /// Logits, contiguous and representable in the type.
    pub(super) fn logits(&self) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x1091_7500_0000_0000);
        let dtype = self.dtype();
        let largest = if dtype == DType::F16 { 65504.0 } else { 3e38 };
        let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, largest, -largest, 0.0, -0.0, -f32::NAN];
        let value = |i: usize, rng: &mut StdRng| {
            let (token, expert) = (i / self.experts, i % self.experts);
            match self.values {
                RoutingValues::Random => 2.0 * normal(rng),
                RoutingValues::Skewed if expert == token % self.experts || expert == self.experts / 2 => {
                    30.0 + normal(rng)
                }
                RoutingValues::Skewed => normal(rng) - 20.0,
                RoutingValues::Ties if rng.random_range(0..8) == 0 => -0.0,
                RoutingValues::Ties => rng.random_range(-2i32..=2) as f32,
                RoutingValues::AllEqual => 0.7,
                RoutingValues::Special if rng.random_range(0..4) == 0 => {
                    // Tokens differ: several infinities, one, or none.
                    specials[(token + rng.random_range(0..3)) % specials.len()]
                }
                RoutingValues::Special => 3.0 * normal(rng),
                RoutingValues::NearlyNone if token % 3 == 1 && rng.random_range(0..self.experts) < 3 => normal(rng),
                RoutingValues::NearlyNone => f32::NAN,
            }
        };
        let values: Vec<f32> = (0..self.tokens * self.experts).map(|i| value(i, &mut rng)).collect();
        dtype.decode(&dtype.encode(&values))
    }

    /// Bias per expert. Some are equal; in special cases some are
    /// NaN.
    pub(super) fn biases(&self) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x00b1_a500_0000_0000);
        let bias = |_| match rng.random_range(0..8) {
            0 if self.values == RoutingValues::Special => f32::NAN,
            0 | 1 => 0.25,
            _ => 0.3 * normal(&mut rng),
        };
        (0..self.experts).map(bias).collect()
    }

    /// Ids as the caller gives them.
    pub(super) fn ids(&self) -> Vec<i32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x01d5_0000_0000_0000);
        let experts = self.experts as i32;
        let bad = [-1, experts, i32::MIN, i32::MAX, experts + 1, -experts];
        let mut all: Vec<i32> = (0..experts).collect();
        let mut ids = Vec::with_capacity(self.slots());
        for token in 0..self.tokens {
            match self.values {
                RoutingValues::Random | RoutingValues::Special | RoutingValues::NearlyNone => {
                    all.partial_shuffle(&mut rng, self.top_k);
                    // The shuffled ids are the last.
                    ids.extend(all.iter().rev().take(self.top_k));
                }
                RoutingValues::Skewed => ids.extend((0..self.top_k as i32).map(|place| match place {
                    0 => experts / 2,
                    _ => (token as i32 / 7 + place) % experts,
                })),
                RoutingValues::Ties => ids.extend((0..self.top_k as i32).map(|i| (token as i32 + i) % experts)),
                RoutingValues::AllEqual => ids.extend((0..self.top_k).map(|_| experts - 1)),
            }
        }
        for (slot, id) in ids.iter_mut().enumerate() {
            let is_bad = match self.values {
                // Not in the first tokens, so that the kernel must find the
                // first bad one.
                RoutingValues::Special => slot > self.slots() / 3 && rng.random_range(0..5) == 0,
                RoutingValues::NearlyNone => rng.random_range(0..20) > 0,
                _ => false,
            };
            if is_bad {
                *id = bad[rng.random_range(0..bad.len())];
            }
        }
        ids
    }
}

/// A line for tables: `512x128 top-8 f32 softmax random`, then
/// non-default fields.
impl fmt::Display for RoutingCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, experts, top_k, from, scoring, renormalize, scale, bias, groups, lists, .. } = self;
        write!(f, "{tokens}x{experts} top-{top_k} ")?;
        match from {
            RoutingFrom::Logits(dtype) => write!(f, "{dtype} {} {}", scoring.name(), self.values.name())?,
            RoutingFrom::Ids => write!(f, "ids {}", self.values.name())?,
        }
        let flags = [(*renormalize, "renormalized"), (*bias, "biased"), (!*lists, "no-lists"), (self.shared, "shared")];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, " {name}")?;
        }
        if *scale != 1.0 {
            write!(f, " scale={scale}")?;
        }
        if let Some([first, end]) = self.local {
            write!(f, " local={first}..{end}")?;
        }
        if let Some(ExpertGroups { groups, chosen }) = groups {
            write!(f, " groups={chosen}/{groups}")?;
        }
        for (name, value) in [("gap", self.gap), ("offset", self.offset)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={}", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_values_are_what_they_say() {
        for dtype in DType::ALL {
            let from = RoutingFrom::Logits(dtype);
            let of = |values| RoutingCase { from, values, ..RoutingCase::new(64, 60, 4) }.logits();
            let special = of(RoutingValues::Special);
            assert!(special.iter().any(|v| v.is_nan()) && special.contains(&f32::INFINITY));
            assert!(special.iter().filter(|v| v.is_finite()).count() > 64 * 40);
            let nearly_none = of(RoutingValues::NearlyNone);
            assert!(nearly_none.iter().filter(|v| !v.is_nan()).count() < 64 * 5);
            assert!(of(RoutingValues::Ties).iter().any(|v| v.to_bits() == (-0.0f32).to_bits()));
        }
    }

    #[test]
    fn given_ids_are_distinct_experts_or_bad_where_they_should_be() {
        let of = |values| RoutingCase { values, ..RoutingCase::of_ids(100, 8, 4) };
        let ids = of(RoutingValues::Random).ids();
        for token in ids.chunks(4) {
            assert!((0..4).all(|i| (0..8).contains(&token[i]) && !token[..i].contains(&token[i])), "{token:?}");
        }
        let bad = |values| of(values).ids().iter().filter(|id| !(0..8).contains(*id)).count();
        assert!((20..120).contains(&bad(RoutingValues::Special)) && bad(RoutingValues::NearlyNone) > 350);
        assert_eq!(bad(RoutingValues::Skewed) + bad(RoutingValues::Ties) + bad(RoutingValues::AllEqual), 0);
    }
}

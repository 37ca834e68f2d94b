//! [`Cost`]: expected time of a launch by cause, and its [`Bound`].

use serde::{Deserialize, Serialize};

/// P-norm of the roofline. Arithmetic and memory do not overlap perfectly:
/// two equal times `t` take `2^(1/4) t` together. Without this bend
/// the choice flips where two configs cross.
pub(super) const ROOFLINE_P: f64 = 4.0;

/// Expected time of a launch by cause, in seconds.
///
/// Arithmetic and memory overlap, so the parts sum
/// to more than `seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cost {
    /// Multiply-adds, padding included.
    pub math: f64,
    /// Traffic of the operands.
    pub memory: f64,
    /// Starting and finishing tiles.
    pub tiles: f64,
    /// Split-K fix-up: writing, waiting for and adding partial sums.
    pub fixup: f64,
    /// The X prologue.
    pub prologue: f64,
    /// The launch itself.
    pub launch: f64,
    /// The total.
    pub seconds: f64,
}

/// The bottleneck of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Bound {
    /// Traffic of the operands.
    Memory,
    /// Multiply-adds.
    Math,
    /// Starting and finishing tiles.
    Tiles,
    /// Adding up partial sums.
    Fixup,
    /// The X prologue.
    Prologue,
    /// The launch itself.
    Launch,
}

impl Bound {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Math => "math",
            Bound::Tiles => "tiles",
            Bound::Fixup => "fixup",
            Bound::Prologue => "prologue",
            Bound::Launch => "launch",
        }
    }
}

impl Cost {
    /// Cost of an operation that moves bytes for `memory` seconds and
    /// multiplies for `math` seconds at the same time.
    pub fn of_parts(memory: f64, math: f64, launch: f64, seconds: f64) -> Self {
        Self { math, memory, tiles: 0.0, fixup: 0.0, prologue: 0.0, launch, seconds }
    }

    /// Cost of `count` such operations, run one after
    /// another in a single launch.
    pub fn repeated(self, count: usize) -> Self {
        let times = |seconds: f64| seconds * count as f64;
        Self {
            math: times(self.math),
            memory: times(self.memory),
            tiles: times(self.tiles),
            fixup: times(self.fixup),
            prologue: times(self.prologue),
            launch: self.launch,
            seconds: self.launch + times(self.seconds - self.launch),
        }
    }

    /// The part that takes longest; the first of equals.
    pub fn bound(&self) -> Bound {
        let Self { math, memory, tiles, fixup, prologue, launch, .. } = *self;
        let rest = [
            (Bound::Math, math),
            (Bound::Tiles, tiles),
            (Bound::Fixup, fixup),
            (Bound::Prologue, prologue),
            (Bound::Launch, launch),
        ];
        rest.into_iter().fold((Bound::Memory, memory), |most, part| if part.1 > most.1 { part } else { most }).0
    }
}

/// Share of a rate.
pub(super) fn efficiency(per_mille: u32) -> f64 {
    f64::from(per_mille.max(1)) / 1000.0
}

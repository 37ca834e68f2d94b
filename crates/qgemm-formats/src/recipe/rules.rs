//! [`Rule`]: exceptions of a recipe, and the conditions they hold under.

use super::TypeChooser;
use crate::desc::{Format, FormatDesc};
use crate::formats::{q3_k, q4_k, q5_k};

/// The architecture with rules of its own.
pub(super) const FALCON: &str = "falcon";

/// Format of tensors for which all conditions hold.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) when: &'static [When],
    pub(super) format: &'static FormatDesc,
}

/// Condition of a rule.
#[derive(Debug)]
pub(super) enum When {
    /// Four or more query heads share keys and values.
    GroupedQueries,
    /// The first tensors of the role, by number.
    First(usize),
    /// The first layers: one n-th of all.
    FirstPart(usize),
    /// The first and last eighth of layers, and every third between them.
    MoreBits,
    /// Layers have eight experts.
    EightExperts,
    /// An importance matrix is given.
    Importance,
    /// The architecture is Falcon.
    Falcon,
    /// The condition does not hold.
    Not(&'static When),
}

/// A tensor's number among those of its role or its layer, and their count.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    pub(super) at: usize,
    pub(super) count: usize,
}

impl When {
    fn holds(&self, model: &TypeChooser, layer: Layer) -> bool {
        let Layer { at, count } = layer;
        match self {
            Self::GroupedQueries => model.shape.group() >= 4,
            Self::First(n) => at < *n,
            Self::FirstPart(n) => at < count / n,
            // The difference is negative in the first eighth, which
            // comes before.
            Self::MoreBits => at < count / 8 || at >= 7 * count / 8 || (at - count / 8) % 3 == 2,
            Self::EightExperts => model.shape.experts == 8,
            Self::Importance => model.options.has_importance,
            Self::Falcon => model.shape.architecture == FALCON,
            Self::Not(other) => !other.holds(model, layer),
        }
    }
}

/// Format of the first rule that holds.
pub(super) fn first(rules: &[Rule], model: &TypeChooser, layer: Layer) -> Option<Format> {
    let holds = |rule: &&Rule| rule.when.iter().all(|when| when.holds(model, layer));
    rules.iter().find(holds).map(|rule| Format::new(rule.format))
}

/// Format of a value projection in models of 70 billion weights, where
/// eight query heads share it and more bits cost little.
pub(super) fn of_70b(format: Format) -> Format {
    let is_small = [&q3_k::Q3_K, &q4_k::Q4_K].into_iter().any(|small| format == Format::new(small));
    if is_small { Format::new(&q5_k::Q5_K) } else { format }
}

//! [`RecipeDesc`]: a recipe as data. Its exceptions are [`Rule`]s with
//! conditions.

use crate::desc::{Format, FormatDesc};
use crate::formats::{q3_k, q4_k, q5_k};

/// Description of a recipe.
#[derive(Debug)]
pub(super) struct RecipeDesc {
    pub(super) name: &'static str,
    /// Another name of the recipe.
    pub(super) alias: Option<&'static str>,
    /// `general.file_type` (`enum llama_ftype`).
    pub(super) file_type: u32,
    /// Format of tensors without a rule.
    pub(super) format: &'static FormatDesc,
    /// Rules of the value projection, also where it is fused with others.
    pub(super) attn_v: &'static [Rule],
    pub(super) attn_output: &'static [Rule],
    pub(super) ffn_down: &'static [Rule],
    /// Format of an embedding that is not the output.
    pub(super) embedding: Option<&'static FormatDesc>,
    /// Whether only stacks of experts have the format, and others Q8_0.
    pub(super) only_experts: bool,
    /// Whether the format needs an importance matrix, except of the embedding and output.
    pub(super) needs_importance: bool,
}

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

/// Properties of a model that conditions ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Query heads for each head of keys and values.
    pub(super) group: usize,
    pub(super) experts: usize,
    pub(super) has_importance: bool,
    pub(super) is_falcon: bool,
}

/// A tensor's number among those of its role or its layer, and their count.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    pub(super) at: usize,
    pub(super) count: usize,
}

impl When {
    fn holds(&self, model: Facts, layer: Layer) -> bool {
        let Layer { at, count } = layer;
        match self {
            Self::GroupedQueries => model.group >= 4,
            Self::First(n) => at < *n,
            Self::FirstPart(n) => at < count / n,
            // The difference is negative in the first eighth, which
            // comes before.
            Self::MoreBits => at < count / 8 || at >= 7 * count / 8 || (at - count / 8) % 3 == 2,
            Self::EightExperts => model.experts == 8,
            Self::Importance => model.has_importance,
            Self::Falcon => model.is_falcon,
            Self::Not(other) => !other.holds(model, layer),
        }
    }
}

/// Format of the first rule that holds.
pub(super) fn first(rules: &[Rule], model: Facts, layer: Layer) -> Option<Format> {
    let holds = |rule: &&Rule| rule.when.iter().all(|when| when.holds(model, layer));
    rules.iter().find(holds).map(|rule| Format::new(rule.format))
}

/// Format of a value projection in models of 70 billion weights, where
/// eight query heads share it and more bits cost little.
pub(super) fn of_70b(format: Format) -> Format {
    let is_small = [&q3_k::Q3_K, &q4_k::Q4_K].into_iter().any(|small| format == Format::new(small));
    if is_small { Format::new(&q5_k::Q5_K) } else { format }
}

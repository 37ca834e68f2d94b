//! Ranks of a plan, and their parts of tensors, as plan files
//! have them.

use std::ops::Range;

use qgemm_formats::ShardAxis;
use serde::{Deserialize, Serialize};

use super::mismatch::wrong;
use crate::error::Error;

/// A rank among the ranks that run a model together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks {
    /// The rank, below `world`.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
}

/// A rank's part of a tensor: output features (`rows`) or input
/// features (`columns`), of experts those of each; or some of the
/// experts (`experts`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedShard {
    /// `rows`, `columns` or `experts`.
    pub axis: String,
    /// First feature or expert.
    pub first: usize,
    /// Number of features or experts.
    pub count: usize,
}

/// Division of a tensor: what its shards are ranges of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Division {
    Features(ShardAxis),
    Experts,
}

impl PlannedShard {
    pub(super) fn new(axis: ShardAxis, features: &Range<usize>) -> Self {
        let axis = if axis == ShardAxis::Rows { "rows" } else { "columns" };
        Self { axis: axis.into(), first: features.start, count: features.len() }
    }

    pub(super) fn of_experts(experts: &Range<usize>) -> Self {
        Self { axis: "experts".into(), first: experts.start, count: experts.len() }
    }

    /// Division of the tensor.
    pub(super) fn division(&self) -> Result<Division, Error> {
        match self.axis.as_str() {
            "rows" => Ok(Division::Features(ShardAxis::Rows)),
            "columns" => Ok(Division::Features(ShardAxis::Columns)),
            "experts" => Ok(Division::Experts),
            other => Err(wrong("shards.axis", "rows, columns or experts", other)),
        }
    }

    /// Experts of a `routing`.
    pub(super) fn experts(&self) -> Result<Range<usize>, Error> {
        match self.division()? {
            Division::Experts => Ok(self.range()),
            Division::Features(_) => Err(wrong("local_experts.axis", "experts", &self.axis)),
        }
    }

    /// The features or experts.
    pub(super) fn range(&self) -> Range<usize> {
        self.first..self.first.saturating_add(self.count)
    }
}

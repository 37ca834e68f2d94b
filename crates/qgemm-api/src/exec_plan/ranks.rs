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
/// features (`columns`). Of experts, those of each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedShard {
    /// `rows` or `columns`.
    pub axis: String,
    /// First feature.
    pub first: usize,
    /// Number of features.
    pub count: usize,
}

impl PlannedShard {
    pub(super) fn new(axis: ShardAxis, features: &Range<usize>) -> Self {
        let axis = if axis == ShardAxis::Rows { "rows" } else { "columns" };
        Self { axis: axis.into(), first: features.start, count: features.len() }
    }

    /// The axis.
    pub(super) fn axis(&self) -> Result<ShardAxis, Error> {
        match self.axis.as_str() {
            "rows" => Ok(ShardAxis::Rows),
            "columns" => Ok(ShardAxis::Columns),
            other => Err(wrong("weight.shards.axis", "rows or columns", other)),
        }
    }

    /// The features.
    pub(super) fn features(&self) -> Range<usize> {
        self.first..self.first.saturating_add(self.count)
    }
}

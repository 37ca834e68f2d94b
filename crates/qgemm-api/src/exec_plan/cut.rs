//! A rank's parts of the tensors of a model.

use std::ops::Range;

use qgemm_formats::{HostExperts, HostWeight, ShardAxis};

use super::file::PlannedWeight;
use super::mismatch::{expect, wrong};
use super::operands::PlannedHeads;
use super::ranks::{Division, PlannedShard};
use super::recurrent::part_of;
use crate::error::Error;

impl PlannedWeight {
    /// Parts of whole tensors. Rows share their memory.
    pub(super) fn of_tensors(&self, whole: Vec<HostWeight>) -> Result<Vec<HostWeight>, Error> {
        if self.shards.is_empty() {
            return Ok(whole);
        }
        expect(format!("{}.shards", self.region), self.tensors.len(), self.shards.len())?;
        let part = |(weight, shard): (HostWeight, &PlannedShard)| match shard.division()? {
            Division::Features(axis) => Ok(weight.slice(axis, shard.range())?),
            Division::Experts => Err(wrong("weight.shards.axis", "rows or columns", &shard.axis)),
        };
        whole.into_iter().zip(&self.shards).map(part).collect()
    }

    /// Ids of the experts that this rank holds; `None` if it holds
    /// all of them.
    pub(super) fn local_experts(&self) -> Result<Option<Range<usize>>, Error> {
        let Some(experts) = self.experts else { return Ok(None) };
        match self.shard_of_experts()? {
            Some((Division::Experts, ids)) => {
                expect(format!("{}.shards.count", self.region), experts, ids.len())?;
                Ok(Some(ids))
            }
            _ => Ok(None),
        }
    }

    /// Features of each expert, from all.
    pub(super) fn of_experts(&self, whole: HostExperts) -> Result<HostExperts, Error> {
        match self.shard_of_experts()? {
            Some((Division::Features(axis), features)) => Ok(whole.slice(axis, features)?),
            _ => Ok(whole),
        }
    }

    /// The part of experts: gate and up are one stack.
    fn shard_of_experts(&self) -> Result<Option<(Division, Range<usize>)>, Error> {
        let Some(shard) = self.shards.first() else { return Ok(None) };
        if let Some(other) = self.shards.iter().find(|other| *other != shard) {
            let [expected, got] = [shard, other].map(|shard| format!("{} {:?}", shard.axis, shard.range()));
            expect(format!("{}.shards", self.region), expected, got)?;
        }
        Ok(Some((shard.division()?, shard.range())))
    }

    /// Biases of what the rank has, from those of whole tensors with
    /// this number of experts; 1 without experts.
    pub(super) fn of_biases(&self, whole: Vec<Vec<f32>>, experts: usize) -> Result<Vec<f32>, Error> {
        let Some(first) = self.shards.first() else { return Ok(whole.concat()) };
        // Of experts and of pairs, one part has several vectors.
        let pair = if self.gated && whole.len() == 1 { 2 } else { 1 };
        let vectors = experts.saturating_mul(pair).max(1);
        let mut biases = Vec::new();
        for (part, shard) in whole.iter().zip(self.shards.iter().chain(std::iter::repeat(first))) {
            let features = (part.len() / vectors).max(1);
            match shard.division()? {
                Division::Features(ShardAxis::Rows) => {
                    for vector in part.chunks(features) {
                        biases.extend_from_slice(part_of(vector, shard.range())?);
                    }
                }
                Division::Features(_) => biases.extend_from_slice(part),
                Division::Experts => {
                    let at = |expert: usize| expert.saturating_mul(features).saturating_mul(pair);
                    biases.extend_from_slice(part_of(part, at(shard.range().start)..at(shard.range().end))?);
                }
            }
        }
        Ok(biases)
    }
}

impl PlannedHeads {
    /// Sinks of the rank's heads, from those of all.
    pub(super) fn sinks_of(&self, whole: Vec<f32>) -> Result<Vec<f32>, Error> {
        let first = self.first_head.unwrap_or(0);
        part_of(&whole, first..first.saturating_add(self.heads)).map(<[f32]>::to_vec)
    }
}

//! A rank's parts of the tensors of a model.

use qgemm_formats::{HostExperts, HostWeight};

use super::file::PlannedWeight;
use super::mismatch::{expect, wrong};
use super::operands::PlannedHeads;
use super::ranks::PlannedShard;
use crate::error::Error;

impl PlannedWeight {
    /// Parts of whole tensors. Rows share their memory.
    pub(super) fn of_tensors(&self, whole: Vec<HostWeight>) -> Result<Vec<HostWeight>, Error> {
        if self.shards.is_empty() {
            return Ok(whole);
        }
        expect(format!("{}.shards", self.region), self.tensors.len(), self.shards.len())?;
        let part = |(weight, shard): (HostWeight, &PlannedShard)| Ok(weight.slice(shard.axis()?, shard.features())?);
        whole.into_iter().zip(&self.shards).map(part).collect()
    }

    /// Parts of all experts.
    pub(super) fn of_experts(&self, whole: HostExperts) -> Result<HostExperts, Error> {
        let Some(shard) = self.shards.first() else { return Ok(whole) };
        // Gate and up are one stack.
        if let Some(other) = self.shards.iter().find(|other| *other != shard) {
            let [expected, got] = [shard, other].map(|shard| format!("{} {:?}", shard.axis, shard.features()));
            expect(format!("{}.shards", self.region), expected, got)?;
        }
        Ok(whole.slice(shard.axis()?, shard.features())?)
    }

    /// Biases of the features that the rank has, from those of the
    /// whole tensors.
    pub(super) fn of_biases(&self, whole: Vec<Vec<f32>>) -> Result<Vec<f32>, Error> {
        let Some(first) = self.shards.first() else { return Ok(whole.concat()) };
        // Of experts and of pairs, one part has several vectors.
        let pair = if self.gated && whole.len() == 1 { 2 } else { 1 };
        let vectors = self.experts.unwrap_or(1).saturating_mul(pair).max(1);
        let mut biases = Vec::new();
        for (part, shard) in whole.iter().zip(self.shards.iter().chain(std::iter::repeat(first))) {
            match shard.axis()? {
                qgemm_formats::ShardAxis::Rows => {
                    let features = (part.len() / vectors).max(1);
                    for vector in part.chunks(features) {
                        biases.extend_from_slice(within(vector, shard.features())?);
                    }
                }
                _ => biases.extend_from_slice(part),
            }
        }
        Ok(biases)
    }
}

impl PlannedHeads {
    /// Sinks of the rank's heads, from those of all.
    pub(super) fn sinks_of(&self, whole: Vec<f32>) -> Result<Vec<f32>, Error> {
        let first = self.first_head.unwrap_or(0);
        within(&whole, first..first.saturating_add(self.heads)).map(<[f32]>::to_vec)
    }
}

fn within(values: &[f32], range: std::ops::Range<usize>) -> Result<&[f32], Error> {
    let got = format!("{range:?}");
    values.get(range).ok_or_else(|| wrong("weight.shards", &format!("a range of {}", values.len()), &got))
}

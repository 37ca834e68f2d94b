//! [`Part`]: the part of a network that one of several ranks has.
//!
//! Query heads go to ranks with their KV heads, recurrent mixers
//! with their heads or channels. Features between the products of a
//! feed-forward part go in whole blocks of the format behind them,
//! or experts as a whole, and rows of the head in runs. Products
//! before them are column-parallel, products behind them
//! row-parallel. Everything else is on every rank.

use std::collections::HashMap;
use std::ops::Range;

use qgemm_formats::{ShardAxis, shard_of};

use super::divided_heads::{between, heads_of, linear_heads, multiple_of};
use super::file::PlannedRows;
use super::ranks::{PlannedShard, Ranks};
use crate::architecture::{
    AttentionTensors, ConvTensors, ExpertTensors, FeedForward, Heads, LayerTensors, LinearForm, LinearNumbers,
    LinearTensors, Matrix, Mixer, Network, Rows,
};
use crate::error::Error;

/// Features of a feed-forward part, and rows of a head, are cut
/// at multiples of this: rows of vector loads, and of scales that
/// rows share.
const RUN: usize = 32;

/// One rank's part of a network; the whole of it without ranks.
#[derive(Debug, Default)]
pub(super) struct Part {
    ranks: Option<Ranks>,
    /// Whether ranks have whole experts.
    expert_parallel: bool,
    /// The rank's heads, products and their features.
    network: Option<Network>,
    /// Parts of what is cut, by tensor and its rows.
    shards: HashMap<(String, Option<PlannedRows>), PlannedShard>,
    /// Channels of convolutions, by the kernel's tensor.
    channels: HashMap<String, Vec<PlannedShard>>,
    /// Rows of the head of each rank, if it is cut.
    vocabulary: Option<Vec<usize>>,
    /// Query heads.
    heads: Range<usize>,
    /// Value heads of linear attention.
    linear_heads: Range<usize>,
}

impl Part {
    /// The part of a rank, for inference.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank beyond the world,
    /// [`Error::Indivisible`] for a network that cannot be divided.
    pub fn of(network: &Network, ranks: Option<Ranks>, train: bool, expert_parallel: bool) -> Result<Self, Error> {
        let Some(ranks) = ranks else { return Ok(Self::default()) };
        let Ranks { rank, world } = ranks;
        if rank >= world {
            return Err(Error::OutOfRange { name: "rank", least: 0, most: world.saturating_sub(1), got: rank });
        }
        if world == 1 {
            return Ok(Self::default());
        }
        if train || !network.pre_norm {
            let what = if train { "a training step" } else { "an encoder" }.to_owned();
            return Err(Error::Indivisible { what, world, why: "only inference of decoders is divided".into() });
        }
        let mut part = Self { ranks: Some(ranks), expert_parallel, ..Self::default() };
        let mut own = network.clone();
        let (heads, kv_heads) = heads_of(network, ranks)?;
        (own.heads.heads, own.heads.kv_heads) = (heads.len(), kv_heads.len());
        for layer in &mut own.layers {
            part.layer(layer, network.heads, [&heads, &kv_heads])?;
        }
        part.heads = heads;
        if let Some(head) = &mut own.head {
            part.head(head)?;
        }
        part.network = Some(own);
        Ok(part)
    }

    /// The network of the part, of which `whole` is all.
    pub fn network<'a>(&'a self, whole: &'a Network) -> &'a Network {
        self.network.as_ref().unwrap_or(whole)
    }

    /// The rank, if there are several.
    pub fn ranks(&self) -> Option<Ranks> {
        self.ranks
    }

    /// Whether there are other ranks.
    pub fn is_one_of_many(&self) -> bool {
        self.ranks.is_some()
    }

    /// Rows of the head of each rank, if it is cut.
    pub fn vocabulary(&self) -> Option<&[usize]> {
        self.vocabulary.as_deref()
    }

    /// First query head, where it is not that of the model.
    pub fn first_head(&self) -> Option<usize> {
        Some(self.heads.start).filter(|first| *first > 0)
    }

    /// Value heads of linear attention, where these are not all.
    pub fn first_linear_head(&self) -> Option<usize> {
        Some(self.linear_heads.start).filter(|_| !self.linear_heads.is_empty())
    }

    /// The rank's part of a vector of `each` numbers for every value head
    /// of linear attention, of which it has `count`; none for all.
    pub fn linear_features(&self, each: usize, count: usize) -> Option<PlannedShard> {
        let first = self.first_linear_head()? * each;
        Some(PlannedShard::new(ShardAxis::Rows, &(first..first + count)))
    }

    /// Channels of a convolution; none for all.
    pub fn channels(&self, kernel: &str) -> Vec<PlannedShard> {
        self.channels.get(kernel).cloned().unwrap_or_default()
    }

    /// Whether the rank has a part of the product of a whole tensor.
    pub fn cuts(&self, tensor: &str) -> bool {
        self.shards.contains_key(&(tensor.to_owned(), None))
    }

    /// Parts of a product's tensors; none for whole tensors.
    pub fn shards(&self, sources: &[(String, Option<PlannedRows>)]) -> Vec<PlannedShard> {
        sources.iter().filter_map(|source| self.shards.get(source).cloned()).collect()
    }

    fn layer(
        &mut self,
        layer: &mut LayerTensors,
        of: Heads,
        [heads, kv_heads]: [&Range<usize>; 2],
    ) -> Result<(), Error> {
        match &mut layer.mixer {
            Some((_, Mixer::Attention(attention))) => {
                let features = |heads: &Range<usize>| heads.start * of.head_dim..heads.end * of.head_dim;
                self.attention(attention, [features(heads), features(kv_heads)])?;
            }
            Some((_, Mixer::ShortConv(conv))) => self.short_conv(conv)?,
            Some((_, Mixer::Linear(linear))) => self.linear(linear)?,
            None => {}
        }
        match &mut layer.feed_forward {
            None => Ok(()),
            Some((_, FeedForward::Dense { gate, up, down })) => {
                self.gated("features of a feed-forward part", gate.as_mut(), up, down)
            }
            Some((_, FeedForward::Experts(tensors))) => {
                if let Some(shared) = &mut tensors.shared {
                    let what = "features of a shared expert";
                    self.gated(what, Some(&mut shared.gate), &mut shared.up, &mut shared.down)?;
                }
                if self.expert_parallel {
                    return self.experts(tensors);
                }
                let ExpertTensors { gate, up, down, .. } = tensors;
                self.gated("features of each expert", Some(gate), up, down)
            }
        }
    }

    fn attention(
        &mut self,
        attention: &mut AttentionTensors,
        [features, kv_features]: [Range<usize>; 2],
    ) -> Result<(), Error> {
        self.rows(&mut attention.q, &features);
        attention.gate.iter_mut().for_each(|gate| self.rows(gate, &features));
        self.rows(&mut attention.k, &kv_features);
        self.rows(&mut attention.v, &kv_features);
        self.columns(&mut attention.o, &features)
    }

    fn short_conv(&mut self, tensors: &mut ConvTensors) -> Result<(), Error> {
        let all = tensors.o.k;
        let channels = self.features("channels of a short convolution", all, &tensors.o)?;
        // Both gates and the input.
        let segments = [(); 3].map(|()| (all, channels.clone()));
        self.segments(&mut tensors.input, &segments);
        self.channels.insert(tensors.conv.tensor.clone(), vec![PlannedShard::new(ShardAxis::Rows, &channels)]);
        self.columns(&mut tensors.o, &channels)
    }

    fn linear(&mut self, tensors: &mut LinearTensors) -> Result<(), Error> {
        let Some(ranks) = self.ranks else { return Ok(()) };
        let of = tensors.numbers;
        let (heads, key_heads) = linear_heads(of, tensors.form, &tensors.o, ranks)?;
        let features = |heads: &Range<usize>, dim: usize| heads.start * dim..heads.end * dim;
        let (keys, values) = (features(&key_heads, of.key_dim), features(&heads, of.v_dim));
        let (keys, own_values) = ((of.keys(), keys), (of.values(), values.clone()));
        let segments = match tensors.form {
            LinearForm::GatedDelta { .. } => [keys.clone(), keys, own_values],
            LinearForm::Mamba2 => [own_values, keys.clone(), keys],
        };
        self.segments(&mut tensors.qkv, &segments);
        self.rows(&mut tensors.gate, &values);
        tensors.beta.iter_mut().for_each(|beta| self.rows(beta, &heads));
        self.rows(&mut tensors.step, &heads);
        let mut before = 0;
        let channels = segments.map(|(all, own)| {
            before += all;
            PlannedShard::new(ShardAxis::Rows, &(before - all + own.start..before - all + own.end))
        });
        self.channels.insert(tensors.conv.tensor.clone(), channels.to_vec());
        self.columns(&mut tensors.o, &values)?;
        tensors.numbers = LinearNumbers { heads: heads.len(), key_heads: key_heads.len(), ..of };
        self.linear_heads = heads;
        Ok(())
    }

    /// Divides experts by id.
    fn experts(&mut self, tensors: &mut ExpertTensors) -> Result<(), Error> {
        let Some(Ranks { rank, world }) = self.ranks else { return Ok(()) };
        let local = shard_of("experts", tensors.experts, rank, world).map_err(|_| Error::Indivisible {
            what: format!("{} experts", tensors.experts),
            world,
            why: "expected one or more for each rank".into(),
        })?;
        for matrix in [&tensors.gate, &tensors.up, &tensors.down] {
            self.cut(matrix, [PlannedShard::of_experts(&local)]);
        }
        tensors.local = local;
        Ok(())
    }

    /// Cuts the head, unless it is too small.
    fn head(&mut self, head: &mut Matrix) -> Result<(), Error> {
        let Some(Ranks { rank, world }) = self.ranks else { return Ok(()) };
        let runs = head.n.div_ceil(RUN);
        if runs < world {
            return Ok(());
        }
        let rows = |rank| Ok::<_, Error>(between(shard_of("runs of rows", runs, rank, world)?, RUN, head.n));
        let all = (0..world).map(rows).collect::<Result<Vec<_>, _>>()?;
        self.vocabulary = Some(all.iter().map(Range::len).collect());
        self.rows(head, &all[rank]);
        Ok(())
    }

    /// Divides products around an activation by its features.
    fn gated(
        &mut self,
        what: &str,
        gate: Option<&mut Matrix>,
        up: &mut Matrix,
        down: &mut Matrix,
    ) -> Result<(), Error> {
        let features = self.features(what, up.n, down)?;
        if let Some(gate) = gate {
            self.rows(gate, &features);
        }
        self.rows(up, &features);
        self.columns(down, &features)
    }

    /// The rank's features between two products, of `n`.
    fn features(&self, what: &str, n: usize, down: &Matrix) -> Result<Range<usize>, Error> {
        let Some(Ranks { rank, world }) = self.ranks else { return Ok(0..n) };
        let run = multiple_of(down.format.block_len, RUN);
        let runs = n.div_ceil(run);
        let shard = shard_of("features", runs, rank, world).map_err(|_| Error::Indivisible {
            what: format!("{n} {what}"),
            world,
            why: format!("{} is cut at multiples of {run} columns, which are {runs} runs", down.tensor),
        })?;
        Ok(between(shard, run, n))
    }

    /// Makes a product column-parallel.
    fn rows(&mut self, matrix: &mut Matrix, features: &Range<usize>) {
        matrix.n = features.len();
        self.cut(matrix, [PlannedShard::new(ShardAxis::Rows, features)]);
    }

    /// Makes a product of stacked segments column-parallel: the
    /// features of each, and the rank's among them. A range of rows for
    /// all of them becomes one for each.
    fn segments(&mut self, matrix: &mut Matrix, segments: &[(usize, Range<usize>)]) {
        if matrix.rows.len() <= 1 {
            let whole = Rows { first: 0, count: matrix.n, every: matrix.n };
            let Rows { mut first, every, .. } = matrix.rows.first().copied().unwrap_or(whole);
            let rows = segments.iter().map(|&(count, _)| {
                first += count;
                Rows { first: first - count, count, every }
            });
            matrix.rows = rows.collect();
        }
        matrix.n = segments.iter().map(|(_, own)| own.len()).sum();
        self.cut(matrix, segments.iter().map(|(_, own)| PlannedShard::new(ShardAxis::Rows, own)));
    }

    /// Makes a product row-parallel. The sum over ranks has one bias.
    fn columns(&mut self, matrix: &mut Matrix, features: &Range<usize>) -> Result<(), Error> {
        let Some(Ranks { rank, world }) = self.ranks else { return Ok(()) };
        if matrix.k_order {
            let what = format!("columns of {}", matrix.tensor);
            return Err(Error::Indivisible {
                what,
                world,
                why: "they are in the order of their groups (act-order)".into(),
            });
        }
        matrix.k = features.len();
        matrix.bias.take_if(|_| rank > 0);
        self.cut(matrix, [PlannedShard::new(ShardAxis::Columns, features)]);
        Ok(())
    }

    /// States the part of each source of a product.
    fn cut(&mut self, matrix: &Matrix, shards: impl IntoIterator<Item = PlannedShard>) {
        self.shards.extend(matrix.sources().into_iter().zip(shards));
    }
}

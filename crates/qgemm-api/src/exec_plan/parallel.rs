//! [`Part`]: the part of a network that one of several ranks has.
//!
//! Query heads go to ranks with their KV heads, features between
//! the products of a feed-forward part in whole blocks of the
//! format behind them, and rows of the head in runs. Products
//! before them are column-parallel, products behind them
//! row-parallel. Everything else is on every rank.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::ops::Range;

use qgemm_formats::{ShardAxis, shard_of};

use super::ranks::{PlannedShard, Ranks};
use crate::architecture::{ExpertTensors, FeedForward, Heads, LayerTensors, Matrix, Mixer, Network};
use crate::error::Error;

/// Features of a feed-forward part, and rows of a head, are cut
/// at multiples of this: rows of vector loads, and of scales that
/// rows share.
const RUN: usize = 32;

/// One rank's part of a network; the whole of it without ranks.
#[derive(Debug, Default)]
pub(super) struct Part {
    ranks: Option<Ranks>,
    /// The rank's heads, products and their features.
    network: Option<Network>,
    /// Parts of tensors that are cut.
    shards: HashMap<String, PlannedShard>,
    /// Rows of the head of each rank, if it is cut.
    vocabulary: Option<Vec<usize>>,
    /// Query heads.
    heads: Range<usize>,
}

impl Part {
    /// The part of a rank, for inference.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank beyond the world,
    /// [`Error::Indivisible`] for a network that cannot be divided.
    pub fn of(network: &Network, ranks: Option<Ranks>, train: bool) -> Result<Self, Error> {
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
        if let Some((what, why)) = network.layers.iter().find_map(undivided) {
            return Err(Error::Indivisible { what: what.into(), world, why: why.into() });
        }
        let mut part = Self { ranks: Some(ranks), ..Self::default() };
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

    /// Whether the rank has a part of a product's tensor.
    pub fn cuts(&self, tensor: &str) -> bool {
        self.shards.contains_key(tensor)
    }

    /// Parts of a product's tensors; none for whole tensors.
    pub fn shards(&self, tensors: &[impl Borrow<str>]) -> Vec<PlannedShard> {
        tensors.iter().filter_map(|tensor| self.shards.get(tensor.borrow()).cloned()).collect()
    }

    fn layer(
        &mut self,
        layer: &mut LayerTensors,
        of: Heads,
        [heads, kv_heads]: [&Range<usize>; 2],
    ) -> Result<(), Error> {
        let features = |heads: &Range<usize>| heads.start * of.head_dim..heads.end * of.head_dim;
        if let Some((_, Mixer::Attention(attention))) = &mut layer.mixer {
            self.rows(&mut attention.q, &features(heads));
            self.rows(&mut attention.k, &features(kv_heads));
            self.rows(&mut attention.v, &features(kv_heads));
            self.columns(&mut attention.o, &features(heads))?;
        }
        let Some((_, feed_forward)) = &mut layer.feed_forward else { return Ok(()) };
        match feed_forward {
            FeedForward::Dense { gate, up, down } => {
                let features = self.features("features of a feed-forward part", up.n, down)?;
                gate.iter_mut().for_each(|gate| self.rows(gate, &features));
                self.rows(up, &features);
                self.columns(down, &features)
            }
            FeedForward::Experts(ExpertTensors { gate, up, down, .. }) => {
                let features = self.features("features of each expert", up.n, down)?;
                self.rows(gate, &features);
                self.rows(up, &features);
                self.columns(down, &features)
            }
        }
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
        self.shards.insert(matrix.tensor.clone(), PlannedShard::new(ShardAxis::Rows, features));
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
        self.shards.insert(matrix.tensor.clone(), PlannedShard::new(ShardAxis::Columns, features));
        Ok(())
    }
}

/// The part of a layer that has no division among ranks, and why.
fn undivided(layer: &LayerTensors) -> Option<(&'static str, &'static str)> {
    match (&layer.mixer, &layer.feed_forward) {
        (Some((_, Mixer::ShortConv(_) | Mixer::Linear(_))), _) => {
            Some(("a layer with a recurrent state", "its heads and its state are not divided yet"))
        }
        (Some((_, Mixer::Attention(attention))), _) if attention.gate.is_some() => {
            Some(("attention with an output gate", "a tensor has its queries and the gate in turn"))
        }
        (_, Some((_, FeedForward::Experts(experts)))) if experts.shared.is_some() => {
            Some(("a shared expert", "it is not divided yet"))
        }
        (None, _) | (_, None) => Some(("a layer with one part", "sums over ranks need both norms of a layer")),
        _ => None,
    }
}

/// Query heads and KV heads of a rank. Ranks share KV heads where
/// there are too few.
fn heads_of(network: &Network, Ranks { rank, world }: Ranks) -> Result<(Range<usize>, Range<usize>), Error> {
    let Heads { heads, kv_heads, head_dim } = network.heads;
    let outputs = network.layers.iter().filter_map(|layer| layer.mixer.as_ref()).map(|(_, mixer)| mixer.output());
    let block = outputs.fold(1, |block, o| multiple_of(o.format.block_len, block));
    let indivisible = |why: String| {
        let what = format!("{heads} query heads of {kv_heads} KV heads with {head_dim} features");
        Error::Indivisible { what, world, why }
    };
    let group = heads.checked_div(kv_heads).filter(|group| *group > 0);
    let group = group.ok_or_else(|| indivisible("expected query heads of each KV head".into()))?;
    // Attention's result is cut between blocks of the output
    // projection.
    let run_of = |heads: usize| (1..=block).find(|run| (run * heads * head_dim).is_multiple_of(block)).unwrap_or(block);
    if kv_heads >= world {
        let run = run_of(group);
        let runs = kv_heads.div_ceil(run);
        let shard = shard_of("KV heads", runs, rank, world);
        let blocks = || format!("blocks of {block} columns keep {run} KV heads together, which are {runs} runs");
        let own = between(shard.map_err(|_| indivisible(blocks()))?, run, kv_heads);
        return Ok((own.start * group..own.end * group, own));
    }
    let sharers = world / kv_heads;
    if !world.is_multiple_of(kv_heads) {
        return Err(indivisible(format!("expected at most {kv_heads} ranks, or a multiple of them")));
    }
    let (run, kv_head) = (run_of(1), rank / sharers);
    let runs = group.div_ceil(run);
    let shard = shard_of("query heads", runs, rank % sharers, sharers);
    let blocks = || format!("blocks of {block} columns keep {run} of {group} query heads together");
    let own = between(shard.map_err(|_| indivisible(blocks()))?, run, group);
    Ok((kv_head * group + own.start..kv_head * group + own.end, kv_head..kv_head + 1))
}

/// Units of runs, of which there are `all`.
fn between(runs: Range<usize>, run: usize, all: usize) -> Range<usize> {
    runs.start * run..(runs.end * run).min(all)
}

/// Least common multiple.
fn multiple_of(a: usize, b: usize) -> usize {
    (1..=b).map(|n| n * a).find(|multiple| multiple.is_multiple_of(b)).unwrap_or(a)
}

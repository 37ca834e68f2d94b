//! Heads of a rank: those of attention and of linear attention.

use std::ops::Range;

use qgemm_formats::shard_of;

use super::ranks::Ranks;
use crate::architecture::{Heads, LinearForm, LinearNumbers, Matrix, Mixer, Network};
use crate::error::Error;

/// Query heads and KV heads of a rank. Ranks share KV heads where
/// there are too few.
pub(super) fn heads_of(network: &Network, ranks: Ranks) -> Result<(Range<usize>, Range<usize>), Error> {
    let mixers = network.layers.iter().filter_map(|layer| layer.mixer.as_ref());
    let outputs = mixers.filter(|(_, mixer)| matches!(mixer, Mixer::Attention(_))).map(|(_, mixer)| mixer.output());
    let block = outputs.fold(1, |block, o| multiple_of(o.format.block_len, block));
    grouped(["query heads", "KV heads"], network.heads, block, ranks)
}

/// Value heads and key heads of a rank, for linear attention.
pub(super) fn linear_heads(
    of: LinearNumbers,
    form: LinearForm,
    o: &Matrix,
    ranks: Ranks,
) -> Result<(Range<usize>, Range<usize>), Error> {
    let LinearNumbers { heads, key_heads, v_dim, .. } = of;
    let block = o.format.block_len;
    match form {
        LinearForm::GatedDelta { tiled: true } => {
            let all = (0..ranks.world).map(|rank| tiled([heads, key_heads, v_dim], block, Ranks { rank, ..ranks }));
            // One rank's error is that of all.
            all.collect::<Result<Vec<_>, _>>().map(|mut all| all.swap_remove(ranks.rank))
        }
        // The norm behind them is that of whole groups.
        LinearForm::Mamba2 if key_heads < ranks.world => Err(Error::Indivisible {
            what: format!("{heads} heads of {key_heads} groups of Mamba-2"),
            world: ranks.world,
            why: "expected a group or more for each rank, whose features are normalized together".into(),
        }),
        _ => {
            let of = Heads { heads, kv_heads: key_heads, head_dim: v_dim };
            grouped(["value heads", "key heads"], of, block, ranks)
        }
    }
}

/// Heads whose neighbours share a KV head.
fn grouped(
    [of_q, of_kv]: [&'static str; 2],
    of: Heads,
    block: usize,
    Ranks { rank, world }: Ranks,
) -> Result<(Range<usize>, Range<usize>), Error> {
    let Heads { heads, kv_heads, head_dim } = of;
    let indivisible = |why: String| {
        let what = format!("{heads} {of_q} of {kv_heads} {of_kv} with {head_dim} features");
        Error::Indivisible { what, world, why }
    };
    let group = heads.checked_div(kv_heads).filter(|group| *group > 0);
    let group = group.ok_or_else(|| indivisible(format!("expected {of_q} of each of the {of_kv}")))?;
    if kv_heads >= world {
        let run = run_of(group * head_dim, block);
        let runs = kv_heads.div_ceil(run);
        let shard = shard_of("KV heads", runs, rank, world);
        let blocks = || format!("blocks of {block} columns keep {run} {of_kv} together, which are {runs} runs");
        let own = between(shard.map_err(|_| indivisible(blocks()))?, run, kv_heads);
        return Ok((own.start * group..own.end * group, own));
    }
    let sharers = world / kv_heads;
    if !world.is_multiple_of(kv_heads) {
        return Err(indivisible(format!("expected at most {kv_heads} ranks, or a multiple of them")));
    }
    let (run, kv_head) = (run_of(head_dim, block), rank / sharers);
    let runs = group.div_ceil(run);
    let shard = shard_of("query heads", runs, rank % sharers, sharers);
    let blocks = || format!("blocks of {block} columns keep {run} of {group} {of_q} together");
    let own = between(shard.map_err(|_| indivisible(blocks()))?, run, group);
    Ok((kv_head * group + own.start..kv_head * group + own.end, kv_head..kv_head + 1))
}

/// Heads of which head `h` has key head `h % key_heads`: some with a
/// key head each, or whole rounds of them with all.
fn tiled(
    [heads, key_heads, v_dim]: [usize; 3],
    block: usize,
    Ranks { rank, world }: Ranks,
) -> Result<(Range<usize>, Range<usize>), Error> {
    let indivisible = |why: String| {
        let what = format!("{heads} value heads of {key_heads} key heads in turn with {v_dim} features");
        Error::Indivisible { what, world, why }
    };
    let run = run_of(v_dim, block);
    let runs = heads.div_ceil(run);
    let blocks = || format!("blocks of {block} columns keep {run} value heads together, which are {runs} runs");
    let shard = shard_of("value heads", runs, rank, world).map_err(|_| indivisible(blocks()))?;
    let own = between(shard, run, heads);
    let (first, end) = (own.start % key_heads.max(1), own.start % key_heads.max(1) + own.len());
    if end <= key_heads {
        return Ok((own, first..end));
    }
    if first == 0 && end.is_multiple_of(key_heads) {
        return Ok((own, 0..key_heads));
    }
    Err(indivisible(format!("expected at most {key_heads} for each rank, or a multiple of them")))
}

/// Heads of so many features that fill whole blocks.
fn run_of(features: usize, block: usize) -> usize {
    (1..=block).find(|run| (run * features).is_multiple_of(block)).unwrap_or(block)
}

/// Units of runs, of which there are `all`.
pub(super) fn between(runs: Range<usize>, run: usize, all: usize) -> Range<usize> {
    runs.start * run..(runs.end * run).min(all)
}

/// Least common multiple.
pub(super) fn multiple_of(a: usize, b: usize) -> usize {
    (1..=b).map(|n| n * a).find(|multiple| multiple.is_multiple_of(b)).unwrap_or(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_in_turn_keep_their_key_heads() {
        let of = |world, heads| {
            (0..world).map(|rank| tiled([heads, 16, 128], 256, Ranks { rank, world })).collect::<Result<Vec<_>, _>>()
        };
        assert_eq!(of(2, 32).expect("a round each"), [(0..16, 0..16), (16..32, 0..16)]);
        assert_eq!(of(4, 32).expect("half a round each")[3], (24..32, 8..16));
        assert_eq!(of(2, 64).expect("two rounds each")[1], (32..64, 0..16));
        assert!(of(3, 32).is_err() && of(17, 32).is_err());
    }
}

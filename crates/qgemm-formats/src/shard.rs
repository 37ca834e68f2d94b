//! Shards of weights for tensor and expert parallelism ([`HostWeight::shard`]).
//!
//! Ranks `0..world` hold shards of whole *units*: rows, blocks of columns, or experts. The first
//! ranks hold one unit more when the number of units is no multiple of `world`. A row shard of
//! a memory-mapped weight reads nothing and copies nothing.

use std::ops::Range;

use rayon::prelude::*;

use crate::error::FormatError;
use crate::experts::HostExperts;
use crate::gated::PAIR_ROWS;
use crate::prepack::SHARED_ROWS;
use crate::weight::{HostWeight, NO_COLUMN, SharedBytes};

/// Axis along which a weight `W[N, K]` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShardAxis {
    /// Output features (N), for column-parallel layers: ranks compute parts of D.
    Rows,
    /// Input features (K), for row-parallel layers: ranks multiply parts of X, and
    /// the sum of their results is D.
    Columns,
}

/// Features of a shard, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardFeatures {
    /// Consecutive features.
    Range(Range<usize>),
    /// Listed features: input features of an act-order weight, whose groups hold columns
    /// from anywhere. The layer before it is cut into the same features
    /// by [`HostWeight::select_rows`].
    List(Vec<u32>),
}

impl ShardFeatures {
    /// Number of features.
    pub fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Units `rank` of `world` holds of `units`; `what` names a unit in errors.
///
/// # Errors
/// [`FormatError::NoShard`] when `rank` is not below `world`, or there are fewer units than ranks.
pub fn shard_of(what: &'static str, units: usize, rank: usize, world: usize) -> Result<Range<usize>, FormatError> {
    if rank >= world || units < world {
        return Err(FormatError::NoShard { what, units, rank, world });
    }
    let (each, more) = (units / world, units % world);
    let start = rank * each + rank.min(more);
    Ok(start..start + each + usize::from(rank < more))
}

impl HostWeight {
    /// Shard of `rank` among `world` ranks.
    ///
    /// Rows are cut anywhere, and in runs of 8 where they share scales (128×128 blocks).
    /// Columns are cut between blocks. [`HostWeight::shard_features`] tells which features
    /// of the whole weight the shard has.
    ///
    /// A gated pair is made of shards: `gated_pair(&gate.shard(…)?, &up.shard(…)?)`.
    ///
    /// ```
    /// use qgemm_formats::{ShardAxis, quantize_matrix};
    /// let weight = quantize_matrix(&[0.5; 6 * 96], 6, 96, "q4_0".parse()?)?.weight;
    /// let rows = weight.shard(ShardAxis::Rows, 1, 4)?;
    /// let columns = weight.shard(ShardAxis::Columns, 1, 2)?;
    /// assert_eq!((rows.n(), rows.k()), (2, 96));
    /// assert_eq!((columns.n(), columns.k()), (6, 32));
    /// # Ok::<(), qgemm_formats::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::NoShard`] when the weight has fewer rows, runs or blocks than ranks,
    /// or there is no such rank.
    pub fn shard(&self, axis: ShardAxis, rank: usize, world: usize) -> Result<Self, FormatError> {
        match axis {
            ShardAxis::Rows => self.rows_between(self.row_shard(rank, world)?),
            ShardAxis::Columns => self.columns_between(self.block_shard(rank, world)?),
        }
    }

    /// Part of the weight: a range of rows, or of stored columns.
    ///
    /// Rows share the memory of this weight; columns are copied.
    ///
    /// # Errors
    /// [`FormatError::NoRange`] for an empty range or one beyond the weight, and for a border
    /// within a block or within a run of 8 rows with shared scales.
    pub fn slice(&self, axis: ShardAxis, range: Range<usize>) -> Result<Self, FormatError> {
        let (what, len, unit) = match axis {
            ShardAxis::Rows => ("rows", self.n(), self.row_unit()),
            ShardAxis::Columns => ("columns", self.stored_k(), self.format().block_len),
        };
        let is_border = |at: usize| at.is_multiple_of(unit) || at == len;
        if range.is_empty() || range.end > len || !is_border(range.start) || !is_border(range.end) {
            return Err(FormatError::NoRange { what, range, len, unit });
        }
        match axis {
            ShardAxis::Rows => self.rows_between(range),
            ShardAxis::Columns => self.columns_between(range.start / unit..range.end.div_ceil(unit)),
        }
    }

    /// Features of [`HostWeight::shard`]: output features of a row shard,
    /// input features of a column shard.
    ///
    /// # Errors
    /// As [`HostWeight::shard`].
    pub fn shard_features(&self, axis: ShardAxis, rank: usize, world: usize) -> Result<ShardFeatures, FormatError> {
        match axis {
            ShardAxis::Rows => self.row_shard(rank, world).map(ShardFeatures::Range),
            ShardAxis::Columns => {
                let columns = self.columns_of(self.block_shard(rank, world)?);
                Ok(match self.k_order() {
                    None => ShardFeatures::Range(columns),
                    Some(order) => {
                        ShardFeatures::List(order[columns].iter().copied().filter(|&c| c != NO_COLUMN).collect())
                    }
                })
            }
        }
    }

    /// Weight of the listed rows, in that order.
    ///
    /// # Errors
    /// [`FormatError::NoRow`] for a row that the weight has not. [`FormatError::ShardBorder`] when
    /// rows share scales and the list tears a run of 8 apart. [`FormatError::ZeroDimension`] for
    /// an empty list.
    pub fn select_rows(&self, rows: &[u32]) -> Result<Self, FormatError> {
        if let Some(&row) = rows.iter().find(|&&row| row as usize >= self.n()) {
            return Err(FormatError::NoRow { row: row as usize, n: self.n() });
        }
        let unit = self.row_unit();
        let is_whole = |run: &[u32]| {
            (run[0] as usize).is_multiple_of(unit) && run.iter().zip(run[0]..).all(|(&row, expected)| row == expected)
        };
        if let Some(torn) = rows.chunks(unit).find(|run| unit > 1 && !is_whole(run)) {
            let (at, of) = (torn[0] as usize, self.format().desc().name);
            return Err(FormatError::ShardBorder { what: "rows", of, at, unit });
        }
        let row_bytes = self.format().row_bytes(self.stored_k());
        let mut blocks = Vec::with_capacity(rows.len() * row_bytes);
        rows.iter().for_each(|&row| blocks.extend_from_slice(self.row(row as usize)));
        let scales = self.row_scale().map(|scales| rows.iter().map(|&row| scales[row as usize]).collect());
        self.shard_with(rows.len(), blocks.into(), scales)
    }

    /// Number of consecutive rows with one scale, which a cut must not separate.
    fn row_unit(&self) -> usize {
        if self.format().scale_planes.iter().any(|plane| plane.rows > 1) { SHARED_ROWS } else { 1 }
    }

    /// Rows of a shard.
    fn row_shard(&self, rank: usize, world: usize) -> Result<Range<usize>, FormatError> {
        let unit = self.row_unit();
        let what = if unit == 1 { "rows" } else { "runs of 8 rows with shared scales" };
        let runs = shard_of(what, self.n().div_ceil(unit), rank, world)?;
        Ok(runs.start * unit..(runs.end * unit).min(self.n()))
    }

    /// Blocks along K of a shard.
    fn block_shard(&self, rank: usize, world: usize) -> Result<Range<usize>, FormatError> {
        shard_of("blocks of columns", self.format().blocks_per_row(self.stored_k()), rank, world)
    }

    /// Stored columns of blocks.
    fn columns_of(&self, blocks: Range<usize>) -> Range<usize> {
        let of = self.format().block_len;
        blocks.start * of..(blocks.end * of).min(self.stored_k())
    }

    /// The rows of a range, sharing the memory of this weight.
    pub(crate) fn rows_between(&self, rows: Range<usize>) -> Result<Self, FormatError> {
        let at = |row| self.format().row_offset(row, self.stored_k());
        let blocks = self.shared_blocks().slice(at(rows.start)..at(rows.end));
        let blocks = blocks.unwrap_or_else(|| self.shared_blocks().clone());
        self.shard_with(rows.len(), blocks, self.row_scale().map(|scales| scales[rows].to_vec()))
    }

    /// `n` rows of this weight.
    fn shard_with(&self, n: usize, blocks: SharedBytes, scales: Option<Vec<f32>>) -> Result<Self, FormatError> {
        self.derived(n, [self.k(), self.stored_k()], blocks, self.k_order().map(<[u32]>::to_vec), scales)
    }

    /// Weight of this format and stated X, with `k` features and stored columns, and this column order.
    fn derived(
        &self,
        n: usize,
        [k, stored_k]: [usize; 2],
        blocks: SharedBytes,
        order: Option<Vec<u32>>,
        scales: Option<Vec<f32>>,
    ) -> Result<Self, FormatError> {
        let weight = match order {
            Some(order) => Self::with_k_order(self.format(), n, k, blocks, order)?,
            None => Self::of_stored(self.format(), n, k, stored_k, blocks)?,
        };
        let weight = weight.with_stated_x(self.stated_x());
        match scales {
            Some(scales) => weight.with_row_scale(scales),
            None => Ok(weight),
        }
    }

    /// The columns of blocks along K, copied.
    fn columns_between(&self, blocks: Range<usize>) -> Result<Self, FormatError> {
        let format = self.format();
        let columns = self.columns_of(blocks.clone());
        let bytes = blocks.start * format.block_bytes..blocks.end * format.block_bytes;
        let mut shard = vec![0; self.n() * bytes.len()];
        shard.par_chunks_exact_mut(bytes.len()).enumerate().for_each(|(n, row)| {
            row.copy_from_slice(&self.row(n)[bytes.clone()]);
        });
        let order = self.k_order().and_then(|order| padded_order(&order[columns.clone()]));
        let (k, order) = order.map_or((columns.len(), None), |(k, order)| (k, Some(order)));
        self.derived(self.n(), [k, columns.len()], shard.into(), order, self.row_scale().map(<[f32]>::to_vec))
    }
}

/// Features and order of stored columns whose features are numbered as they come. `None`
/// without padding: the natural order.
fn padded_order(columns: &[u32]) -> Option<(usize, Vec<u32>)> {
    let mut next = 0;
    let number = |&column: &u32| match column {
        NO_COLUMN => NO_COLUMN,
        _ => {
            next += 1;
            next - 1
        }
    };
    let order: Vec<u32> = columns.iter().map(number).collect();
    order.contains(&NO_COLUMN).then_some((next as usize, order))
}

impl HostExperts {
    /// Experts of `rank` among `world` ranks, for expert parallelism: their ids, and their
    /// weights, which share the memory of these.
    ///
    /// # Errors
    /// [`FormatError::NoShard`] when there are fewer experts than ranks, or there is no such rank.
    pub fn shard_experts(&self, rank: usize, world: usize) -> Result<(Range<usize>, Self), FormatError> {
        let ids = shard_of("experts", self.experts(), rank, world)?;
        let rows = ids.start * self.row_pitch()..ids.end * self.row_pitch();
        let stacked = self.stacked().rows_between(rows)?;
        let orders = self.k_orders().map(|orders| orders[ids.clone()].to_vec());
        Ok((ids.clone(), self.with_experts(stacked, ids.len(), orders)))
    }

    /// Slice of every expert, for tensor parallelism: [`HostWeight::shard`] of each, and of
    /// both weights of a gated pair.
    ///
    /// # Errors
    /// As [`HostWeight::shard`]. Gated pairs are cut between runs of 8 features.
    pub fn shard(&self, axis: ShardAxis, rank: usize, world: usize) -> Result<Self, FormatError> {
        let runs = |range: Range<usize>| range.start * PAIR_ROWS..(range.end * PAIR_ROWS).min(self.n());
        if axis == ShardAxis::Rows && self.is_gated() {
            let what = "runs of 8 features of a pair";
            return self.slice(axis, runs(shard_of(what, self.n().div_ceil(PAIR_ROWS), rank, world)?));
        }
        let shards = (0..self.experts()).map(|expert| self.expert(expert)?.shard(axis, rank, world));
        self.like_these(&shards.collect::<Result<Vec<_>, _>>()?, self.n())
    }

    /// Slice of every expert: a range of its features, or of its stored columns.
    ///
    /// # Errors
    /// As [`HostWeight::slice`]. Gated pairs are cut between runs of 8 features.
    pub fn slice(&self, axis: ShardAxis, range: Range<usize>) -> Result<Self, FormatError> {
        let (len, unit) = (self.n(), PAIR_ROWS);
        let is_pair = axis == ShardAxis::Rows && self.is_gated();
        let is_border = |at: usize| at.is_multiple_of(unit) || at == len;
        if is_pair && !(is_border(range.start) && is_border(range.end)) {
            return Err(FormatError::NoRange { what: "features of a pair", range, len, unit });
        }
        let features = if axis == ShardAxis::Rows { range.len() } else { self.n() };
        let rows = match is_pair {
            // The last run of a pair is padded.
            true => 2 * range.start..2 * range.end.next_multiple_of(unit),
            false => range,
        };
        let slices = (0..self.experts()).map(|expert| self.expert(expert)?.slice(axis, rows.clone()));
        self.like_these(&slices.collect::<Result<Vec<_>, _>>()?, features)
    }

    /// Experts of the same kind with `features` output features each.
    fn like_these(&self, parts: &[HostWeight], features: usize) -> Result<Self, FormatError> {
        let made = Self::new(parts)?;
        Ok(if self.is_gated() { made.of_pairs(features) } else { made })
    }

    /// Weight of an expert, sharing memory.
    fn expert(&self, expert: usize) -> Result<HostWeight, FormatError> {
        let first = expert * self.row_pitch();
        let weight = self.stacked().rows_between(first..first + self.rows())?;
        let Some(orders) = self.k_orders() else { return Ok(weight) };
        let (blocks, scales) = (weight.shared_blocks().clone(), weight.row_scale().map(<[f32]>::to_vec));
        weight.derived(weight.n(), [weight.k(), weight.stored_k()], blocks, Some(orders[expert].clone()), scales)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desc::Format;
    use crate::quantize_matrix;

    fn values(n: usize, k: usize) -> Vec<f32> {
        (0..n * k).map(|i| ((i * 7 + i / k * 3) % 29) as f32 - 14.0).collect()
    }

    fn weight(format: Format, n: usize, k: usize) -> Option<HostWeight> {
        let made = quantize_matrix(&values(n, k), n, k, format).ok()?;
        Some(made.weight).filter(|weight| weight.format() == format)
    }

    /// Columns of a matrix `[n, k]`.
    fn columns(all: &[f32], k: usize, features: &ShardFeatures) -> Vec<f32> {
        let features: Vec<usize> = match features {
            ShardFeatures::Range(range) => range.clone().collect(),
            ShardFeatures::List(list) => list.iter().map(|&c| c as usize).collect(),
        };
        all.chunks_exact(k).flat_map(|row| features.iter().map(|&c| row[c]).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn shards_of_every_format_are_the_weight() {
        let mut seen = 0;
        for format in Format::all() {
            let (n, k) = (21, 5 * format.block_len.max(32));
            let Some(whole) = weight(format, n, k) else { continue };
            seen += 1;
            let all = whole.dequantize().unwrap();
            for world in [1, 2, 3] {
                let mut rows = Vec::new();
                for rank in 0..world {
                    let shard = whole.shard(ShardAxis::Rows, rank, world).unwrap();
                    assert_eq!(shard.n(), whole.shard_features(ShardAxis::Rows, rank, world).unwrap().len());
                    assert_eq!(shard.blocks().as_ptr(), whole.row(rows.len() / k).as_ptr(), "it shares memory");
                    rows.extend(shard.dequantize().unwrap());
                    let shard = whole.shard(ShardAxis::Columns, rank, world).unwrap();
                    let features = whole.shard_features(ShardAxis::Columns, rank, world).unwrap();
                    assert_eq!(shard.dequantize().unwrap(), columns(&all, k, &features), "{format}");
                }
                assert_eq!(rows, all, "{format}");
            }
        }
        assert!(seen > 20, "{seen} formats have quantizers");
    }

    #[test]
    fn slices_are_rows_and_columns_between_borders() {
        let format: Format = "q4_0".parse().unwrap();
        let whole = weight(format, 6, 96).unwrap();
        let all = whole.dequantize().unwrap();
        let rows = whole.slice(ShardAxis::Rows, 1..4).unwrap();
        assert_eq!(
            (rows.dequantize().unwrap(), rows.blocks().as_ptr()),
            (all[96..384].to_vec(), whole.row(1).as_ptr())
        );
        let part = whole.slice(ShardAxis::Columns, 32..96).unwrap().dequantize().unwrap();
        assert_eq!(part, columns(&all, 96, &ShardFeatures::Range(32..96)));
        let refused = |axis, range| whole.slice(axis, range).unwrap_err().to_string();
        for (axis, range, part) in [
            (ShardAxis::Rows, 2..2, "rows 2..2"),
            (ShardAxis::Rows, 0..7, "of 6"),
            (ShardAxis::Columns, 16..96, "multiples of 32"),
            (ShardAxis::Columns, 0..33, "multiples of 32"),
        ] {
            assert!(refused(axis, range).contains(part), "{part}");
        }
    }

    #[test]
    fn the_border_in_the_way_is_named() {
        let format: Format = "q4_k".parse().unwrap();
        let whole = weight(format, 2, 512).unwrap();
        let error = |axis, rank, world| whole.shard(axis, rank, world).unwrap_err().to_string();
        let few = error(ShardAxis::Columns, 0, 3);
        assert!(few.contains("2 blocks of columns") && few.contains('3'), "{few}");
        assert!(error(ShardAxis::Rows, 0, 3).contains("2 rows"));
        assert!(error(ShardAxis::Rows, 2, 2).contains("rank 2"));
        let shared: Format = "fp8_e4m3_block128".parse().unwrap();
        let whole = weight(shared, 24, 256).unwrap();
        assert!(whole.shard(ShardAxis::Rows, 0, 4).unwrap_err().to_string().contains("3 runs of 8 rows"));
        assert_eq!(whole.shard(ShardAxis::Rows, 1, 2).unwrap().n(), 8);
        let torn = whole.select_rows(&[0, 1, 2]).map(|part| part.n());
        assert_eq!(torn.unwrap(), 3, "the last run may be short");
        assert!(whole.select_rows(&[4, 5]).unwrap_err().to_string().contains("multiple of 8"));
        assert!(whole.select_rows(&[24]).unwrap_err().to_string().contains("24"));
    }

    #[test]
    fn act_order_is_cut_between_groups_and_the_layer_before_it_into_the_same_features() {
        let format: Format = "int4_g32".parse().unwrap();
        let (n, k) = (4, 128);
        let made = weight(format, n, k).unwrap();
        // The last stored column is padding.
        let mut order: Vec<u32> = (0..k as u32).map(|i| i * 37 % k as u32).collect();
        order[k - 1] = NO_COLUMN;
        let whole = HostWeight::with_k_order(format, n, k, made.shared_blocks().clone(), order).unwrap();
        let all = whole.dequantize().unwrap();
        let before = weight("q8_0".parse().unwrap(), k, 32).unwrap();
        for rank in 0..3 {
            let shard = whole.shard(ShardAxis::Columns, rank, 3).unwrap();
            let features = whole.shard_features(ShardAxis::Columns, rank, 3).unwrap();
            assert_eq!(shard.dequantize().unwrap(), columns(&all, k, &features));
            assert_eq!(shard.k_order().is_some(), rank == 2, "padding alone needs an order");
            let ShardFeatures::List(list) = &features else { panic!("{features:?}") };
            let selected = before.select_rows(list).unwrap();
            assert_eq!((selected.n(), selected.row(1)), (features.len(), before.row(list[1] as usize)));
        }
    }

    #[test]
    fn experts_are_cut_by_id_and_by_slices() {
        let format: Format = "q8_0".parse().unwrap();
        let one = |seed: usize, n: usize| {
            let values: Vec<f32> = values(n, 96).iter().map(|v| v + seed as f32).collect();
            quantize_matrix(&values, n, 96, format).unwrap().weight
        };
        let all: Vec<HostWeight> = (0..5).map(|e| one(e, 20)).collect();
        let experts = HostExperts::new(&all).unwrap();
        let (ids, shard) = experts.shard_experts(1, 2).unwrap();
        assert_eq!((ids, shard.experts(), shard.rows()), (3..5, 2, 20));
        assert_eq!(shard.stacked().row(shard.row_pitch()), all[4].row(0));
        let columns = experts.shard(ShardAxis::Columns, 2, 3).unwrap();
        assert_eq!((columns.k(), columns.experts(), columns.n()), (32, 5, 20));
        let expected = all[4].shard(ShardAxis::Columns, 2, 3).unwrap();
        assert_eq!(columns.stacked().row(4 * columns.row_pitch() + 1), expected.row(1));
        assert!(experts.shard_experts(0, 6).unwrap_err().to_string().contains("5 experts"));

        let pairs: Vec<_> = (0..2).map(|e| (one(e, 20), one(e + 10, 20))).collect();
        let gated = HostExperts::gated(&pairs).unwrap();
        for (rank, features) in [(0, 0..16), (1, 16..20)] {
            let shard = gated.shard(ShardAxis::Rows, rank, 2).unwrap();
            assert_eq!((shard.n(), shard.is_gated()), (features.len(), true));
            let rows: Vec<u32> = features.map(|f| f as u32).collect();
            let cut = |weight: &HostWeight| weight.select_rows(&rows).unwrap();
            let expected =
                HostExperts::gated(&pairs.iter().map(|(g, u)| (cut(g), cut(u))).collect::<Vec<_>>()).unwrap();
            assert_eq!(shard.stacked().blocks(), expected.stacked().blocks());
            let range = rows[0] as usize..rows[0] as usize + rows.len();
            assert_eq!(gated.slice(ShardAxis::Rows, range).unwrap().stacked().blocks(), expected.stacked().blocks());
        }
    }
}

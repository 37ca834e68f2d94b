//! Conversion of integer groups of any size and column order to
//! blocks of an `int*_g*` format.

use std::ops::Range;

use half::f16;
use rayon::prelude::*;

use super::raw::{bad, unsupported};
use crate::desc::Format;
use crate::error::FormatError;
use crate::formats::int_group::write_block;
use crate::weight::{HostWeight, NO_COLUMN};

/// Available block lengths, largest first.
const BLOCKS: [usize; 3] = [128, 64, 32];
/// Rows converted together, so that codes packed along N are read by cache lines.
const STRIPE: usize = 32;
/// Maximum growth of rows by padding. Groups that are more uneven are refused,
/// which also bounds memory.
const MAX_GROWTH: usize = 8;

/// Column order of a layer. Each block lies within one group. Groups without a whole
/// number of blocks are padded.
#[derive(Debug)]
pub(super) struct GroupPlan {
    bits: usize,
    k: usize,
    block: usize,
    format: Format,
    /// Group of every block.
    groups: Vec<u32>,
    /// Input feature of every stored column, without the padding of the last block.
    order: Vec<u32>,
    /// Whether `order` is 0, 1, 2, …
    natural: bool,
}

/// Contents of an integer-group layer.
pub(super) struct GroupContents<'a> {
    /// Writes the codes of rows `range`, `k` per row, in the order of input features.
    pub codes: &'a (dyn Fn(Range<usize>, &mut [u8]) + Sync),
    /// Scale of (group, row).
    pub scale: &'a (dyn Fn(usize, usize) -> f16 + Sync),
    /// Zero point of (group, row).
    pub zero: &'a (dyn Fn(usize, usize) -> u8 + Sync),
}

impl GroupPlan {
    /// Sorts columns into blocks of `bits`-bit codes by group. `group_of` has the
    /// group of each input feature.
    ///
    /// Of the block lengths that need the least padding, it takes the largest. For groups
    /// of equal size, that is the largest of 128, 64 and 32 that divides the size.
    ///
    /// # Errors
    /// [`FormatError::ZeroDimension`] when there are no columns. [`FormatError::BadFile`]
    /// when a group is not below `group_count`. [`FormatError::UnsupportedFile`] when
    /// groups are so uneven that padding would multiply rows.
    pub fn new(name: &str, bits: usize, group_of: &[u32], group_count: usize) -> Result<Self, FormatError> {
        if group_of.is_empty() {
            return Err(FormatError::ZeroDimension { name: "K" });
        }
        let mut counts = vec![0usize; group_count];
        for (column, &group) in group_of.iter().enumerate() {
            *counts.get_mut(group as usize).ok_or_else(|| {
                bad(name, format!("column {column} is of group {group}, but there are {group_count} groups"))
            })? += 1;
        }
        let blocks = |block: usize| counts.iter().map(|count| count.div_ceil(block)).sum::<usize>();
        // The last group may end inside a block, so its padding is free.
        let last = counts.iter().rposition(|&count| count > 0).unwrap_or(0);
        let columns = |block: usize| (blocks(block) - counts[last].div_ceil(block)) * block + counts[last];
        let block = BLOCKS.into_iter().min_by_key(|&block| columns(block)).unwrap_or(BLOCKS[0]);
        if blocks(block) * block > group_of.len().saturating_mul(MAX_GROWTH).max(BLOCKS[0]) {
            return Err(unsupported(
                name,
                format!("{group_count} groups share {} columns so unevenly that they cannot be stored", group_of.len()),
            ));
        }
        let format: Format = format!("int{bits}_g{block}").parse()?;

        let mut starts = Vec::with_capacity(group_count);
        let mut groups = Vec::with_capacity(blocks(block));
        for (group, count) in counts.iter().enumerate() {
            starts.push(groups.len() * block);
            groups.resize(groups.len() + count.div_ceil(block), group as u32);
        }
        let mut order = vec![NO_COLUMN; groups.len() * block];
        for (column, &group) in group_of.iter().enumerate() {
            let next = &mut starts[group as usize];
            order[*next] = column as u32;
            *next += 1;
        }
        let used = order.iter().rposition(|&column| column != NO_COLUMN).map_or(0, |last| last + 1);
        order.truncate(used);
        let natural = order.iter().enumerate().all(|(i, &column)| column as usize == i);
        Ok(Self { bits, k: group_of.len(), block, format, groups, order, natural })
    }

    /// Format of the blocks.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Builds a weight of `n` rows.
    ///
    /// # Errors
    /// As [`HostWeight::new`].
    pub fn build(&self, n: usize, contents: &GroupContents<'_>) -> Result<HostWeight, FormatError> {
        let row_bytes = self.groups.len() * self.format.block_bytes;
        let bytes = row_bytes.checked_mul(n).ok_or_else(|| FormatError::Overflow {
            what: format!("{} weight", self.format),
            dims: vec![n as u64, self.order.len() as u64],
        })?;
        let mut blocks = vec![0u8; bytes];
        blocks.par_chunks_mut(STRIPE * row_bytes).enumerate().for_each(|(stripe, out)| {
            let first = stripe * STRIPE;
            let rows = out.len() / row_bytes;
            let mut codes = vec![0u8; rows * self.k];
            (contents.codes)(first..first + rows, &mut codes);
            for (row, (codes, out)) in codes.chunks_exact(self.k).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
                self.write_row(first + row, codes, contents, out);
            }
        });
        if self.natural {
            HostWeight::new(self.format, n, self.k, blocks.into())
        } else {
            HostWeight::with_k_order(self.format, n, self.k, blocks.into(), self.order.clone())
        }
    }

    fn write_row(&self, row: usize, codes: &[u8], contents: &GroupContents<'_>, out: &mut [u8]) {
        let mut sorted = [0u8; BLOCKS[0]];
        let blocks = out.chunks_exact_mut(self.format.block_bytes);
        for ((bytes, columns), &group) in blocks.zip(self.order.chunks(self.block)).zip(&self.groups) {
            let zero = (contents.zero)(group as usize, row);
            let sorted = &mut sorted[..self.block];
            // Padding columns hold the zero point, a weight of exactly 0.
            sorted.fill(zero);
            for (code, &column) in sorted.iter_mut().zip(columns) {
                if column != NO_COLUMN {
                    *code = codes[column as usize];
                }
            }
            write_block(self.bits, sorted, (contents.scale)(group as usize, row), zero, bytes);
        }
    }
}

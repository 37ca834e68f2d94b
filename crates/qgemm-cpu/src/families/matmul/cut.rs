//! Split of a product into tasks.

use std::ops::Range;

use qgemm_hal::CheckedMatmul;

use crate::simd::BLOCK_ROWS;

/// Maximum rows of D of a task. Enough that reordering B
/// costs little beside its multiply-adds.
pub const PANEL_ROWS: usize = 128;
/// Maximum column blocks of D of a task. Enough that
/// reordering A costs little.
const MOST_BLOCKS: usize = 8;
/// Tasks per thread, because some take longer than others.
const TASKS_A_THREAD: usize = 4;
/// Minimum K of a split-K part.
const LEAST_PART: usize = 2048;
/// Tiles of D below which K is split, into
/// parts for this many tasks.
const FEW_TILES: usize = 32;

/// Tasks of a product. The order of additions depends on the
/// shape only, not on the threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows of a panel.
    pub rows: usize,
    /// Column blocks of a task.
    pub blocks: usize,
    /// Parts of K.
    pub parts: usize,
    /// Whether products share the rows of one matrix.
    rows_grouped: bool,
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

/// The part of D that a task computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index of the product.
    pub product: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
}

impl Cut {
    /// The split of `op` for this many threads.
    pub fn new(op: &CheckedMatmul, threads: usize) -> Self {
        let &CheckedMatmul { batch, m, n, k, k_grouped, rows_grouped, .. } = op;
        let panels = m.div_ceil(PANEL_ROWS);
        let rows = m.div_ceil(panels);
        let tiles = op.tiles(PANEL_ROWS as u32, BLOCK_ROWS as u32) as usize;
        // With K groups or row groups, the ranges are
        // only known at launch.
        let parts = if tiles < FEW_TILES && !k_grouped && !rows_grouped {
            (k / LEAST_PART).min(FEW_TILES / tiles).max(1)
        } else {
            1
        };
        let mut cut = Self { rows, blocks: 1, parts, rows_grouped, batch, m, n, k };
        if parts == 1 {
            // The largest tasks that still give enough of them.
            let wanted = threads * TASKS_A_THREAD;
            cut.blocks = (tiles / wanted).clamp(1, MOST_BLOCKS);
            // With few columns and few tasks: panels with fewer rows.
            let few = wanted.div_ceil(tiles).min(PANEL_ROWS / 32);
            cut.rows = if few > 1 { rows.div_ceil(few).next_multiple_of(8).min(rows) } else { rows };
        }
        cut
    }

    /// Tiles along M and along N.
    fn grid(&self) -> [usize; 2] {
        [self.m.div_ceil(self.rows), self.n.div_ceil(self.blocks * BLOCK_ROWS)]
    }

    /// Tiles of all products.
    pub fn tiles(&self) -> usize {
        let [along_m, along_n] = self.grid();
        // Each group may end within a panel.
        if self.rows_grouped { (along_m + self.batch) * along_n } else { self.batch * along_m * along_n }
    }

    /// Tasks: tiles times parts of K.
    pub fn tasks(&self) -> usize {
        self.tiles() * self.parts
    }

    /// A tile. Tiles with the same rows are consecutive.
    pub fn tile(&self, tile: usize) -> Tile {
        let [along_m, along_n] = self.grid();
        let (of_products, column) = (tile / along_n, tile % along_n * self.blocks * BLOCK_ROWS);
        let (product, row) = (of_products / along_m, of_products % along_m * self.rows);
        let columns = column..self.n.min(column + self.blocks * BLOCK_ROWS);
        Tile { product, rows: row..self.m.min(row + self.rows), columns }
    }

    /// A tile of row-grouped products with the row ranges
    /// `groups`; `None` beyond the last.
    pub fn tile_of_groups(&self, tile: usize, groups: impl Iterator<Item = Range<usize>>) -> Option<Tile> {
        let [_, along_n] = self.grid();
        let (mut panel, column) = (tile / along_n, tile % along_n * self.blocks * BLOCK_ROWS);
        for (product, rows) in groups.enumerate() {
            let panels = rows.len().div_ceil(self.rows);
            if panel < panels {
                let first = rows.start + panel * self.rows;
                let columns = column..self.n.min(column + self.blocks * BLOCK_ROWS);
                return Some(Tile { product, rows: first..rows.end.min(first + self.rows), columns });
            }
            panel -= panels;
        }
        None
    }

    /// A part of K.
    pub fn part(&self, part: usize) -> Range<usize> {
        let at = |part: usize| (part * self.k.div_ceil(self.parts)).min(self.k);
        at(part)..at(part + 1)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{Activation, BatchedDense, XPrecision};

    use super::*;

    fn op([batch, m, n, k]: [usize; 4]) -> CheckedMatmul {
        let dense = BatchedDense { dtype: DType::F32, row_stride: 1, col_stride: 1, batch_stride: 0, aligned16: false };
        CheckedMatmul {
            batch,
            m,
            n,
            k,
            a: dense.into(),
            b: dense.into(),
            a_scaled: false,
            b_scaled: false,
            a_scale_row: 0,
            b_scale_row: 0,
            d: dense,
            c: None,
            slope: false,
            k_grouped: false,
            rows_grouped: false,
            operand_precision: XPrecision::Exact,
            accumulates: false,
            bias: None,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
        }
    }

    #[test]
    fn tiles_cover_every_output_once_and_parts_all_of_k() {
        for shape in [[1, 1, 1, 0], [3, 130, 65, 7], [1, 4096, 64, 4096], [2, 5, 4000, 100], [1, 3, 70, 50_001]] {
            for threads in [1, 2, 64] {
                let cut = Cut::new(&op(shape), threads);
                let outputs: usize =
                    (0..cut.tiles()).map(|tile| cut.tile(tile)).map(|t| t.rows.len() * t.columns.len()).sum();
                assert_eq!(outputs, shape[0] * shape[1] * shape[2], "{cut:?}");
                assert_eq!((0..cut.parts).map(|part| cut.part(part).len()).sum::<usize>(), shape[3], "{cut:?}");
            }
        }
    }

    #[test]
    fn tiles_cover_the_rows_of_every_group_once() {
        for (offsets, shape) in [
            (vec![0, 0, 130, 130, 131, 300], [5, 300, 70, 9]),
            (vec![3, 900, 5, 40, 2000], [4, 1000, 513, 1]),
            (vec![7, 7], [1, 40, 1, 4]),
        ] {
            let op = CheckedMatmul { rows_grouped: true, ..op(shape) };
            let cut = Cut::new(&op, 3);
            let mut seen = vec![0; shape[1] * shape[2]];
            let tiles = (0..cut.tiles()).filter_map(|tile| cut.tile_of_groups(tile, op.groups(|i| offsets[i])));
            for Tile { product, rows, columns } in tiles {
                assert!(rows.start >= offsets[product] as usize, "{product} {rows:?}");
                rows.for_each(|row| columns.clone().for_each(|column| seen[row * shape[2] + column] += 1));
            }
            let most = offsets.iter().map(|&offset| (offset as usize).min(shape[1])).max().unwrap_or(0);
            for (row, of_row) in seen.chunks(shape[2]).enumerate() {
                let expected = usize::from((offsets[0] as usize..most).contains(&row));
                assert!(of_row.iter().all(|&count| count == expected), "row {row} of {offsets:?}");
            }
        }
    }

    #[test]
    fn rows_columns_and_k_are_shared_out() {
        let tasks = |shape| Cut::new(&op(shape), 2).tasks();
        // Split by rows, by columns, by K.
        assert!(tasks([1, 4096, 64, 4096]) >= 8 && tasks([1, 4, 4096, 512]) >= 8 && tasks([1, 16, 16, 65536]) >= 8);
        assert_eq!(Cut::new(&op([1, 16, 16, 65536]), 2).parts, Cut::new(&op([1, 16, 16, 65536]), 64).parts);
    }
}

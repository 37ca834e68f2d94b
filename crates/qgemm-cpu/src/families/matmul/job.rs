//! One launch: a product with bound operands, and its tasks.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::{
    Activation, BatchedDense, CheckedMatmul, Dense, DeviceId, FactorFormat, HalError, HostMemory, MatmulOperand,
    Operand, Operands, Operation,
};
use rayon::prelude::*;

use super::cut::{Cut, Tile};
use super::factor::{Blocks, Codes, Factor};
use super::slope::slope;
use crate::arena;
use crate::operand::{Input, OutputBatch, absent, host_bytes};
use crate::simd::{BLOCK_ROWS, Epilogue, LANES, OfToken, Simd, TILES};

/// K elements of a reordered block of B,
/// which takes 16 KiB.
pub const STEP: usize = 64;
/// K elements of a reordered panel of A.
const CHUNK: usize = 16 * STEP;
/// Multiply-adds below which only the calling thread works,
/// because waking others takes longer.
const SERIAL_MACS: f64 = 65536.0;

/// An operation with bound operands.
pub struct Job<'a> {
    op: &'a CheckedMatmul,
    cut: &'a Cut,
    simd: &'static Simd,
    a: Batch<'a, FactorFormat>,
    b: Batch<'a, FactorFormat>,
    /// Scale of the product, including the factors of A and B.
    alpha: f32,
    /// Block scales of A and B, if they have them.
    scales: Option<[&'a [u8]; 2]>,
    c: Option<Batch<'a, DType>>,
    bias: Option<(&'a [u8], DType)>,
    /// Offsets of K groups or row groups, plus the
    /// end, if there are groups.
    offsets: Option<&'a [u8]>,
    d: OutputBatch<'a>,
}

/// A batch of input matrices.
struct Batch<'a, T> {
    bytes: &'a [u8],
    layout: BatchedDense<T>,
    /// Bytes of an element.
    width: usize,
    shape: [usize; 2],
    what: &'static str,
}

/// A matrix of a batch, with elements of `dtype`.
fn dense<T>(layout: &BatchedDense<T>, dtype: DType) -> Dense {
    let BatchedDense { row_stride, col_stride, .. } = *layout;
    Dense { dtype, row_stride, col_stride, aligned16: false }
}

impl<'a, T: Copy> Batch<'a, T> {
    /// `batch` matrices in `view`, with elements of `width` bytes.
    fn new(
        view: Option<qgemm_hal::BufferRef<'a>>,
        layout: BatchedDense<T>,
        width: usize,
        batch: usize,
        shape: [usize; 2],
        operand: MatmulOperand,
    ) -> Result<Self, HalError> {
        let what = operand.name();
        let [rows, columns] = shape;
        let bytes = layout.extent(batch, rows, columns).and_then(|len| len.checked_mul(width as u64));
        let end = bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let all = view.map_or(Ok(&[][..]), |view| host_bytes(view, what))?;
        let bytes = all.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len: all.len() })?;
        Ok(Self { bytes, layout, width, shape, what })
    }

    /// The bytes from a product's matrix on.
    fn bytes_of(&self, product: usize) -> &'a [u8] {
        &self.bytes[product * self.layout.batch_stride as usize * self.width..]
    }

    /// The matrix of a product, with elements of `dtype`.
    fn input(&self, product: usize, dtype: DType) -> Input<'a> {
        let matrix = Input::new(self.bytes_of(product), dense(&self.layout, dtype), self.shape, self.what);
        matrix.unwrap_or_else(|_| unreachable!("the extent of all matrices was checked"))
    }
}

impl<'a> Batch<'a, FactorFormat> {
    /// A or B of a product, without block scales.
    fn of(&self, product: usize) -> Factor<'a> {
        match self.layout.dtype.plain() {
            Some(dtype) => Factor::Plain(self.input(product, dtype)),
            None => Factor::E4M3(Codes::new(self.bytes_of(product), &self.layout)),
        }
    }
}

impl<'a> Job<'a> {
    /// Binds the operands of a launch.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] for memory that is not on the host,
    /// [`HalError::OutOfBounds`] for an operand that is too short.
    pub fn new(
        op: &'a CheckedMatmul,
        cut: &'a Cut,
        simd: &'static Simd,
        mut operands: Operands<'a>,
    ) -> Result<Self, HalError> {
        use MatmulOperand as O;
        let CheckedMatmul { batch, m, n, k, .. } = *op;
        let a = Batch::new(operands.take(O::A), op.a, op.a.dtype.bytes(), batch, [m, k], O::A)?;
        let b = Batch::new(operands.take(O::B), op.b, op.b.dtype.bytes(), batch, [k, n], O::B)?;
        let mut alpha = op.alpha;
        for (scaled, operand) in [(op.a_scaled, O::AScale), (op.b_scaled, O::BScale)] {
            if scaled {
                let (what, end) = (operand.name(), size_of::<f32>());
                let bytes = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
                let scale =
                    bytes.first_chunk().ok_or(HalError::OutOfBounds { what, start: 0, end, len: bytes.len() })?;
                alpha *= f32::from_le_bytes(*scale);
            }
        }
        let mut scales_of = |operand: O, outer: usize, scale_row: u64| {
            let what = operand.name();
            let len = op.scales_extent(outer, scale_row).and_then(|len| len.checked_mul(size_of::<f32>() as u64));
            let end = len.and_then(|len| usize::try_from(len).ok()).unwrap_or(usize::MAX);
            let all = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
            all.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len: all.len() })
        };
        let scales = match op.has_block_scales() {
            true => Some([scales_of(O::AScale, m, op.a_scale_row)?, scales_of(O::BScale, n, op.b_scale_row)?]),
            false => None,
        };
        let c = match op.c {
            Some(c) => Some(Batch::new(operands.take(O::C), c, c.dtype.bytes(), batch, [m, n], O::C)?),
            None => None,
        };
        let bias = match op.bias {
            Some(dtype) => {
                let (what, end) = (O::Bias.name(), n * dtype.bytes());
                let bytes = host_bytes(operands.take(O::Bias).ok_or(absent(what, end))?, what)?;
                let len = bytes.len();
                Some((bytes.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?, dtype))
            }
            None => None,
        };
        let offsets = match op.k_grouped || op.rows_grouped {
            true => {
                let (what, end) = (O::Offsets.name(), (batch + 1) * size_of::<u32>());
                let bytes = host_bytes(operands.take(O::Offsets).ok_or(absent(what, end))?, what)?;
                let len = bytes.len();
                Some(bytes.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?)
            }
            false => None,
        };
        let d = operands.take_mut(O::D).ok_or(absent(O::D.name(), 1))?;
        let d = HostMemory::of_device_mut(DeviceId::CPU, d, O::D.name())?;
        // Row-grouped products write to one matrix.
        let outputs = if op.rows_grouped { 1 } else { batch };
        let d = OutputBatch::new(d, dense(&op.d, op.d.dtype), [m, n], outputs, op.d.batch_stride, O::D.name())?;
        Ok(Self { op, cut, simd, a, b, alpha, scales, c, bias, offsets, d })
    }

    /// Computes all outputs.
    pub fn run(&self) {
        match self.cut.parts {
            1 => self.each(self.cut.tiles(), |tile| self.tile(tile).iter().for_each(|tile| self.whole(tile))),
            _ => self.in_parts(),
        }
    }

    /// Whether the calling thread is done before others wake.
    pub fn is_small(&self) -> bool {
        self.cut.parts == 1 && self.op.macs() < SERIAL_MACS
    }

    /// Calls `work` with every number below `count`, on
    /// all threads if that pays.
    fn each(&self, count: usize, work: impl Fn(usize) + Send + Sync) {
        if self.is_small() {
            (0..count).for_each(work);
        } else {
            (0..count).into_par_iter().for_each(work);
        }
    }

    /// The tile of a task; `None` when row groups leave none.
    fn tile(&self, tile: usize) -> Option<Tile> {
        match self.op.rows_grouped {
            true => self.cut.tile_of_groups(tile, self.op.groups(|i| self.offset(i))),
            false => Some(self.cut.tile(tile)),
        }
    }

    /// An offset; 0 without offsets.
    fn offset(&self, i: usize) -> u32 {
        let (words, _) = self.offsets.unwrap_or_default().as_chunks::<4>();
        words.get(i).map_or(0, |word| u32::from_le_bytes(*word))
    }

    /// Computes a tile over all of K.
    fn whole(&self, tile: &Tile) {
        let sums = tile.rows.len() * tile.columns.len().next_multiple_of(BLOCK_ROWS);
        arena::with_activations(sums, |sums| {
            sums.fill(0.0);
            self.accumulate(tile, self.k_of(tile.product), sums);
            // SAFETY: tiles share no outputs.
            unsafe { self.store(tile, sums) };
        });
    }

    /// The K range of a product, clamped to K
    /// and never reversed.
    fn k_of(&self, product: usize) -> Range<usize> {
        if !self.op.k_grouped {
            return 0..self.op.k;
        }
        let at = |i: usize| (self.offset(i) as usize).min(self.op.k);
        let first = at(product);
        first..at(product + 1).max(first)
    }

    /// A and B of a product.
    fn factors(&self, product: usize) -> (Factor<'a>, Factor<'a>) {
        let (a, b) = (&self.a, &self.b);
        let Some([of_a, of_b]) = self.scales else { return (a.of(product), b.of(product)) };
        let a = Blocks::of_a(a.bytes_of(product), &a.layout, of_a, self.op.a_scale_row);
        (Factor::Blocks(a), Factor::Blocks(Blocks::of_b(b.bytes_of(product), &b.layout, of_b, self.op.b_scale_row)))
    }

    /// Computes the split-K parts of every tile, then
    /// adds them in a tree: pairs of neighbours, then
    /// pairs of pairs, and so on.
    fn in_parts(&self) {
        let (tiles, parts) = (self.cut.tiles(), self.cut.parts);
        let each = self.cut.rows * self.cut.blocks * BLOCK_ROWS;
        arena::with_activations(tiles * parts * each, |all| {
            all.par_chunks_mut(each).enumerate().for_each(|(task, sums)| {
                sums.fill(0.0);
                self.accumulate(&self.cut.tile(task / parts), self.cut.part(task % parts), sums);
            });
            all.par_chunks_mut(each * parts).enumerate().for_each(|(tile, sums)| {
                let mut apart = 1;
                while apart < parts {
                    for pair in sums.chunks_mut(2 * apart * each) {
                        if let Some((left, right)) = pair.split_at_mut_checked(apart * each) {
                            left.iter_mut().zip(right).take(each).for_each(|(left, right)| *left += *right);
                        }
                    }
                    apart *= 2;
                }
                // SAFETY: tiles share no outputs.
                unsafe { self.store(&self.cut.tile(tile), sums) };
            });
        });
    }

    /// Adds the products of a tile over `k` to `sums[block][row][column]`.
    fn accumulate(&self, tile: &Tile, k: Range<usize>, sums: &mut [f32]) {
        if k.is_empty() {
            return;
        }
        let (a, b) = self.factors(tile.product);
        let rows = tile.rows.len();
        let chunk = CHUNK.min(k.len().next_multiple_of(STEP));
        arena::with_tile(rows * chunk + BLOCK_ROWS * STEP, |scratch| {
            let (a_panel, b_block) = scratch.split_at_mut(rows * chunk);
            for first in k.clone().step_by(CHUNK) {
                let values = CHUNK.min(k.end - first);
                let columns = values.next_multiple_of(STEP);
                let a_panel = &mut a_panel[..rows * columns];
                self.load_a(&a, tile.rows.clone(), first..first + values, columns, a_panel);
                for (block, sums) in sums.chunks_mut(rows * BLOCK_ROWS).enumerate() {
                    let left = tile.columns.start + block * BLOCK_ROWS;
                    if left >= tile.columns.end {
                        break;
                    }
                    let of_block = left..tile.columns.end.min(left + BLOCK_ROWS);
                    for step in (0..values).step_by(STEP) {
                        let k = first + step..(first + step + STEP).min(k.end);
                        self.load_b(&b, k, of_block.clone(), b_block);
                        self.multiply(b_block, &a_panel[step..], columns, rows, sums);
                    }
                }
            }
        });
    }

    /// Reorders columns `k` of rows of A, each zero-padded to `columns`.
    fn load_a(&self, a: &Factor<'_>, rows: Range<usize>, k: Range<usize>, columns: usize, out: &mut [f32]) {
        let at_once = a.rows_at_once();
        for (i, out) in out.chunks_mut(at_once * columns).enumerate() {
            let first = rows.start + i * at_once;
            let of_rows = first..first + out.len() / columns;
            a.rows(self.simd, of_rows, k.clone(), out);
            // Data after this part of K belongs to the next part.
            out.chunks_mut(columns).for_each(|row| row[k.len()..].fill(0.0));
        }
    }

    /// Reorders rows `k` and some columns of B to
    /// `out[tile][k][lane]`, zero-padded.
    fn load_b(&self, b: &Factor<'_>, k: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        if k.len() < STEP || columns.len() < BLOCK_ROWS {
            out.fill(0.0);
        }
        if b.is_row_major() {
            let mut row = [0.0; BLOCK_ROWS];
            for (i, k) in k.enumerate() {
                let row = &mut row[..columns.len()];
                b.part(self.simd, k, columns.start, row);
                for (tile, lanes) in row.chunks(LANES).enumerate() {
                    let at = (tile * STEP + i) * LANES;
                    out[at..at + lanes.len()].copy_from_slice(lanes);
                }
            }
        } else {
            let mut down = [[0.0; STEP]; LANES];
            for tile in 0..TILES {
                let first = columns.start + tile * LANES;
                let lanes = LANES.min(columns.end.saturating_sub(first));
                for (lane, down) in down[..lanes].iter_mut().enumerate() {
                    b.down(self.simd, k.start, first + lane, &mut down[..k.len()]);
                }
                let out = &mut out[tile * STEP * LANES..][..STEP * LANES];
                for (i, out) in out.chunks_exact_mut(LANES).take(k.len()).enumerate() {
                    out[..lanes].iter_mut().zip(&down).for_each(|(out, down)| *out = down[i]);
                }
            }
        }
    }

    /// Adds the products of a block of B with
    /// every row of the panel.
    fn multiply(&self, b: &[f32], a: &[f32], stride: usize, rows: usize, sums: &mut [f32]) {
        let most = self.simd.tokens();
        for (i, sums) in sums[..rows * BLOCK_ROWS].chunks_mut(most * BLOCK_ROWS).enumerate() {
            self.simd.multiply(sums.len() / BLOCK_ROWS, b, &a[i * most * stride..], stride, STEP, sums);
        }
    }

    /// Runs the epilogue and writes the outputs of a tile.
    ///
    /// # Safety
    /// No other thread may store outputs of the tile.
    unsafe fn store(&self, tile: &Tile, sums: &mut [f32]) {
        let op = self.op;
        let d = self.d.of(if op.rows_grouped { 0 } else { tile.product });
        let c = self.c.as_ref().map(|c| c.input(tile.product, c.layout.dtype));
        for (block, sums) in sums.chunks_mut(tile.rows.len() * BLOCK_ROWS).enumerate() {
            let left = tile.columns.start + block * BLOCK_ROWS;
            if left >= tile.columns.end {
                break;
            }
            let width = BLOCK_ROWS.min(tile.columns.end - left);
            let mut bias = [0.0; BLOCK_ROWS];
            if let Some((bytes, dtype)) = self.bias {
                self.simd.to_f32(dtype, &bytes[left * dtype.bytes()..], &mut bias[..width]);
            }
            let how = Epilogue {
                alpha: self.alpha,
                beta: op.beta,
                row_scale: None,
                bias: self.bias.map(|_| &bias),
                activation: if op.slope { Activation::Identity } else { op.activation },
                gated: false,
            };
            for (row, sums) in tile.rows.clone().zip(sums.as_chunks_mut().0) {
                let mut of_c = [0.0; BLOCK_ROWS];
                match &c {
                    Some(c) => c.part(self.simd, row, left, &mut of_c[..width]),
                    // SAFETY: as for the store below.
                    None if op.accumulates => unsafe { d.load_part(self.simd, row, left, &mut of_c[..width]) },
                    None => {}
                }
                let reads = !op.slope && (c.is_some() || op.accumulates);
                let token = OfToken { scale: 1.0, c: reads.then_some(&of_c), residual: None };
                self.simd.finish(&how, &token, sums);
                if op.slope {
                    sums.iter_mut().zip(&of_c).for_each(|(sum, &at)| *sum *= slope(op.activation, at));
                }
                // SAFETY: guaranteed by the caller.
                unsafe { d.store_part(row, left, &sums[..width]) };
            }
        }
    }
}

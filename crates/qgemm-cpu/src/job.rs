//! One launch: the operands bound to an operation, and the steps that every family is made of.

use std::ops::Range;

use qgemm_formats::{DType, Encoding, NO_COLUMN};
use qgemm_hal::{CheckedGemm, Dense, DeviceId, GemmArgs, HalError, HostMemory};
use rayon::prelude::*;

use crate::activation::activate;
use crate::convert;
use crate::operand::{Input, Output};
use crate::simd::{LANES, ROWS, Rows, Simd, TOKEN_SUMS, sum};

/// Columns of W that are decoded at a time: whole blocks of every format, small enough for the nearest cache.
pub const CHUNK: usize = 512;

/// Multiply-adds below which the calling thread works alone: waking others takes longer.
const SERIAL_MACS: f64 = 65536.0;

/// An operation with its operands.
#[derive(Debug)]
pub struct Job<'a> {
    op: &'a CheckedGemm,
    simd: &'static Simd,
    x: Input<'a>,
    weight: &'a [u8],
    row_scale: Option<&'a [u8]>,
    k_order: Option<&'a [u8]>,
    c: Option<Input<'a>>,
    bias: Option<&'a [u8]>,
    token_scale: Option<&'a [u8]>,
    residual: Option<Input<'a>>,
    d: Output<'a>,
}

impl<'a> Job<'a> {
    /// Binds the buffers of a launch.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] for memory that is not the host's, [`HalError::OutOfBounds`] for an operand
    /// shorter than the operation says.
    pub fn new(op: &'a CheckedGemm, simd: &'static Simd, args: GemmArgs<'a>) -> Result<Self, HalError> {
        let bytes = |view, what| HostMemory::of_device(DeviceId::CPU, view, what);
        let exactly = |view, len: usize, what| -> Result<&'a [u8], HalError> {
            let bytes: &'a [u8] = bytes(view, what)?;
            bytes.get(..len).ok_or(HalError::OutOfBounds { what, start: 0, end: len, len: bytes.len() })
        };
        let GemmArgs { x, w, c, bias, token_scale, residual, d, .. } = args;
        let optional = |wanted: bool, view: Option<_>, len: usize, what| match (wanted, view) {
            (false, _) => Ok(None),
            (true, Some(view)) => exactly(view, len, what).map(Some),
            (true, None) => Err(HalError::OutOfBounds { what, start: 0, end: len, len: 0 }),
        };
        let like_d = |layout: &Option<Dense>, view: Option<_>, what| match (layout, view) {
            (Some(layout), Some(view)) => Input::new(bytes(view, what)?, *layout, [op.m, op.features], what).map(Some),
            (Some(_), None) => Err(HalError::OutOfBounds { what, start: 0, end: 1, len: 0 }),
            (None, _) => Ok(None),
        };
        Ok(Self {
            simd,
            x: Input::new(bytes(x, "X")?, op.x, [op.m, op.k], "X")?,
            weight: exactly(w.data, op.format.row_offset(op.n, op.stored_k), "W")?,
            row_scale: optional(op.row_scale, w.row_scale, op.n * 4, "row scales of W")?,
            k_order: optional(op.k_order, w.k_order, op.stored_k * 4, "column order of W")?,
            c: like_d(&op.c, c, "C")?,
            bias: optional(op.bias.is_some(), bias, op.bias_len() * op.bias.map_or(0, DType::bytes), "bias")?,
            token_scale: optional(op.token_scale, token_scale, op.m * 4, "token scales")?,
            residual: like_d(&op.residual, residual, "residual")?,
            d: Output::new(HostMemory::of_device_mut(DeviceId::CPU, d, "D")?, op.d, [op.m, op.features])?,
            op,
        })
    }

    /// The operation.
    pub fn op(&self) -> &CheckedGemm {
        self.op
    }

    /// The vector kernels.
    pub fn simd(&self) -> &'static Simd {
        self.simd
    }

    /// Floats of a row of X or W in scratch memory: the stored columns, padded.
    pub fn row_floats(&self) -> usize {
        padded(self.op.stored_k)
    }

    /// Chunks of the stored columns with padding: `CHUNK` long, the last one shorter.
    pub fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = self.row_floats();
        (0..end).step_by(CHUNK).map(move |start| start..end.min(start + CHUNK))
    }

    /// Calls `work` for every tile of `rows` rows of W, on all threads.
    pub fn for_each_tile(&self, rows: usize, tokens: usize, work: impl Fn(Range<usize>) + Sync) {
        let n = self.op.n;
        let tile = |i: usize| i * rows..n.min((i + 1) * rows);
        let tiles = n.div_ceil(rows);
        if n as f64 * tokens as f64 * (self.op.stored_k as f64) < SERIAL_MACS {
            (0..tiles).for_each(|i| work(tile(i)));
        } else {
            (0..tiles).into_par_iter().for_each(|i| work(tile(i)));
        }
    }

    /// Converts `tokens` rows of X to f32 in the order of W's stored columns, padded with zeros to
    /// [`Job::row_floats`].
    pub fn load_tokens(&self, tokens: Range<usize>, out: &mut [f32]) {
        let floats = self.row_floats();
        let load = |(i, out): (usize, &mut [f32])| self.load_token(tokens.start + i, out);
        let out = &mut out[..tokens.len() * floats];
        if ((tokens.len() * floats) as f64) < SERIAL_MACS {
            out.chunks_exact_mut(floats).enumerate().for_each(load);
        } else {
            out.par_chunks_exact_mut(floats).enumerate().for_each(load);
        }
    }

    fn load_token(&self, token: usize, out: &mut [f32]) {
        let (values, padding) = out.split_at_mut(self.op.stored_k);
        padding.fill(0.0);
        match self.k_order {
            None => self.x.row(token, values),
            Some(order) => {
                for (value, column) in values.iter_mut().zip(order.chunks_exact(4)) {
                    // A column that no input feature feeds has zero weights; 0 keeps NaN out of the product.
                    *value = match u32::from_le_bytes([column[0], column[1], column[2], column[3]]) {
                        NO_COLUMN => 0.0,
                        column => self.x.at(token, column as usize),
                    };
                }
            }
        }
    }

    /// Decodes `columns`, a chunk, of `rows` of W to f32, [`CHUNK`] floats a row. Padding columns become 0. Row
    /// factors are left to [`Job::store`].
    pub fn decode(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        let format = self.op.format;
        let values = columns.start..columns.end.min(self.op.stored_k);
        let blocks = values.start / format.block_len..values.end.div_ceil(format.block_len);
        let bytes = blocks.start * format.block_bytes..blocks.end * format.block_bytes;
        for (row, out) in rows.zip(out.chunks_exact_mut(CHUNK)) {
            let bytes = &self.weight[format.row_offset(row, self.op.stored_k)..][bytes.clone()];
            if let Encoding::Plain(dtype) = format.encoding {
                convert::to_f32(dtype, bytes, &mut out[..values.len()]);
            } else {
                let blocks = bytes.chunks_exact(format.block_bytes).zip(out.chunks_exact_mut(format.block_len));
                blocks.for_each(|(block, values)| (format.dequantize_block)(block, values));
            }
            out[values.len()..columns.len()].fill(0.0);
        }
    }

    /// Finishes and writes the outputs of `tokens` and `rows` of W, at most [`ROWS`] from the first of `sums` on: the
    /// sums of every token, [`TOKEN_SUMS`] apart.
    ///
    /// # Safety
    /// No other thread may store these outputs of this job.
    pub unsafe fn store(&self, tokens: Range<usize>, rows: Range<usize>, sums: &[f32]) {
        for (token, sums) in tokens.zip(sums.chunks_exact(TOKEN_SUMS)) {
            for (row, lanes) in rows.clone().zip(sums.as_chunks::<LANES>().0) {
                let value = activate(self.op.activation, self.linear(token, row, row, sum(lanes)));
                // SAFETY: the caller's promise.
                unsafe { self.finish(token, row, value) };
            }
        }
    }

    /// As [`Job::store`], of a gated pair, for the sums of [`ROWS`] rows of the gate, `first_row` being the first, and of
    /// the rows of the up that follow them.
    ///
    /// # Safety
    /// No other thread may store these outputs of this job.
    pub unsafe fn store_gated(&self, tokens: Range<usize>, first_row: usize, gate: &[f32], up: &[f32]) {
        let features = self.op.features;
        let first = first_row / 2;
        for (token, (gate, up)) in tokens.zip(gate.chunks_exact(TOKEN_SUMS).zip(up.chunks_exact(TOKEN_SUMS))) {
            let sums = gate.as_chunks::<LANES>().0.iter().zip(up.as_chunks::<LANES>().0);
            for (i, (gate, up)) in sums.take(features - first).enumerate() {
                let feature = first + i;
                let gate = self.linear(token, first_row + i, feature, sum(gate));
                let up = self.linear(token, first_row + ROWS + i, features + feature, sum(up));
                // SAFETY: the caller's promise.
                unsafe { self.finish(token, feature, activate(self.op.activation, gate) * up) };
            }
        }
    }

    /// What the activation is applied to, or, of a gated pair's up, what the activated gate is multiplied with.
    fn linear(&self, token: usize, row: usize, bias_index: usize, product: f32) -> f32 {
        let op = self.op;
        let scale = |scales: Option<&[u8]>, index| scales.map_or(1.0, |scales| DType::F32.read(scales, index));
        let mut value = op.alpha * (product * scale(self.row_scale, row)) * scale(self.token_scale, token);
        if let Some(c) = &self.c {
            value += op.beta * c.at(token, row);
        }
        if let (Some(bias), Some(dtype)) = (self.bias, op.bias) {
            value += dtype.read(bias, bias_index);
        }
        value
    }

    /// Adds the residual and writes the result.
    ///
    /// # Safety
    /// No other thread may store (`token`, `feature`) of this job.
    unsafe fn finish(&self, token: usize, feature: usize, value: f32) {
        let residual = self.residual.as_ref().map_or(0.0, |residual| residual.at(token, feature));
        // SAFETY: the caller's promise.
        unsafe { self.d.store(token, feature, value + residual) }
    }
}

/// Stored columns rounded up to whole vectors.
pub fn padded(stored_k: usize) -> usize {
    stored_k.next_multiple_of(LANES)
}

/// Tokens of scratch memory made by [`Job::load_tokens`], from token `first` and column `column` on.
pub fn tokens_from(x: &[f32], floats: usize, first: usize, column: usize) -> Rows<'_> {
    Rows { values: &x[first * floats + column..], stride: floats }
}

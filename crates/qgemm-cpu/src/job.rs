//! One launch: the operands bound to an operation, and the steps that every family is made of.

use std::ops::Range;

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, NO_COLUMN};
use qgemm_hal::{CheckedGemm, Dense, DeviceId, GemmArgs, HalError, HostMemory};
use rayon::prelude::*;

use crate::activation::activate;
use crate::operand::{Input, Output};
use crate::packed::Packed;
use crate::simd::{BLOCK_ROWS, LANES, Simd};

/// Multiply-adds below which the calling thread works alone: waking others takes longer.
const SERIAL_MACS: f64 = 65536.0;

/// An operation with its operands.
#[derive(Debug)]
pub struct Job<'a> {
    op: &'a CheckedGemm,
    simd: &'static Simd,
    x: Input<'a>,
    weight: Packed<'a>,
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
    pub fn new(
        op: &'a CheckedGemm,
        layout: &'a PackedLayout,
        simd: &'static Simd,
        args: GemmArgs<'a>,
    ) -> Result<Self, HalError> {
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
            weight: Packed::new(
                layout,
                exactly(w.data, layout.bytes(op.n, op.stored_k), "W")?,
                layout.k_slabs(op.stored_k),
            ),
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

    /// The weight.
    pub fn weight(&self) -> &Packed<'a> {
        &self.weight
    }

    /// Floats of a row of X in scratch memory: the columns of whole slabs.
    pub fn row_floats(&self) -> usize {
        row_floats(self.weight.layout(), self.op.stored_k)
    }

    /// Calls `work` with the first row of every block of [`BLOCK_ROWS`] rows of W, on all threads.
    pub fn for_each_block(&self, tokens: usize, work: impl Fn(usize) + Sync) {
        let blocks = self.op.n.div_ceil(BLOCK_ROWS);
        if self.op.n as f64 * tokens as f64 * (self.op.stored_k as f64) < SERIAL_MACS {
            (0..blocks).for_each(|i| work(i * BLOCK_ROWS));
        } else {
            (0..blocks).into_par_iter().for_each(|i| work(i * BLOCK_ROWS));
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

    /// Finishes and writes the outputs of `tokens` and the block of rows from `first_row` on: the sums of every token,
    /// [`BLOCK_ROWS`] apart. Of a gated pair, eight rows of the gate and the same of the up follow one another.
    ///
    /// # Safety
    /// No other thread may store these outputs of this job.
    pub unsafe fn store(&self, tokens: Range<usize>, first_row: usize, sums: &[f32]) {
        let rows = BLOCK_ROWS.min(self.op.n - first_row);
        for (token, sums) in tokens.zip(sums.chunks_exact(BLOCK_ROWS)) {
            if self.op.gated {
                for (tile, sums) in sums[..rows].chunks_exact(LANES).enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { self.store_gated(token, first_row + tile * LANES, sums) };
                }
                continue;
            }
            for (row, &sum) in (first_row..).zip(&sums[..rows]) {
                let value = activate(self.op.activation, self.linear(token, row, row, sum));
                // SAFETY: the caller's promise.
                unsafe { self.finish(token, row, value) };
            }
        }
    }

    /// The outputs of sixteen rows of a gated pair.
    ///
    /// # Safety
    /// As of [`Job::store`].
    unsafe fn store_gated(&self, token: usize, first_row: usize, sums: &[f32]) {
        let features = self.op.features;
        let (gate, up) = sums.split_at(LANES / 2);
        for (i, (&gate, &up)) in gate.iter().zip(up).enumerate() {
            let (row, feature) = (first_row + i, first_row / 2 + i);
            if feature >= features {
                break;
            }
            let gate = self.linear(token, row, feature, gate);
            let up = self.linear(token, row + LANES / 2, features + feature, up);
            // SAFETY: the caller's promise.
            unsafe { self.finish(token, feature, activate(self.op.activation, gate) * up) };
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

/// Stored columns rounded up to whole slabs.
pub fn row_floats(layout: &PackedLayout, stored_k: usize) -> usize {
    layout.k_slabs(stored_k) * layout.slab_k
}

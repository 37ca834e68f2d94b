//! One launch: an operation with bound operands, and the
//! steps common to all families.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_formats::prepack::PackedLayout;
use qgemm_hal::{CheckedGemm, Dense, DeviceId, GemmOperand, HalError, HostMemory, Operand, Operands};
use rayon::prelude::*;

use crate::arena;
use crate::given_codes::GivenCodes;
use crate::operand::{Input, Output, absent, host_bytes};
use crate::ordered::Ordered;
use crate::packed::Packed;
use crate::simd::{BLOCK_ROWS, Epilogue, LANES, OfRows, OfToken, Quantization, Scales, Simd};

/// An operation with bound operands.
#[derive(Debug)]
pub struct Job<'a> {
    op: &'a CheckedGemm,
    simd: &'static Simd,
    x: X<'a>,
    weight: Packed<'a>,
    row_scale: Option<&'a [u8]>,
    c: Option<Input<'a>>,
    bias: Option<&'a [u8]>,
    token_scale: Option<&'a [u8]>,
    /// The residual, if it is not held by D.
    residual: Option<Input<'a>>,
    d: Output<'a>,
    /// Further output segments, with their first features.
    segments: Vec<(usize, Output<'a>)>,
}

/// Activations of a job.
#[derive(Debug)]
enum X<'a> {
    /// Unquantized.
    Plain(Ordered<'a>),
    /// INT8, multiplied directly.
    Codes(GivenCodes<'a>),
}

/// Bytes of a job's operands; empty when absent.
pub struct Parts<'a> {
    pub x: &'a [u8],
    pub x_scales: &'a [u8],
    pub w: &'a [u8],
    pub row_scale: &'a [u8],
    pub k_order: &'a [u8],
    pub c: &'a [u8],
    pub bias: &'a [u8],
    pub token_scale: &'a [u8],
    pub residual: &'a [u8],
    pub d: &'a mut [u8],
    /// Outputs of further segments.
    pub others: Vec<&'a mut [u8]>,
}

impl<'a> Job<'a> {
    /// Binds the operands of a launch. `x` is X as the
    /// operation describes it, if unquantized.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] for memory that is not on the host,
    /// [`HalError::OutOfBounds`] for an operand that is too short.
    pub fn new(
        op: &'a CheckedGemm,
        x: Option<Dense>,
        layout: &'a PackedLayout,
        scales: &'a Scales,
        simd: &'static Simd,
        mut operands: Operands<'a>,
    ) -> Result<Self, HalError> {
        use GemmOperand as O;
        let mut output = |operand: O| {
            let view = operands.take_mut(operand).ok_or(absent(operand.name(), 1))?;
            HostMemory::of_device_mut(DeviceId::CPU, view, operand.name())
        };
        let d = output(O::D)?;
        let others = op.outputs().skip(1).map(|(operand, ..)| output(operand)).collect::<Result<_, _>>()?;
        let mut take = |operand: O| operands.take(operand).map(|view| host_bytes(view, operand.name())).transpose();
        let parts = Parts {
            x: take(O::X)?.unwrap_or_default(),
            x_scales: take(O::XScales)?.unwrap_or_default(),
            w: take(O::W)?.unwrap_or_default(),
            row_scale: take(O::RowScale)?.unwrap_or_default(),
            k_order: take(O::KOrder)?.unwrap_or_default(),
            c: take(O::C)?.unwrap_or_default(),
            bias: take(O::Bias)?.unwrap_or_default(),
            token_scale: take(O::TokenScale)?.unwrap_or_default(),
            residual: take(O::Residual)?.unwrap_or_default(),
            d,
            others,
        };
        Self::of_parts(op, x, layout, scales, simd, parts)
    }

    /// As [`Job::new`], for memory known to be on the host.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] for an operand that is too short.
    pub fn of_parts(
        op: &'a CheckedGemm,
        x: Option<Dense>,
        layout: &'a PackedLayout,
        scales: &'a Scales,
        simd: &'static Simd,
        parts: Parts<'a>,
    ) -> Result<Self, HalError> {
        use GemmOperand as O;
        let exactly = |operand: O, bytes: &'a [u8], len: usize| -> Result<&'a [u8], HalError> {
            let what = operand.name();
            bytes.get(..len).ok_or(HalError::OutOfBounds { what, start: 0, end: len, len: bytes.len() })
        };
        let optional = |wanted: bool, operand, bytes, len| wanted.then(|| exactly(operand, bytes, len)).transpose();
        let matrix = |layout: Dense, operand: O, bytes: &'a [u8], columns: usize| {
            Input::new(bytes, layout, [op.m, columns], operand.name())
        };
        let weight = exactly(O::W, parts.w, layout.bytes(op.stored_rows, op.stored_k))?;
        let k_order = optional(op.k_order, O::KOrder, parts.k_order, op.stored_k * 4)?;
        let bias_bytes = op.bias_len() * op.bias.map_or(0, DType::bytes);
        let features = op.out_features;
        let x = match (x, &op.x.planes) {
            (Some(x), _) => X::Plain(Ordered::new(matrix(x, O::X, parts.x, op.k)?, k_order)),
            (None, Some(planes)) => {
                let (codes, scales) = ((parts.x, O::X.name()), (parts.x_scales, O::XScales.name()));
                X::Codes(GivenCodes::new(planes, [op.m, op.k], codes, scales)?)
            }
            (None, None) => return Err(absent(O::X.name(), 1)),
        };
        let output = |((operand, features, layout), bytes): ((O, Range<usize>, Dense), &'a mut [u8])| {
            Ok::<_, HalError>((features.start, Output::new(bytes, layout, [op.m, features.len()], operand.name())?))
        };
        let (_, d) = output(((O::D, 0..op.outputs().next().map_or(0, |(_, of_d, _)| of_d.end), op.d), parts.d))?;
        let segments = op.outputs().skip(1).zip(parts.others).map(output).collect::<Result<_, _>>()?;
        Ok(Self {
            simd,
            x,
            weight: Packed::new(layout, scales, weight, layout.k_tiles(op.stored_k)),
            row_scale: optional(op.row_scale, O::RowScale, parts.row_scale, op.stored_rows * 4)?,
            c: op.c.map(|c| matrix(c, O::C, parts.c, features)).transpose()?,
            bias: optional(op.bias.is_some(), O::Bias, parts.bias, bias_bytes)?,
            token_scale: optional(op.token_scale, O::TokenScale, parts.token_scale, op.m * 4)?,
            residual: (op.residual.filter(|_| !op.residual_in_d))
                .map(|residual| matrix(residual, O::Residual, parts.residual, features))
                .transpose()?,
            d,
            segments,
            op,
        })
    }

    /// The operation.
    pub fn op(&self) -> &CheckedGemm {
        self.op
    }

    /// The SIMD kernels.
    pub fn simd(&self) -> &'static Simd {
        self.simd
    }

    /// The weight.
    pub fn weight(&self) -> &Packed<'a> {
        &self.weight
    }

    /// Columns of a row of X in scratch memory: whole k-tiles.
    pub fn row_columns(&self) -> usize {
        row_columns(self.weight.layout(), self.op.stored_k)
    }

    /// Converts `tokens` rows of X to f32 in the order of
    /// W's stored columns, zero-padded to [`Job::row_columns`];
    /// on all threads if `shared`.
    pub fn load_tokens(&self, tokens: Range<usize>, shared: bool, out: &mut [f32]) {
        let X::Plain(x) = &self.x else { unreachable!("codes are multiplied as they are") };
        let (columns, rows) = (self.row_columns(), Ordered::rows_at_once(x.layout()));
        let out = &mut out[..tokens.len() * columns];
        let load = |(i, out): (usize, &mut [f32])| {
            let first = tokens.start + i * rows;
            x.load(self.simd, first..first + out.len() / columns, 0, out);
        };
        if shared {
            out.par_chunks_mut(rows * columns).enumerate().for_each(load);
        } else {
            out.chunks_mut(rows * columns).enumerate().for_each(load);
        }
    }

    /// Quantizes `tokens` rows of X (unless given quantized) in the
    /// order of W's stored columns, padded as in
    /// [`Job::load_tokens`]; on all threads if `shared`.
    ///
    /// The output is ordered by steps of `step` columns over all
    /// tokens. Within a step, words of a token group are
    /// interleaved ([`Simd::token_groups`]).
    pub fn quantize_tokens(
        &self,
        how: &Quantization,
        tokens: Range<usize>,
        step: usize,
        unpacked: bool,
        shared: bool,
        out: &mut [u32],
    ) {
        let (columns, most) = (self.row_columns(), self.simd.quantized_tokens(unpacked));
        let part_of = |i: usize| i * step..columns.min((i + 1) * step);
        let quantize = |part: Range<usize>, i: usize, mut out: &mut [u32]| {
            let words = how.row(part.len()).words;
            let mut first = tokens.start + i * most;
            for count in self.simd.token_groups(unpacked, out.len() / words) {
                let group = out.split_off_mut(..count * words).unwrap_or_default();
                self.quantize_group(how, first..first + count, part.clone(), group);
                first += count;
            }
        };
        let of_step = tokens.len() * how.row(step).words;
        if shared {
            out.par_chunks_mut(of_step).enumerate().for_each(|(i, out)| {
                let of_groups = most * how.row(part_of(i).len()).words;
                let groups = out.par_chunks_mut(of_groups).enumerate();
                groups.for_each(|(group, out)| quantize(part_of(i), group, out));
            });
        } else {
            for (i, out) in out.chunks_mut(of_step).enumerate() {
                let of_groups = most * how.row(part_of(i).len()).words;
                let groups = out.chunks_mut(of_groups).enumerate();
                groups.for_each(|(group, out)| quantize(part_of(i), group, out));
            }
        }
    }

    /// Quantizes the columns `part` of a token group.
    fn quantize_group(&self, how: &Quantization, tokens: Range<usize>, part: Range<usize>, out: &mut [u32]) {
        let (words, count) = (how.row(part.len()).words, tokens.len());
        arena::with_tile(part.len() + words, |scratch| {
            let (values, words) = scratch.split_at_mut(part.len());
            let words: &mut [u32] = bytemuck::cast_slice_mut(words);
            for (i, token) in tokens.enumerate() {
                let to = if count == 1 { &mut *out } else { &mut *words };
                match &self.x {
                    X::Plain(x) => {
                        x.load(self.simd, token..token + 1, part.start, values);
                        self.simd.quantize(how, values, to);
                    }
                    X::Codes(codes) => codes.load(how, token, part.start, part.len(), to),
                }
                if count > 1 {
                    out[i..].iter_mut().step_by(count).zip(&*words).for_each(|(to, &word)| *to = word);
                }
            }
        });
    }

    /// Runs the epilogue and writes the outputs of `tokens` for the
    /// row block at `first_row`. Accumulators of tokens are
    /// [`BLOCK_ROWS`] apart. In a gated pair, eight rows of the gate
    /// alternate with eight rows of the up.
    ///
    /// # Safety
    /// No other thread may store these outputs of this job.
    pub unsafe fn store(&self, tokens: Range<usize>, first_row: usize, sums: &mut [f32]) {
        let op = self.op;
        let rows = BLOCK_ROWS.min(op.stored_rows - first_row);
        let (feature, outputs) = match op.gated {
            true => (first_row / 2, (rows / 2).min(op.out_features - first_row / 2)),
            false => (first_row, rows),
        };
        let mut of_rows = [[0.0; BLOCK_ROWS]; 2];
        let [row_scale, bias] = &mut of_rows;
        let how = Epilogue {
            alpha: op.alpha,
            beta: op.beta,
            row_scale: self.row_scale.map(|scales| {
                self.simd.to_f32(DType::F32, &scales[4 * first_row..], &mut row_scale[..rows]);
                &*row_scale
            }),
            bias: self.bias.zip(op.bias).map(|(biases, dtype)| {
                self.load_bias(biases, dtype, feature, outputs, bias);
                &*bias
            }),
            activation: op.activation,
            gated: op.gated,
        };
        for (token, sums) in tokens.zip(sums.as_chunks_mut().0) {
            let mut of_outputs = [[0.0; BLOCK_ROWS]; 2];
            let [c, residual] = &mut of_outputs;
            let of_token = OfToken {
                scale: self.token_scale.map_or(1.0, |scales| DType::F32.read(scales, token)),
                c: self.c.map(|from| self.load_outputs(from, token, feature, outputs, c)),
                residual: op.residual.map(|_| match self.residual {
                    Some(from) => self.load_outputs(from, token, feature, outputs, residual),
                    None => {
                        // SAFETY: guaranteed by the caller; this thread
                        // writes these outputs below.
                        unsafe { self.d.load_part(self.simd, token, feature, &mut residual[..outputs]) };
                        &*residual
                    }
                }),
            };
            self.simd.finish(&how, &of_token, sums);
            // SAFETY: guaranteed by the caller.
            unsafe { self.store_outputs(token, feature, &sums[..outputs]) };
        }
    }

    /// Writes outputs of a token from `feature` on,
    /// each to its segment.
    ///
    /// # Safety
    /// As for [`Job::store`].
    unsafe fn store_outputs(&self, token: usize, feature: usize, values: &[f32]) {
        let mut rest = values;
        // The last segment first.
        for (first, output) in self.segments.iter().rev() {
            let end = feature + rest.len();
            if end > *first && !rest.is_empty() {
                let from = feature.max(*first);
                // SAFETY: guaranteed by the caller.
                unsafe { output.store_part(token, from - first, &rest[from - feature..]) };
                rest = &rest[..from - feature];
            }
        }
        if !rest.is_empty() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.d.store_part(token, feature, rest) };
        }
    }

    /// Biases of `outputs` outputs from `feature` on, in the
    /// order of the block's rows.
    fn load_bias(&self, biases: &[u8], dtype: DType, feature: usize, outputs: usize, out: &mut OfRows) {
        const HALF: usize = LANES / 2;
        let from = |first: usize| &biases[first * dtype.bytes()..];
        if !self.op.gated {
            return self.simd.to_f32(dtype, from(feature), &mut out[..outputs]);
        }
        for first in (0..outputs).step_by(HALF) {
            let len = HALF.min(outputs - first);
            let (gate, up) = out[2 * first..].split_at_mut(HALF);
            self.simd.to_f32(dtype, from(feature + first), &mut gate[..len]);
            self.simd.to_f32(dtype, from(self.op.out_features + feature + first), &mut up[..len]);
        }
    }

    /// Values of `from` for a token and some outputs.
    fn load_outputs<'v>(
        &self,
        from: Input<'_>,
        token: usize,
        feature: usize,
        outputs: usize,
        out: &'v mut OfRows,
    ) -> &'v OfRows {
        from.part(self.simd, token, feature, &mut out[..outputs]);
        out
    }
}

/// Stored columns rounded up to whole k-tiles.
pub fn row_columns(layout: &PackedLayout, stored_k: usize) -> usize {
    layout.k_tiles(stored_k) * layout.k_tile
}

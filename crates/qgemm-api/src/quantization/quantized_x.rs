//! Quantized X in device memory ([`QuantizedX`]).

use std::fmt;

use qgemm_formats::{ActivationFormat, DType, XFormat, XParts};
use qgemm_hal::{Buffer, BufferRef, CheckedQuantize, DeviceId, XPlanes};

use super::description::Quantization;
use super::plan::{PlaneExtents, QuantizationArgs};
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent};

/// Quantized activations in device memory, reusable by many products.
///
/// A [`QuantizationPlan`](crate::QuantizationPlan) writes them, or the
/// caller provides the planes.
#[derive(Debug)]
pub struct QuantizedX {
    op: CheckedQuantize,
    planes: QuantizedXParts,
}

/// Planes of a [`QuantizedX`], with the row strides of its [`Quantization`].
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizedXParts {
    /// Codes: one byte per column, or a nibble.
    pub codes: Buffer,
    /// Scales per block or token, if the format has them.
    pub scales: Option<Buffer>,
    /// Token factors, f32, if the format has them.
    pub token_factors: Option<Buffer>,
    /// X block sums, if the format has them.
    pub sums: Option<Buffer>,
}

impl QuantizedXParts {
    /// Planes with codes only. The others are fields.
    pub fn new(codes: Buffer) -> Self {
        Self { codes, scales: None, token_factors: None, sums: None }
    }
}

impl QuantizedX {
    /// Allocates the planes that `op` writes.
    pub(crate) fn allocate(ctx: &Context, op: &CheckedQuantize) -> Result<Self, Error> {
        let planes = PlaneExtents::of(op);
        let plane = |extent: Extent| Ok::<_, Error>(ctx.allocate(extent.bytes())?.typed(extent.element()));
        let optional = |extent: Option<Extent>| extent.map(plane).transpose();
        let planes = QuantizedXParts {
            codes: plane(planes.codes)?,
            scales: optional(planes.scales)?,
            token_factors: optional(planes.token_factors)?,
            sums: optional(planes.sums)?,
        };
        Ok(Self { op: *op, planes })
    }

    /// Wraps the caller's planes, in the layout of `quantization`. Its source X is ignored.
    ///
    /// # Errors
    /// When the quantization is invalid, or a plane is missing, too short, misaligned,
    /// on another device than the codes, or not part of the format.
    pub fn from_parts(quantization: &Quantization, planes: QuantizedXParts) -> Result<Self, Error> {
        let op = quantization.check()?;
        let expected = PlaneExtents::of(&op);
        let checks = Checks(BufferRef::from(&planes.codes).device());
        checks.view("codes", (&planes.codes).into(), expected.codes)?;
        let why = "the format has such a plane";
        for (name, plane, extent) in [
            ("scales", &planes.scales, expected.scales),
            ("token factors", &planes.token_factors, expected.token_factors),
            ("sums", &planes.sums, expected.sums),
        ] {
            checks.optional(name, plane.as_ref().map(BufferRef::from), extent, why)?;
        }
        Ok(Self { op, planes })
    }

    /// Uploads rows of ggml blocks from host memory. Each row has the
    /// blocks of `columns` values.
    ///
    /// Codes and scales are split into planes; f16 scales (and sums) become f32, without
    /// rounding. Codes after the last column are 0.
    ///
    /// ```
    /// use qgemm_api::{ActivationFormat, Context, QuantizedX, XFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let mut blocks = [0; 2 * 3 * 36];
    /// ActivationFormat::Q8_1.quantize_blocks(&[0.5; 2 * 96], &mut blocks);
    /// let x = QuantizedX::from_blocks(&ctx, ActivationFormat::Q8_1, 2, 96, &blocks)?;
    /// assert_eq!((x.format(), x.rows(), x.columns()), (XFormat::Q8_1, 2, 96));
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongLength`] when the length of `blocks` does not match rows
    /// and columns. Out of memory.
    pub fn from_blocks(
        ctx: &Context,
        format: ActivationFormat,
        rows: usize,
        columns: usize,
        blocks: &[u8],
    ) -> Result<Self, Error> {
        let op = Quantization::new(rows, columns, DType::F32, format.x_format()).check()?;
        let of_row = columns.div_ceil(format.block_len());
        let expected = of_row.saturating_mul(format.block_bytes()).saturating_mul(rows);
        if blocks.len() != expected {
            return Err(Error::WrongLength { operand: "blocks of activations", expected, got: blocks.len() });
        }
        let planes = format.planes(blocks);
        let mut codes: Vec<u8> = planes.codes.iter().map(|&code| code as u8).collect();
        let stored = of_row * format.block_len();
        codes.chunks_exact_mut(stored.max(1)).for_each(|row| row[columns..].fill(0));
        let sums = op.parts.sum_span.map(|_| ctx.upload(&planes.sums)).transpose()?;
        let (codes, scales) = (ctx.upload(&codes)?, Some(ctx.upload(&planes.scales)?));
        Ok(Self { op, planes: QuantizedXParts { codes, scales, token_factors: None, sums } })
    }

    /// Checks that it matches a plan: at least `m` rows of `k`
    /// columns in planes like these.
    pub(crate) fn check_is(&self, m: usize, k: usize, format: XFormat, planes: &XPlanes) -> Result<(), Error> {
        let rows = |row: u64, expected: u64| m <= 1 || row == expected;
        let own = self.x_planes();
        let same = self.op.format == format
            && own.parts == planes.parts
            && self.op.columns == k
            && self.op.rows >= m
            && rows(own.codes_row, planes.codes_row)
            && rows(own.scales_row, planes.scales_row)
            && rows(own.sums_row, planes.sums_row);
        if same { Ok(()) } else { Err(Error::WrongX { expected: format, got: self.to_string() }) }
    }

    /// Strides of its planes.
    pub(crate) fn x_planes(&self) -> XPlanes {
        let CheckedQuantize { parts, codes_row, scales_row, sums_row, .. } = self.op;
        XPlanes { parts, codes_row, scales_row, sums_row }
    }

    /// Writable planes.
    pub(crate) fn planes_mut(&mut self) -> &mut QuantizedXParts {
        &mut self.planes
    }

    /// Arguments of a quantization of `x` into these planes.
    pub fn args<'a>(&'a mut self, x: impl Into<BufferRef<'a>>) -> QuantizationArgs<'a> {
        let QuantizedXParts { codes, scales, token_factors, sums } = &mut self.planes;
        let mut args = QuantizationArgs::new(x, codes);
        args.scales = scales.as_mut().map(Into::into);
        args.token_factors = token_factors.as_mut().map(Into::into);
        args.sums = sums.as_mut().map(Into::into);
        args
    }

    /// X format.
    pub fn format(&self) -> XFormat {
        self.op.format
    }

    /// Description of its planes.
    pub fn parts(&self) -> &XParts {
        &self.op.parts
    }

    /// Number of tokens.
    pub fn rows(&self) -> usize {
        self.op.rows
    }

    /// Columns of X. Codes have [`XParts::columns`].
    pub fn columns(&self) -> usize {
        self.op.columns
    }

    /// Device of the planes.
    pub fn device(&self) -> DeviceId {
        BufferRef::from(&self.planes.codes).device()
    }

    /// Codes.
    pub fn codes(&self) -> &Buffer {
        &self.planes.codes
    }

    /// Scales, if the format has them.
    pub fn scales(&self) -> Option<&Buffer> {
        self.planes.scales.as_ref()
    }

    /// Token factors, if the format has them.
    pub fn token_factors(&self) -> Option<&Buffer> {
        self.planes.token_factors.as_ref()
    }

    /// Sums, if the format has them.
    pub fn sums(&self) -> Option<&Buffer> {
        self.planes.sums.as_ref()
    }

    /// Row strides of codes, scales and sums, in bytes.
    pub fn row_strides(&self) -> [u64; 3] {
        [self.op.codes_row, self.op.scales_row, self.op.sums_row]
    }
}

/// Summary: `64 x 4096 in q8_1, sums of 32`.
impl fmt::Display for QuantizedX {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedQuantize { rows, columns, format, parts, codes_row, scales_row, sums_row, .. } = &self.op;
        write!(f, "{rows} x {columns} in {format}")?;
        if let Some(span) = parts.sum_span {
            write!(f, " with sums of {span}")?;
        }
        write!(f, ", rows of codes, scales and sums {codes_row}, {scales_row} and {sums_row} bytes apart")
    }
}

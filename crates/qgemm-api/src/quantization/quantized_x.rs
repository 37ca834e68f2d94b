//! [`QuantizedX`]: activations in codes and scales, in device memory.

use std::fmt;

use qgemm_formats::{ActivationFormat, DType, XFormat, XParts};
use qgemm_hal::{Buffer, BufferRef, CheckedQuantize, DeviceId, XPlanes};

use super::description::Quantization;
use super::plan::{PlaneExtents, QuantizationArgs};
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent};

/// Activations in codes and scales: a value of its own, made by a [`QuantizationPlan`](crate::QuantizationPlan) or of the caller's planes, that can be used
/// as often as is wanted.
#[derive(Debug)]
pub struct QuantizedX {
    op: CheckedQuantize,
    planes: QuantizedXParts,
}

/// The planes of a [`QuantizedX`], rows of each as far apart as its [`Quantization`] says.
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizedXParts {
    /// Codes: a byte a column, or the half of one.
    pub codes: Buffer,
    /// What blocks or tokens are scaled by, where the format has scales.
    pub scales: Option<Buffer>,
    /// An f32 a token, where tokens have factors.
    pub token_factors: Option<Buffer>,
    /// Sums, where the format has some.
    pub sums: Option<Buffer>,
}

impl QuantizedXParts {
    /// Codes alone; the other planes are fields to set.
    pub fn new(codes: Buffer) -> Self {
        Self { codes, scales: None, token_factors: None, sums: None }
    }
}

impl QuantizedX {
    /// Memory for what `op` writes.
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

    /// The caller's planes, laid out as those that `quantization` would write; what it says of X itself plays no part.
    ///
    /// # Errors
    /// When the quantization is not valid, or a plane is missing, too short, misaligned, on another device than the codes, or not
    /// one of the format's.
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

    /// Rows of ggml's blocks in host memory, one behind the other, each of the blocks that `columns` values fill: codes and scales are
    /// split into planes here and uploaded, scales (and sums) of f16 becoming f32. Nothing is rounded. Codes behind the last column become 0.
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
    /// [`Error::WrongLength`] when `blocks` are not those of so many rows and columns; when there is no memory.
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

    /// That it is what was planned for: the first `m` rows, or more, of `k` columns, in planes like these.
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

    /// How its planes lie.
    pub(crate) fn x_planes(&self) -> XPlanes {
        let CheckedQuantize { parts, codes_row, scales_row, sums_row, .. } = self.op;
        XPlanes { parts, codes_row, scales_row, sums_row }
    }

    /// The planes, to be written.
    pub(crate) fn planes_mut(&mut self) -> &mut QuantizedXParts {
        &mut self.planes
    }

    /// The arguments of a run that makes these planes of `x`.
    pub fn args<'a>(&'a mut self, x: impl Into<BufferRef<'a>>) -> QuantizationArgs<'a> {
        let QuantizedXParts { codes, scales, token_factors, sums } = &mut self.planes;
        let mut args = QuantizationArgs::new(x, codes);
        args.scales = scales.as_mut().map(Into::into);
        args.token_factors = token_factors.as_mut().map(Into::into);
        args.sums = sums.as_mut().map(Into::into);
        args
    }

    /// The format.
    pub fn format(&self) -> XFormat {
        self.op.format
    }

    /// Its planes.
    pub fn parts(&self) -> &XParts {
        &self.op.parts
    }

    /// Tokens.
    pub fn rows(&self) -> usize {
        self.op.rows
    }

    /// Columns of X; codes have [`XParts::columns`] of them.
    pub fn columns(&self) -> usize {
        self.op.columns
    }

    /// The device that it is on.
    pub fn device(&self) -> DeviceId {
        BufferRef::from(&self.planes.codes).device()
    }

    /// The codes.
    pub fn codes(&self) -> &Buffer {
        &self.planes.codes
    }

    /// The scales, where the format has some.
    pub fn scales(&self) -> Option<&Buffer> {
        self.planes.scales.as_ref()
    }

    /// The factors of tokens, where they have some.
    pub fn token_factors(&self) -> Option<&Buffer> {
        self.planes.token_factors.as_ref()
    }

    /// The sums, where the format has some.
    pub fn sums(&self) -> Option<&Buffer> {
        self.planes.sums.as_ref()
    }

    /// Bytes from one row to the next, of codes, scales and sums.
    pub fn row_strides(&self) -> [u64; 3] {
        [self.op.codes_row, self.op.scales_row, self.op.sums_row]
    }
}

/// What it is, in words: `64 x 4096 in q8_1, sums of 32`.
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

//! [`QuantizedX`]: activations in codes and scales, in device memory.

use qgemm_formats::{XFormat, XParts};
use qgemm_hal::{Buffer, BufferRef, CheckedQuantize, DeviceId};

use super::description::Quantization;
use super::plan::{PlaneExtents, QuantizationArgs, QuantizationPlan};
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent};

/// Activations in codes and scales: a value of its own, made by a [`QuantizationPlan`] or of the caller's planes, that can be used
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
    /// Memory for what a run of `plan` writes.
    pub(crate) fn allocate(ctx: &Context, plan: &QuantizationPlan) -> Result<Self, Error> {
        let planes = plan.planes();
        let optional = |extent: Option<Extent>| extent.map(|extent| ctx.allocate(extent.bytes())).transpose();
        let planes = QuantizedXParts {
            codes: ctx.allocate(planes.codes.bytes())?,
            scales: optional(planes.scales)?,
            token_factors: optional(planes.token_factors)?,
            sums: optional(planes.sums)?,
        };
        Ok(Self { op: *plan.op(), planes })
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

//! X operand of a run ([`XRef`]), plain or quantized.

use qgemm_formats::{DType, XFactor};
use qgemm_hal::{BufferRef, CheckedGemm, Operand, Operands};

use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::quantization::QuantizedX;

/// Activations of a run: a plain buffer or a [`QuantizedX`], converted from either.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum XRef<'a> {
    /// Plain numbers.
    Plain(BufferRef<'a>),
    /// Quantized X: codes, scales and other planes.
    Quantized(&'a QuantizedX),
}

impl<'a, T: Into<BufferRef<'a>>> From<T> for XRef<'a> {
    fn from(x: T) -> Self {
        XRef::Plain(x.into())
    }
}

impl<'a> From<&'a QuantizedX> for XRef<'a> {
    fn from(x: &'a QuantizedX) -> Self {
        XRef::Quantized(x)
    }
}

/// Requirements of a product on X.
pub(crate) struct XOf<'p> {
    /// Product; for experts, that of one.
    pub op: &'p CheckedGemm,
    /// Rows of X.
    pub rows: usize,
    /// Extent of a plain X. A quantized X is checked by its description.
    pub plain: Option<Extent>,
}

impl XOf<'_> {
    /// Checks `x` and adds it to `operands`: codes or numbers, scales, factors and sums.
    pub(crate) fn give<'a, O: Operand>(
        &self,
        x: XRef<'a>,
        factor: Option<BufferRef<'a>>,
        checks: Checks,
        [codes, scales, factors, sums]: [O; 4],
        operands: &mut Operands<'a>,
    ) -> Result<(), Error> {
        let &Self { op, rows, plain } = self;
        let format = op.x.format;
        let factor = checks.optional("x factor", factor, of_factor(op), "X was quantized with a given one")?;
        match (x, op.x.planes, plain) {
            // A norm reads a plain X, whatever it writes.
            (XRef::Plain(x), planes, Some(extent)) if planes.is_none() || op.norm.is_some() => {
                checks.view("X", x, extent)?;
                operands.read(codes, x);
                operands.read_if_any(factors, factor);
            }
            (XRef::Quantized(x), Some(planes), _) if op.norm.is_none() => {
                x.check_is(rows, op.k, format, &planes)?;
                checks.device("X", x.device())?;
                operands.read(codes, x.codes().into());
                operands.read_if_any(scales, x.scales().map(Into::into));
                operands.read_if_any(factors, x.token_factors().map(Into::into).or(factor));
                operands.read_if_any(sums, x.sums().map(Into::into));
            }
            (XRef::Plain(_), _, _) => return Err(Error::WrongX { expected: format, got: "plain numbers".into() }),
            (XRef::Quantized(x), _, _) => {
                let expected = op.norm.map_or(format, |norm| norm.x.dtype.into());
                return Err(Error::WrongX { expected, got: x.to_string() });
            }
        }
        Ok(())
    }
}

/// Extent of the given factor.
fn of_factor(op: &CheckedGemm) -> Option<Extent> {
    let planes = op.x.planes.filter(|planes| planes.parts.factor == XFactor::Given);
    planes.map(|_| Extent::of_values(DType::F32, 1))
}

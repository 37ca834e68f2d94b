//! A case of `quantize`, as data.

use std::fmt;

use qgemm_formats::{DType, XFactor, XFormat, XParts};

use crate::activations::ActivationKind;
use crate::convert::{ConvertCase, ConvertValues};

/// Memory layout of X and the planes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuantizeLayout {
    /// X is stored as `[columns, rows]`.
    pub x_transposed: bool,
    /// Elements between the stored rows of X, filled with NaN.
    pub x_gap: usize,
    /// Offset of X from an aligned address, in elements.
    pub x_offset: usize,
    /// Gap between rows, which must not be written: in 16 bytes for
    /// codes, in words for scales and sums.
    pub gap: usize,
    /// Offset of scales, factors and sums from an aligned address, in
    /// words.
    pub offset: usize,
}

/// A quantization to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeCase {
    /// Rows of X.
    pub rows: usize,
    /// Columns of X.
    pub columns: usize,
    /// Type of X.
    pub from: DType,
    /// The format of the result.
    pub to: XFormat,
    /// The given factor of all of X, if the format takes one.
    pub factor: Option<f32>,
    /// Columns per sum, for formats with sums.
    pub sum_span: Option<usize>,
    /// Kind of X.
    pub values: ConvertValues,
    /// Memory layout of X and the planes.
    pub layout: QuantizeLayout,
    /// Seed of all random values.
    pub seed: u64,
}

impl QuantizeCase {
    /// Formats that X can be quantized to.
    pub fn formats() -> impl Iterator<Item = XFormat> {
        XFormat::ALL.into_iter().filter(|format| format.plain().is_none())
    }

    /// Normal values, row-major, contiguous. Formats with a factor
    /// for all of X have it given.
    pub fn new(rows: usize, columns: usize, from: DType, to: XFormat) -> Self {
        let always_given = to.parts(false, None).is_some_and(|parts| parts.factor == XFactor::Given);
        Self {
            rows,
            columns,
            from,
            to,
            factor: always_given.then_some(0.0125),
            sum_span: None,
            values: ConvertValues::Like(ActivationKind::Normal),
            layout: QuantizeLayout::default(),
            seed: 1,
        }
    }

    /// The planes of the result.
    ///
    /// # Panics
    /// When the format is plain.
    pub(super) fn parts(&self) -> XParts {
        self.to.parts(self.factor.is_some(), self.sum_span).expect("a format of codes and scales")
    }

    /// `X[rows, columns]`, contiguous and representable in its type.
    pub(super) fn x(&self) -> Vec<f32> {
        let like = ConvertCase::new(self.rows, self.columns, self.from, self.from);
        ConvertCase { values: self.values, seed: self.seed, ..like }.x()
    }
}

/// A line for tables: `17x33 f32->q8_0 normal`, then non-default fields.
impl fmt::Display for QuantizeCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, columns, from, to, factor, sum_span, values, layout, seed } = self;
        write!(f, "{rows}x{columns} {from}->{to} {}", values.name())?;
        if let Some(factor) = factor {
            write!(f, " factor={factor:e}")?;
        }
        if let Some(span) = sum_span {
            write!(f, " sums-of={span}")?;
        }
        let &QuantizeLayout { x_transposed, x_gap, x_offset, gap, offset } = layout;
        if x_transposed {
            f.write_str(" x-transposed")?;
        }
        for (name, value) in [("x-gap", x_gap), ("x-offset", x_offset), ("gap", gap), ("offset", offset)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}

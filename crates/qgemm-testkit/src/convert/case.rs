//! A case of `convert`, as data.

use std::fmt;

use qgemm_formats::{DType, NO_COLUMN};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::activations::{ActivationKind, activations};

/// Column order of D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvertOrder {
    /// No order: columns stay.
    None,
    /// A permutation, followed by entries that are no column.
    Permuted,
    /// Any columns, repeated or missing, and invalid entries:
    /// `NO_COLUMN`, the number of columns, and more.
    Any,
}

/// Kind of X.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvertValues {
    /// Activations.
    Like(ActivationKind),
    /// Special values in turn: infinities, NaN, zeros of both signs,
    /// ends of every type's range, subnormals, ties and their
    /// neighbors.
    Special,
    /// Random bits: all exponents are equally likely.
    Bits,
}

impl ConvertValues {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ConvertValues::Like(kind) => kind.name(),
            ConvertValues::Special => "special",
            ConvertValues::Bits => "bits",
        }
    }
}

/// Memory layout of X and D.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConvertLayout {
    /// X is stored as `[columns, rows]`.
    pub x_transposed: bool,
    /// Elements between the stored rows of X, filled with NaN.
    pub x_gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Offset of X from an aligned address, in elements.
    pub x_offset: usize,
    /// Offset of D from an aligned address, in elements.
    pub d_offset: usize,
}

/// A conversion to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertCase {
    /// Rows of X and D.
    pub rows: usize,
    /// Columns of X.
    pub columns: usize,
    /// Columns of D.
    pub d_columns: usize,
    /// Type of X.
    pub from: DType,
    /// Type of D.
    pub to: DType,
    /// Column order of D.
    pub order: ConvertOrder,
    /// Whether rows have factors.
    pub row_factors: bool,
    /// Kind of X.
    pub values: ConvertValues,
    /// Memory layout of X and D.
    pub layout: ConvertLayout,
    /// Seed of all random values.
    pub seed: u64,
}

impl ConvertCase {
    /// Normal values, row-major, contiguous.
    pub fn new(rows: usize, columns: usize, from: DType, to: DType) -> Self {
        Self {
            rows,
            columns,
            d_columns: columns,
            from,
            to,
            order: ConvertOrder::None,
            row_factors: false,
            values: ConvertValues::Like(ActivationKind::Normal),
            layout: ConvertLayout::default(),
            seed: 1,
        }
    }

    /// `X[rows, columns]`, contiguous and representable in its type.
    pub(crate) fn x(&self) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0xc047_e470_0000_0000);
        let len = self.rows * self.columns;
        let values: Vec<f32> = match self.values {
            ConvertValues::Like(kind) => return activations(kind, self.rows, self.columns, self.from, self.seed),
            ConvertValues::Special => (0..len).map(|i| special(i + self.seed as usize)).collect(),
            ConvertValues::Bits => (0..len).map(|_| f32::from_bits(rng.random())).collect(),
        };
        // f16 has a smaller range, so its bits are drawn directly.
        match (self.values, self.from) {
            (ConvertValues::Bits, DType::F16) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| (v.to_bits() as u16).to_le_bytes()).collect();
                DType::F16.decode(&bytes)
            }
            (_, from) => from.decode(&from.encode(&values)),
        }
    }

    /// Column of X for every column of D. An entry past the last
    /// column is no column.
    pub(super) fn columns_of_d(&self) -> Vec<u32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x0dde_0000_0000_0000);
        let columns = self.columns as u32;
        match self.order {
            ConvertOrder::None => (0..self.d_columns as u32).collect(),
            ConvertOrder::Permuted => {
                let mut order: Vec<u32> = (0..columns).collect();
                order.shuffle(&mut rng);
                order.resize(self.d_columns, NO_COLUMN);
                order
            }
            ConvertOrder::Any => {
                let any = |i: usize| match i % 5 {
                    1 => [NO_COLUMN, columns, columns + 1, u32::MAX - 1][i / 5 % 4],
                    _ => rng.random_range(0..columns),
                };
                (0..self.d_columns).map(any).collect()
            }
        }
    }
}

/// Special value number `turn`.
fn special(turn: usize) -> f32 {
    let (f16_step, bf16_step) = (2f32.powi(-10), 2f32.powi(-7));
    let numbers = [
        f32::NAN,
        f32::INFINITY,
        0.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        // f32 subnormals: the smallest, a tie between two of bf16's, the
        // largest.
        f32::from_bits(1),
        f32::from_bits(0x0001_8000),
        f32::from_bits(0x007f_ffff),
        // Around the ends of f16's and bf16's range.
        65504.0,
        65519.0,
        65520.0,
        65536.0,
        f32::from_bits(0x7f7f_7fff),
        f32::from_bits(0x7f7f_8000),
        // f16 subnormals, and ties between them.
        2f32.powi(-24),
        2f32.powi(-25),
        3.0 * 2f32.powi(-25),
        2f32.powi(-25) * 1.000_001,
        2f32.powi(-14) - 2f32.powi(-25),
        // Ties of normal numbers to either side, and their neighbors.
        1.0 + f16_step / 2.0,
        1.0 + f16_step * 1.5,
        1.0 + f16_step * 0.500_1,
        1.0 + bf16_step / 2.0,
        1.0 + bf16_step * 1.5,
        1.0 + bf16_step * 0.500_01,
        2.0 - f16_step / 2.0,
        1.0 / 3.0,
    ];
    let number = numbers[turn % numbers.len()];
    if (turn / numbers.len()).is_multiple_of(2) { number } else { -number }
}

/// A line for tables: `17x33 f32->f16 normal`, then non-default fields.
impl fmt::Display for ConvertCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, columns, d_columns, from, to, order, row_factors, values, layout, seed } = self;
        write!(f, "{rows}x{columns} {from}->{to} {}", values.name())?;
        if d_columns != columns {
            write!(f, " d-columns={d_columns}")?;
        }
        let &ConvertLayout { x_transposed, x_gap, d_gap, x_offset, d_offset } = layout;
        let flags = [
            (*order == ConvertOrder::Permuted, "permuted"),
            (*order == ConvertOrder::Any, "any-order"),
            (*row_factors, "row-factors"),
            (x_transposed, "x-transposed"),
        ];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, " {name}")?;
        }
        for (name, value) in [("x-gap", x_gap), ("d-gap", d_gap), ("x-offset", x_offset), ("d-offset", d_offset)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_name_columns_and_what_is_none() {
        let case =
            ConvertCase { d_columns: 70, order: ConvertOrder::Any, ..ConvertCase::new(2, 60, DType::F32, DType::F16) };
        let order = case.columns_of_d();
        assert!(order.contains(&NO_COLUMN) && order.contains(&60) && order.iter().any(|&column| column < 60));
        let permuted = ConvertCase { order: ConvertOrder::Permuted, ..case }.columns_of_d();
        assert!((0..60).all(|column| permuted.contains(&column)) && permuted[60..].iter().all(|&c| c == NO_COLUMN));
    }

    #[test]
    fn bits_have_every_exponent_of_their_type() {
        for from in DType::ALL {
            let case = ConvertCase { values: ConvertValues::Bits, ..ConvertCase::new(8, 1000, from, DType::F32) };
            let x = case.x();
            assert!(
                x.iter().any(|v| v.is_nan()) && x.iter().any(|v| v.abs() < 1e-3) && x.iter().any(|v| v.abs() > 1e3)
            );
            assert_eq!(from.decode(&from.encode(&x)).len(), x.len());
        }
    }
}

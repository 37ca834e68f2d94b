//! A case of `gather_rows`, as data.

use std::fmt;

use qgemm_formats::{DType, Format};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::gemm::ActOrder;
use crate::weights::WeightKind;

/// A row gather to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRowsCase {
    /// Format of the weight.
    pub format: Format,
    /// Rows of the weight.
    pub table_rows: usize,
    /// Ids, and rows of D.
    pub rows: usize,
    /// Columns.
    pub k: usize,
    /// Type of D.
    pub d_dtype: DType,
    /// Kind of the weight.
    pub weights: WeightKind,
    /// Order of the weight's columns.
    pub act_order: Option<ActOrder>,
    /// Whether some ids are no rows.
    pub bad_ids: bool,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Offset of D from an aligned address, in elements.
    pub d_offset: usize,
    /// Factor of every element.
    pub scale: f32,
    /// Seed of all random values.
    pub seed: u64,
}

impl GatherRowsCase {
    /// Valid ids, contiguous f32 rows.
    pub fn new(format: Format, [rows, table_rows, k]: [usize; 3]) -> Self {
        Self {
            format,
            table_rows,
            rows,
            k,
            d_dtype: DType::F32,
            weights: WeightKind::Raw,
            act_order: None,
            bad_ids: false,
            d_gap: 0,
            d_offset: 0,
            scale: 1.0,
            seed: 1,
        }
    }

    /// The ids: any rows, the first and the last among them, and
    /// bad ids if the case has some.
    pub(super) fn ids(&self) -> Vec<u32> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x6a70_0000_0000_0000);
        let last = self.table_rows as u32 - 1;
        let mut id = |i: usize| match i % 7 {
            0 => last,
            1 => 0,
            3 if self.bad_ids => [last + 1, u32::MAX, last + 17][i / 7 % 3],
            _ => rng.random_range(0..=last),
        };
        (0..self.rows).map(&mut id).collect()
    }
}

/// A line for tables: `5 of 70x64 q4_0->f16`, then non-default fields.
impl fmt::Display for GatherRowsCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, table_rows, rows, k, d_dtype, weights, act_order, bad_ids, d_gap, d_offset, scale, seed } =
            self;
        write!(f, "{rows} of {table_rows}x{k} {format}->{d_dtype} {weights:?}")?;
        if let Some(order) = act_order {
            write!(f, " {order:?}")?;
        }
        if *bad_ids {
            write!(f, " bad-ids")?;
        }
        for (name, value) in [("d-gap", d_gap), ("d-offset", d_offset)] {
            if *value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        if *scale != 1.0 {
            write!(f, " scale={scale}")?;
        }
        write!(f, " seed={seed}")
    }
}

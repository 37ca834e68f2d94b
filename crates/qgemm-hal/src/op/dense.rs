//! Dense matrix operands.

use qgemm_formats::DType;

/// A dense matrix operand: element type, strides in elements, and
/// the alignment of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dense {
    /// Element type.
    pub dtype: DType,
    /// Row stride in elements.
    pub row_stride: u64,
    /// Column stride in elements: 1 for row-major.
    pub col_stride: u64,
    /// Whether every row is contiguous and 16-byte aligned, so that
    /// kernels may use 16-byte accesses.
    pub aligned16: bool,
}

/// Widest vector access of kernels, in bytes.
const WIDE_ACCESS: u64 = 16;

impl Dense {
    /// A contiguous row-major matrix, 16-byte aligned.
    pub fn rows_of(dtype: DType, columns: usize) -> Self {
        let row_bytes = (columns as u64).saturating_mul(dtype.bytes() as u64);
        Self { dtype, row_stride: columns as u64, col_stride: 1, aligned16: row_bytes.is_multiple_of(WIDE_ACCESS) }
    }

    /// Elements spanned by `rows × columns`, or `None`
    /// when the count overflows.
    pub fn extent(&self, rows: usize, columns: usize) -> Option<u64> {
        if rows == 0 || columns == 0 {
            return Some(0);
        }
        let rows = (rows as u64 - 1).checked_mul(self.row_stride)?;
        let columns = (columns as u64 - 1).checked_mul(self.col_stride)?;
        rows.checked_add(columns)?.checked_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_follow_strides() {
        let dense = Dense { row_stride: 10, col_stride: 2, ..Dense::rows_of(DType::F16, 4) };
        assert_eq!((dense.extent(3, 4), dense.extent(0, 4)), (Some(20 + 6 + 1), Some(0)));
        assert_eq!(Dense { row_stride: u64::MAX / 2, ..dense }.extent(4, 1), None);
        assert!(Dense::rows_of(DType::F16, 8).aligned16 && !Dense::rows_of(DType::F16, 4).aligned16);
    }
}

//! How many bytes of each operand an operation touches: kernels index in 32 bits and see only so much of a buffer.

use qgemm_hal::CheckedGemm;

/// Bytes from the first to the last element; 0 for operands that are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extents {
    pub x: usize,
    pub w: usize,
    pub row_scale: usize,
    pub k_order: usize,
    pub c: usize,
    pub bias: usize,
    pub token_scale: usize,
    pub residual: usize,
    pub d: usize,
}

/// What a view may begin behind the adapter's offset alignment, with room to spare.
const MARGIN: u64 = 1 << 16;

impl Extents {
    /// Of `op`.
    ///
    /// # Errors
    /// When a dimension exceeds 31 bits or an extent overflows.
    pub fn of(op: &CheckedGemm) -> Result<Self, String> {
        for (name, size) in [("M", op.m), ("N", op.n), ("K", op.k.max(op.stored_k))] {
            if size >= 1 << 31 {
                return Err(format!("{name} is {size}, and kernels count in 31 bits"));
            }
        }
        let matrix = |name: &str, rows: usize, columns: usize, row: u64, column: u64, bytes: usize| {
            let last_row = (rows as u64 - 1).checked_mul(row);
            let last_column = (columns as u64 - 1).checked_mul(column);
            last_row
                .zip(last_column)
                .and_then(|(r, c)| r.checked_add(c)?.checked_add(1)?.checked_mul(bytes as u64))
                .and_then(|bytes| usize::try_from(bytes).ok())
                .ok_or_else(|| format!("the extent of {name} overflows"))
        };
        let d_like = |name, dense: qgemm_hal::Dense| {
            matrix(name, op.m, op.features, dense.row_stride, dense.col_stride, dense.dtype.bytes())
        };
        let w = op.format.row_bytes(op.stored_k);
        Ok(Self {
            x: matrix("X", op.m, op.k, op.x.row_stride, op.x.col_stride, op.x.dtype.bytes())?,
            w: matrix("W", op.n, w, w as u64, 1, 1)?,
            row_scale: if op.row_scale { op.n * 4 } else { 0 },
            k_order: if op.k_order { op.stored_k * 4 } else { 0 },
            c: op.c.map_or(Ok(0), |c| d_like("C", c))?,
            bias: op.bias.map_or(0, |dtype| op.bias_len() * dtype.bytes()),
            token_scale: if op.token_scale { op.m * 4 } else { 0 },
            residual: op.residual.map_or(Ok(0), |residual| d_like("the residual", residual))?,
            d: d_like("D", op.d)?,
        })
    }

    /// That every operand fits a binding of at most `limit` bytes and 32-bit byte offsets.
    ///
    /// # Errors
    /// Names the operand and the limit.
    pub fn check(&self, limit: u64) -> Result<(), String> {
        let operands = [
            ("X", self.x),
            ("W", self.w),
            ("the row scales", self.row_scale),
            ("the column order", self.k_order),
            ("C", self.c),
            ("the bias", self.bias),
            ("the token scales", self.token_scale),
            ("the residual", self.residual),
            ("D", self.d),
        ];
        let indexable = u64::from(u32::MAX) - MARGIN;
        for (name, bytes) in operands.map(|(name, bytes)| (name, bytes as u64)) {
            if bytes > limit {
                return Err(format!(
                    "{name} takes {bytes} bytes, and the adapter's max_storage_buffer_binding_size is {limit}"
                ));
            }
            if bytes > indexable {
                return Err(format!("{name} takes {bytes} bytes, and kernels index {indexable}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qgemm_formats::prepack::PackClass;
    use qgemm_formats::{DType, Format};
    use qgemm_hal::{Activation, Dense, XRounding};

    fn op(m: usize, n: usize, k: usize) -> CheckedGemm {
        let dense = |dtype, row_stride| Dense { dtype, row_stride, col_stride: 1, aligned16: false };
        CheckedGemm {
            m,
            n,
            features: n,
            gated: false,
            k,
            stored_k: k,
            format: "q4_0".parse::<Format>().expect("exists"),
            class: PackClass::Canonical,
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            x: dense(DType::F16, k as u64 + 3),
            x_rounding: XRounding::default(),
            d: dense(DType::F32, n as u64),
            c: None,
            bias: Some(DType::BF16),
            token_scale: false,
            residual: None,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        }
    }

    #[test]
    fn extents_count_strides_and_blocks() {
        let extents = Extents::of(&op(2, 5, 64)).expect("small");
        let expected = Extents { x: (67 + 64) * 2, w: 5 * 36, bias: 10, d: 40, ..Extents::default() };
        assert_eq!(extents, expected);
    }

    #[test]
    fn what_exceeds_a_limit_is_named() {
        let extents = Extents::of(&op(1, 1 << 20, 4096)).expect("fits 64 bits");
        let why = extents.check(128 << 20).expect_err("2.25 GiB of weights");
        assert!(why.contains("W takes 2415919104 bytes") && why.contains("134217728"), "{why}");
        assert!(extents.check(u64::MAX).is_ok());
        let why = Extents::of(&op(1, 1 << 20, 8192)).expect("fits 64 bits").check(u64::MAX).expect_err("32 bits");
        assert!(why.contains("kernels index"), "{why}");
        assert!(Extents::of(&op(1, 1 << 31, 32)).expect_err("31 bits").contains("N is"));
    }

    #[test]
    fn overflow_is_an_error() {
        let mut op = op(3, 1, 32);
        op.x.row_stride = u64::MAX / 2;
        assert!(Extents::of(&op).expect_err("overflows").contains("extent of X"));
    }
}

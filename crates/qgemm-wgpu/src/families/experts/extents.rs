//! Byte extents that MoE kernels touch in their operands, and the
//! number of experts bound by one dispatch.

use qgemm_hal::{CheckedExperts, CheckedGemm, Dense, Unsupported};

use crate::families::dispatch::MARGIN;
use crate::families::gemm::{TILE_ROWS, x_matrix, x_scale_bytes};
use crate::weight_code::WeightCode;

/// C, if it is added. As in BLAS, C is not
/// read when its factor is 0.
pub(super) fn added_c(each: &CheckedGemm) -> Option<&Dense> {
    each.c.as_ref().filter(|_| each.beta != 0.0)
}

/// Bytes that kernels touch in each operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub x: usize,
    /// Bytes of one expert's weight.
    pub w: usize,
    pub row_scale: usize,
    /// Bytes of the column orders, or of the
    /// scales of a quantized X.
    pub k_order: usize,
    pub index: usize,
    pub c: usize,
    pub bias: usize,
    pub token_scale: usize,
    pub residual: usize,
    /// Bytes of the products' output.
    pub d: usize,
}

impl Extents {
    pub fn of(op: &CheckedExperts, code: &WeightCode) -> Result<Self, Unsupported> {
        let each = &op.each;
        let of_experts = |there: bool, bytes: usize| if there { op.weights().saturating_mul(bytes) } else { 0 };
        let pitch = if op.row_pitch > 0 { op.row_pitch } else { each.stored_rows.next_multiple_of(TILE_ROWS) };
        let columns = each.stored_k.next_multiple_of(code.k_tile());
        let of_weights = Self {
            x: 0,
            w: pitch / TILE_ROWS * code.row_of_tiles_bytes(each.stored_k),
            row_scale: of_experts(each.row_scale, if op.row_pitch > 0 { pitch } else { each.stored_rows } * 4),
            k_order: of_experts(each.k_order, columns * 4),
            index: 0,
            c: 0,
            bias: of_experts(each.bias.is_some(), each.bias.map_or(0, |dtype| each.bias_len() * dtype.bytes())),
            token_scale: 0,
            residual: 0,
            d: 0,
        };
        of_weights.of_portion(op)
    }

    /// Extents of `op`, a portion of the operation with these extents.
    pub fn of_portion(self, op: &CheckedExperts) -> Result<Self, Unsupported> {
        let each = &op.each;
        let (x, x_columns) = x_matrix(each)?;
        Ok(Self {
            x: dense_bytes("X", &x, op.x_rows(), x_columns)?,
            k_order: if each.x.planes.is_some() { x_scale_bytes(each, op.x_rows()) } else { self.k_order },
            index: op.index_len() * 4,
            c: match added_c(each) {
                Some(c) => dense_bytes("C", c, each.m, each.out_features)?,
                None => 0,
            },
            token_scale: if each.token_scale { each.m * 4 } else { 0 },
            residual: match &each.residual {
                Some(residual) => dense_bytes("the residual", residual, each.m, each.out_features)?,
                None => 0,
            },
            d: dense_bytes("D", &each.d, each.m, each.out_features)?,
            ..self
        })
    }

    pub fn all(&self) -> [(&'static str, usize); 10] {
        [
            ("X", self.x),
            ("the weight of an expert", self.w),
            ("the row scales", self.row_scale),
            ("the column orders, or the scales of X", self.k_order),
            ("the index", self.index),
            ("C", self.c),
            ("the biases", self.bias),
            ("the row factors", self.token_scale),
            ("the residual", self.residual),
            ("D", self.d),
        ]
    }
}

/// Bytes of `rows` rows.
fn dense_bytes(what: &str, dense: &Dense, rows: usize, columns: usize) -> Result<usize, Unsupported> {
    let bytes = dense.extent(rows, columns).and_then(|e| e.checked_mul(dense.dtype.bytes() as u64));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| Unsupported::new(format!("the extent of {what} overflows")))
}

/// Experts whose weights fit in a binding of `limit`
/// bytes; at least one does.
pub(super) fn bound_experts(op: &CheckedExperts, extents: &Extents, limit: u64) -> usize {
    let fit = limit.saturating_sub(MARGIN) / (extents.w as u64).max(1);
    // With one shared weight, each dispatch binds it.
    if op.weights() == 1 { op.experts } else { usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, op.experts) }
}

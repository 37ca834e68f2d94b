//! Choice of the X prologue for matrix instructions.

use qgemm_formats::DType;
use qgemm_hal::{CheckedGemm, Dense, Variant, XPrologue};

use super::types::Engine;

/// The X prologue that matrix instructions of `variant` need for `x`,
/// the X of `op`, and its output type.
///
/// A prologue is needed when the type differs, when columns are
/// not contiguous, when W's columns are permuted, or when asynchronous
/// copies need 16-byte aligned rows. `None` when X can be read
/// in place or no matrix instruction applies.
pub(crate) fn x_prologue(op: &CheckedGemm, x: &Dense, variant: Variant) -> Option<(DType, XPrologue)> {
    let takes = |dtype| Engine::of(op.format, dtype, variant).is_mma();
    let dtype = if takes(x.dtype) { x.dtype } else { op.x_precision.half(x.dtype)? };
    let in_place = dtype == x.dtype && !gathers(op) && (x.aligned16 || variant < Variant::Sm80);
    let row_factors = dtype == DType::F16 && x.dtype != DType::F16;
    (takes(dtype) && !in_place).then_some((dtype, XPrologue::Convert { row_factors }))
}

/// Whether consecutive columns of W multiply elements of
/// X that are not contiguous.
pub(crate) fn gathers(op: &CheckedGemm) -> bool {
    op.k_order || op.x.col_stride != 1
}

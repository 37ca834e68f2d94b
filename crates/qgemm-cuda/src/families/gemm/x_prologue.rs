//! Which prologue makes of X what matrix instructions read.

use qgemm_formats::DType;
use qgemm_hal::{CheckedGemm, Dense, Variant, XPrologue};

use super::types::Engine;

/// What matrix instructions of `variant` want made of `x`, the X of `op`, and in which type, where X itself will not do: its
/// type is another, its columns are not neighbours, W's are permuted, or it is to be copied asynchronously and its rows do
/// not begin at multiples of 16 bytes. `None` where X can be read in place, or no matrix instruction helps.
pub(crate) fn x_prologue(op: &CheckedGemm, x: &Dense, variant: Variant) -> Option<(DType, XPrologue)> {
    let takes = |dtype| Engine::of(op.format, dtype, variant).is_mma();
    let dtype = if takes(x.dtype) { x.dtype } else { op.x_precision.half(x.dtype)? };
    let in_place = dtype == x.dtype && !gathers(op) && (x.aligned16 || variant < Variant::Sm80);
    let row_factors = dtype == DType::F16 && x.dtype != DType::F16;
    (takes(dtype) && !in_place).then_some((dtype, XPrologue::Convert { row_factors }))
}

/// Whether neighbouring columns of W multiply elements of X that are not neighbours.
pub(crate) fn gathers(op: &CheckedGemm) -> bool {
    op.k_order || op.x.col_stride != 1
}

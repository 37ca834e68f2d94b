//! Factors that an earlier launch makes contiguous along K,
//! in the workspace.
//!
//! - TF32 for `wgmma`: f32 rounded to nearest
//!   (`entry/sm90_matmul_round_tf32.cu`). A passes through registers,
//!   where the product rounds it, so A is read in place if TMA can
//!   read it.
//! - E4M3 for FP8 instructions, which read no other order
//!   (`entry/matmul_copy_codes.cu`). A factor that is in this order,
//!   with aligned rows, is read in place.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::{
    BatchedDense, CheckedMatmul, FactorFormat, Geometry, HalError, KernelId, LaunchStep, Math, MatmulLayout,
    MatmulOperand, MatmulPlan, MatmulSpec, Name, Operand, Operands, Variant,
};

use super::templates::Template;
use super::{F32, id, tma};
use crate::families::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// CTA tile: K values, and rows of A
/// or columns of B.
const TILE: u32 = 64;
const THREADS: u32 = 256;
/// Bytes that rows of a copy are padded to: one memory
/// sector. TMA requires 16 bytes.
const ROW_BYTES: u64 = 32;
/// Alignment of the second copy.
const ALIGNMENT: u64 = 256;
/// Maximum CTAs of a launch.
const MOST_CTAS: u64 = i32::MAX as u64;

/// A factor and its copy: `matrices` matrices of
/// `outer` rows of `row` values.
#[derive(Clone, Copy, Debug)]
struct Copied {
    from: BatchedDense<FactorFormat>,
    along_k: bool,
    matrices: u64,
    outer: u64,
    k: u64,
    row: u64,
}

impl Copied {
    fn new(op: &CheckedMatmul, from: BatchedDense<FactorFormat>, along_k: bool, outer: usize) -> Self {
        // A matrix shared by all products is copied once.
        let matrices = if from.batch_stride == 0 { 1 } else { op.batch as u64 };
        let (k, values) = (op.k as u64, ROW_BYTES / from.dtype.bytes() as u64);
        Self { from, along_k, matrices, outer: outer as u64, k, row: k.next_multiple_of(values) }
    }

    /// The factor, read in place.
    fn in_place(self) -> Self {
        Self { matrices: 0, ..self }
    }

    fn is_in_place(&self) -> bool {
        self.matrices == 0
    }

    /// Bytes of the copy; `None` on overflow.
    fn bytes(&self) -> Option<u64> {
        self.matrices.checked_mul(self.outer)?.checked_mul(self.row)?.checked_mul(self.from.dtype.bytes() as u64)
    }

    /// Tiles along K, of a matrix, and in total;
    /// `None` on overflow.
    fn tiles(&self) -> Option<[u64; 3]> {
        let along = |len: u64| len.div_ceil(TILE.into());
        let of_matrix = along(self.k).checked_mul(along(self.outer))?;
        Some([along(self.k), of_matrix, of_matrix.checked_mul(self.matrices)?])
    }

    /// The factor that the product reads; of a copy, with
    /// these strides.
    fn dense(&self, row_stride: u64, col_stride: u64) -> BatchedDense<FactorFormat> {
        if self.is_in_place() {
            return self.from;
        }
        let batch_stride = if self.from.batch_stride == 0 { 0 } else { self.outer * self.row };
        BatchedDense { row_stride, col_stride, batch_stride, aligned16: true, ..self.from }
    }
}

/// Copies of a product's factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopiedFactors {
    factors: [Copied; 2],
    /// Bytes of A's copy, padded to align B's; and total bytes.
    first: u64,
    bytes: u64,
    ctas: u32,
}

/// Copies exceed a launch or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge;

impl CopiedFactors {
    /// The copies that the kernel of `template` reads for `op`;
    /// none when it reads both factors in place.
    pub fn new(op: &CheckedMatmul, template: &Template) -> Result<Option<Self>, TooLarge> {
        let rounds = template.rounds_factors();
        let is_codes = op.a.dtype == FactorFormat::E4M3 && template.math == Math::TensorFp8;
        if !rounds && !is_codes {
            return Ok(None);
        }
        let [a_along_k, b_along_k] = [op.a.is_row_major(), !op.b.is_row_major()];
        let reads = |dense: &BatchedDense<FactorFormat>, along_k: bool| {
            along_k && if template.stays() { tma::takes_factor(dense) } else { dense.aligned16 }
        };
        let a = Copied::new(op, op.a, a_along_k, op.m);
        let a = if reads(&op.a, a_along_k) { a.in_place() } else { a };
        let b = Copied::new(op, op.b, b_along_k, op.n);
        let b = if !rounds && reads(&op.b, b_along_k) { b.in_place() } else { b };
        if a.is_in_place() && b.is_in_place() {
            return Ok(None);
        }
        Self::of([a, b]).map(Some).ok_or(TooLarge)
    }

    fn of([a, b]: [Copied; 2]) -> Option<Self> {
        let first = a.bytes()?.checked_next_multiple_of(ALIGNMENT)?;
        let ctas = a.tiles()?[2].checked_add(b.tiles()?[2])?;
        let ctas = if ctas <= MOST_CTAS { u32::try_from(ctas).ok()? } else { return None };
        Some(Self { factors: [a, b], first, bytes: first.checked_add(b.bytes()?)?, ctas })
    }

    /// Bytes in the workspace.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The product of the copies.
    pub fn product(&self, op: &CheckedMatmul) -> CheckedMatmul {
        let [a, b] = self.factors;
        CheckedMatmul { a: a.dense(a.row, 1), b: b.dense(1, b.row), ..op.clone() }
    }

    /// The copied factors, with their byte ranges in the
    /// workspace of `plan`.
    pub fn places(&self, plan: &MatmulPlan) -> impl Iterator<Item = (MatmulOperand, Range<usize>)> {
        let start = plan.factors;
        let [a, b] = self.factors.map(|factor| factor.bytes().unwrap_or_default() as usize);
        let of_b = start + self.first as usize;
        let all = [(MatmulOperand::A, start..start + a), (MatmulOperand::B, of_b..of_b + b)];
        all.into_iter().filter(|(_, place)| !place.is_empty())
    }

    /// The launch that writes the copies.
    pub fn step(&self, plan: &MatmulPlan, variant: Variant, make: &mut MakeKernel<'_>) -> Result<LaunchStep, HalError> {
        use MatmulOperand as O;
        let kind = Kind::of(self.factors[0].from.dtype);
        let launch = KernelLaunch {
            id: kind.id(variant),
            spec: kind.source(variant),
            geometry: Geometry { grid: [self.ctas, 1, 1], threads: THREADS, shared_bytes: kind.shared_bytes() },
            // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
            starts_early: variant >= Variant::Sm90,
            operands: O::ALL,
            updated: None,
            params: Arc::new(*self),
        };
        let all = plan.factors..plan.factors + self.bytes as usize;
        let step = launch.step::<O>(make)?.bind_part(O::Workspace, O::Workspace, all);
        Ok(self.places(plan).fold(step, |step, (factor, _)| step.bind(factor, factor)))
    }
}

/// `CopiedFactor` in `mainloop/copied_factors.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CopiedFactor {
    from: u64,
    to: u64,
    from_line: u64,
    from_matrix: u64,
    to_row: u64,
    to_matrix: u64,
    outer: u32,
    k: u32,
    k_tiles: u32,
    matrix_tiles: u32,
    tiles: u32,
    along_k: u32,
    aligned16: u32,
    padding: u32,
}

impl CopiedFactor {
    fn new(copied: &Copied, from: u64, to: u64) -> Self {
        // Checked by `new`: at most the CTAs of a launch.
        let [k_tiles, matrix_tiles, tiles] = copied.tiles().unwrap_or_default().map(|tiles| tiles as u32);
        Self {
            from,
            to,
            from_line: copied.from.row_stride.max(copied.from.col_stride),
            from_matrix: copied.from.batch_stride,
            to_row: copied.row,
            to_matrix: copied.outer * copied.row,
            outer: copied.outer as u32,
            k: copied.k as u32,
            k_tiles,
            matrix_tiles,
            tiles,
            along_k: copied.along_k.into(),
            aligned16: copied.from.aligned16.into(),
            padding: 0,
        }
    }
}

/// `CopyParams` in `mainloop/copied_factors.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CopyParams {
    factors: [CopiedFactor; 2],
}

impl Params for CopiedFactors {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use MatmulOperand as O;
        let to = at.of(operands, O::Workspace)?;
        let [a, b] = &self.factors;
        let from = |factor: &Copied, operand| if factor.is_in_place() { Ok(0) } else { at.of(operands, operand) };
        let a = CopiedFactor::new(a, from(a, O::A)?, to);
        let b = CopiedFactor::new(b, from(b, O::B)?, to + self.first);
        Ok(LaunchParams::of(&CopyParams { factors: [a, b] }))
    }
}

/// Kernels that copy factors.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// f32, rounded to TF32.
    Tf32,
    /// Codes of one byte.
    Codes,
}

impl Kind {
    fn of(format: FactorFormat) -> Self {
        if format == F32 { Self::Tf32 } else { Self::Codes }
    }

    fn id(self, variant: Variant) -> KernelId {
        let (main_loop, format) = match self {
            Self::Tf32 => ("sm90_round_tf32", F32),
            Self::Codes => ("copy_codes", FactorFormat::E4M3),
        };
        let (main_loop, layout) = (Name::new(main_loop), MatmulLayout::Any);
        id(MatmulSpec { main_loop, a: format, b: format, layout, m: TILE, n: TILE, k: TILE }, variant)
    }

    /// `sizeof(SharedStorage)`, which the kernels assert. Rows
    /// are padded by a word.
    fn shared_bytes(self) -> u32 {
        match self {
            Self::Tf32 => TILE * (TILE + 1) * 4,
            Self::Codes => TILE * (TILE + 4),
        }
    }

    fn source(self, variant: Variant) -> KernelSpec {
        let (entry, symbol) = match self {
            Self::Tf32 => ("entry/sm90_matmul_round_tf32.cu", "qg_sm90_matmul_round_tf32"),
            Self::Codes => ("entry/matmul_copy_codes.cu", "qg_matmul_copy_codes"),
        };
        let prelude = Prelude {
            tile: Some(TILE),
            threads: Some(THREADS),
            shared_bytes: Some(self.shared_bytes()),
            ..Prelude::of(variant)
        };
        KernelSpec {
            name: self.id(variant).to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: prelude.text(),
            arch_specific: false,
        }
    }
}

/// The kernels of `variant`.
pub(super) fn sources(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let kinds: &[Kind] = match variant {
        Variant::Sm90 => &[Kind::Tf32, Kind::Codes],
        Variant::Sm89 | Variant::Sm120 => &[Kind::Codes],
        _ => &[],
    };
    kinds.iter().map(move |kind| kind.source(variant))
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    #[test]
    fn what_products_share_is_copied_once_and_rows_are_whole_sectors() {
        let dense = |row_stride, col_stride, batch_stride| BatchedDense {
            dtype: FactorFormat::Plain(DType::F32),
            row_stride,
            col_stride,
            batch_stride,
            aligned16: false,
        };
        let copied = Copied { from: dense(1, 70, 7000), along_k: false, matrices: 3, outer: 65, k: 9, row: 16 };
        assert_eq!(copied.bytes(), Some(3 * 65 * 16 * 4));
        assert_eq!(copied.tiles(), Some([1, 2, 6]));
        let copy = copied.dense(16, 1);
        assert_eq!((copy.row_stride, copy.batch_stride, copy.aligned16), (16, 65 * 16, true));
        let shared = Copied { from: dense(1, 70, 0), matrices: 1, ..copied };
        assert_eq!((shared.dense(16, 1).batch_stride, shared.bytes()), (0, Some(65 * 16 * 4)));
        assert_eq!(Copied { outer: u64::MAX, ..copied }.bytes(), None);
        let of_codes = Copied { from: BatchedDense { dtype: FactorFormat::E4M3, ..dense(1, 70, 7000) }, ..copied };
        assert_eq!(of_codes.bytes(), Some(3 * 65 * 16));
        assert_eq!((of_codes.in_place().bytes(), of_codes.in_place().dense(16, 1)), (Some(0), of_codes.from));
        assert_eq!(CopiedFactors::of([of_codes.in_place(), of_codes]).map(|all| (all.first, all.ctas)), Some((0, 6)));
    }
}

//! TF32 factors for `wgmma`: f32 rounded to nearest and
//! contiguous along K, in the workspace.
//!
//! One launch before the product copies both factors
//! (`entry/sm90_matmul_round_tf32.cu`), or only B: A passes
//! through registers, where the product rounds it, so A is read
//! in place if TMA can read it.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::{
    BatchedDense, CheckedMatmul, FactorFormat, Geometry, HalError, KernelId, LaunchStep, MatmulLayout, MatmulOperand,
    MatmulPlan, MatmulSpec, Name, Operand, Operands, Variant,
};

use super::{F32, id, tma};
use crate::families::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

const ENTRY: &str = "entry/sm90_matmul_round_tf32.cu";
/// CTA tile: K values, and rows of A
/// or columns of B.
const TILE: u32 = 64;
const THREADS: u32 = 256;
/// `sizeof(SharedStorage)`, which the kernel asserts.
const SHARED_BYTES: u32 = TILE * (TILE + 1) * 4;
/// Values that rows of a copy are padded to: one memory
/// sector. TMA requires 16 bytes.
const ROW_VALUES: u64 = 8;
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
        // A matrix shared by all products is rounded once.
        let matrices = if from.batch_stride == 0 { 1 } else { op.batch as u64 };
        let k = op.k as u64;
        Self { from, along_k, matrices, outer: outer as u64, k, row: k.next_multiple_of(ROW_VALUES) }
    }

    /// Bytes of the copy; `None` on overflow.
    fn bytes(&self) -> Option<u64> {
        self.matrices.checked_mul(self.outer)?.checked_mul(self.row)?.checked_mul(size_of::<f32>() as u64)
    }

    /// Tiles along K, of a matrix, and in total;
    /// `None` on overflow.
    fn tiles(&self) -> Option<[u64; 3]> {
        let along = |len: u64| len.div_ceil(TILE.into());
        let of_matrix = along(self.k).checked_mul(along(self.outer))?;
        Some([along(self.k), of_matrix, of_matrix.checked_mul(self.matrices)?])
    }

    /// The copy as a factor with these strides.
    fn dense(&self, row_stride: u64, col_stride: u64) -> BatchedDense<FactorFormat> {
        let batch_stride = if self.from.batch_stride == 0 { 0 } else { self.outer * self.row };
        BatchedDense { row_stride, col_stride, batch_stride, aligned16: true, ..self.from }
    }
}

/// Copies of a product's factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundedFactors {
    factors: [Copied; 2],
    /// Whether the product reads A in place. The copy of
    /// A then has no matrices.
    a_in_place: bool,
    /// Bytes of A's copy, padded to align B's; and total bytes.
    first: u64,
    bytes: u64,
    ctas: u32,
}

impl RoundedFactors {
    /// The copies for `op`; `None` when sizes
    /// exceed a launch or memory.
    pub fn new(op: &CheckedMatmul) -> Option<Self> {
        let a_in_place = op.a.is_row_major() && tma::takes_factor(&op.a);
        let a = Copied::new(op, op.a, op.a.is_row_major(), op.m);
        let a = if a_in_place { Copied { matrices: 0, ..a } } else { a };
        let b = Copied::new(op, op.b, !op.b.is_row_major(), op.n);
        let first = a.bytes()?.checked_next_multiple_of(ALIGNMENT)?;
        let ctas = a.tiles()?[2].checked_add(b.tiles()?[2])?;
        let ctas = if ctas <= MOST_CTAS { u32::try_from(ctas).ok()? } else { return None };
        Some(Self { factors: [a, b], a_in_place, first, bytes: first.checked_add(b.bytes()?)?, ctas })
    }

    /// Bytes in the workspace.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The product of the copies.
    pub fn product(&self, op: &CheckedMatmul) -> CheckedMatmul {
        let [a, b] = self.factors;
        let a = if self.a_in_place { op.a } else { a.dense(a.row, 1) };
        CheckedMatmul { a, b: b.dense(1, b.row), ..op.clone() }
    }

    /// Byte ranges of the copies in the workspace of
    /// `plan`, with their factors.
    pub fn places(&self, plan: &MatmulPlan) -> impl Iterator<Item = (MatmulOperand, Range<usize>)> {
        let [start, end] = [plan.factors, plan.factors + self.bytes as usize];
        let [a, b] = self.factors.map(|factor| factor.bytes().unwrap_or_default() as usize);
        let of_a = (!self.a_in_place).then_some((MatmulOperand::A, start..start + a));
        of_a.into_iter().chain([(MatmulOperand::B, end - b..end)])
    }

    /// The launch that writes the copies.
    pub fn step(&self, plan: &MatmulPlan, variant: Variant, make: &mut MakeKernel<'_>) -> Result<LaunchStep, HalError> {
        use MatmulOperand as O;
        let launch = KernelLaunch {
            id: kernel_id(variant),
            spec: source(variant),
            geometry: Geometry { grid: [self.ctas, 1, 1], threads: THREADS, shared_bytes: SHARED_BYTES },
            // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
            starts_early: true,
            operands: O::ALL,
            updated: None,
            params: Arc::new(*self),
        };
        let all = plan.factors..plan.factors + self.bytes as usize;
        let step = launch.step::<O>(make)?.bind(O::B, O::B).bind_part(O::Workspace, O::Workspace, all);
        Ok(if self.a_in_place { step } else { step.bind(O::A, O::A) })
    }
}

/// `RoundedFactor` in `entry/sm90_matmul_round_tf32.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RoundedFactor {
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

impl RoundedFactor {
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

/// `RoundParams` in `entry/sm90_matmul_round_tf32.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RoundParams {
    factors: [RoundedFactor; 2],
}

impl Params for RoundedFactors {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use MatmulOperand as O;
        let [a, b] = &self.factors;
        let to = at.of(operands, O::Workspace)?;
        let a = RoundedFactor::new(a, if self.a_in_place { 0 } else { at.of(operands, O::A)? }, to);
        let b = RoundedFactor::new(b, at.of(operands, O::B)?, to + self.first);
        Ok(LaunchParams::of(&RoundParams { factors: [a, b] }))
    }
}

fn kernel_id(variant: Variant) -> KernelId {
    let main_loop = Name::new("sm90_round_tf32");
    let spec = MatmulSpec { main_loop, a: F32, b: F32, layout: MatmulLayout::Any, m: TILE, n: TILE, k: TILE };
    id(spec, variant)
}

/// The kernel.
pub(super) fn source(variant: Variant) -> KernelSpec {
    let prelude =
        Prelude { tile: Some(TILE), threads: Some(THREADS), shared_bytes: Some(SHARED_BYTES), ..Prelude::of(variant) };
    KernelSpec {
        name: kernel_id(variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_sm90_matmul_round_tf32",
        prelude: prelude.text(),
        arch_specific: false,
    }
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
    }
}

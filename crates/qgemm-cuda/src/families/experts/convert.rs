//! Convert stage, the X prologue of MoE GEMM: converts X to the 16-bit type
//! of the matrix instructions, or aligns its rows. f16 rows are scaled by
//! powers of two, which row factors undo in the product.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    CheckedExperts, CheckedGemm, Dense, ExpertOperand, ExpertStep, HalError, Operands, Variant, XPrologue,
};

use super::list::list_bytes;
use super::planned::{PlannedExperts, ProductX};
use super::stage::Stage;
use super::stage_kernel::StageKernel;
use crate::families::gemm::x_prologue;
use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::spec::KernelSpec;

/// Columns of a row that a thread writes at once.
const GROUP: usize = 8;
/// Alignment of the 16-bit rows and of the factors, in bytes.
const ALIGNMENT: usize = 256;
const THREADS: u32 = 256;
const FACTOR: usize = size_of::<f32>();

const fn kernel(x: DType, d: DType, row_factors: bool) -> ((DType, DType, bool), StageKernel) {
    let constants = Prelude {
        x_dtype: Some(dtype_code(x)),
        d_dtype: Some(dtype_code(d)),
        row_factors: Some(row_factors as u32),
        whole_groups: Some(1),
        ..Prelude::EMPTY
    };
    let kernel = StageKernel {
        step: ExpertStep::Convert { x, d },
        entry: "entry/experts_convert.cu",
        symbol: "qg_experts_convert",
        threads: THREADS,
        shared_bytes: THREADS / 32 * 4,
        constants,
    };
    ((x, d, row_factors), kernel)
}

/// Kernels by types and by whether rows have factors.
static KERNELS: [((DType, DType, bool), StageKernel); 7] = [
    kernel(DType::F32, DType::F16, true),
    kernel(DType::BF16, DType::F16, true),
    kernel(DType::F32, DType::BF16, false),
    kernel(DType::F16, DType::F16, false),
    kernel(DType::BF16, DType::BF16, false),
    kernel(DType::F16, DType::F32, false),
    kernel(DType::BF16, DType::F32, false),
];

pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    KERNELS.iter().map(move |(_, kernel)| kernel.spec(variant))
}

/// Type in which the product multiplies X, and the conversion to it. `None`
/// when X can be read in place.
///
/// Each expert may have an order of columns of its own. From Ampere on, only
/// FMA kernels look columns up.
fn multiplied(op: &CheckedExperts, x: &Dense, variant: Variant) -> Option<(DType, XPrologue)> {
    match op.each.k_order && variant >= Variant::Sm80 {
        true => (x.dtype != DType::F32).then_some((DType::F32, XPrologue::Convert { row_factors: false })),
        false => x_prologue(&op.each, x, variant),
    }
}

/// The convert stage, with its regions of the scratch memory.
#[derive(Clone, Debug)]
pub(super) struct ConvertStage {
    /// The products that read it.
    pub product: CheckedExperts,
    /// The prologue.
    pub prologue: XPrologue,
    kernel: &'static StageKernel,
    /// Byte ranges of the rows of X and of the row
    /// factors, relative to [`scratch`](qgemm_hal::ExpertsPlan::scratch).
    x: Range<usize>,
    factors: Range<usize>,
}

impl ConvertStage {
    /// Layout after the first `bytes` bytes of scratch. `None` when X
    /// is read in place, or sizes overflow.
    pub fn of(op: &CheckedExperts, variant: Variant, bytes: usize) -> Option<Self> {
        let x = op.each.plain_x().ok()?;
        let (dtype, prologue) = multiplied(op, &x, variant)?;
        let XPrologue::Convert { row_factors } = prologue else { return None };
        let (_, kernel) = KERNELS.iter().find(|(types, _)| *types == (x.dtype, dtype, row_factors))?;
        let columns = op.each.k.checked_next_multiple_of(GROUP)?;
        let converted = Dense::rows_of(dtype, columns);
        let start = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let end = start.checked_add(op.x_rows().checked_mul(columns)?.checked_mul(dtype.bytes())?)?;
        let of_factors = if row_factors { op.each.m.checked_mul(FACTOR)? } else { 0 };
        let first = end.checked_next_multiple_of(ALIGNMENT)?;
        let each =
            CheckedGemm { x: converted.into(), token_scale: op.each.token_scale || row_factors, ..op.each.clone() };
        let product = CheckedExperts { each, ..op.clone() };
        Some(Self { product, prologue, kernel, x: start..end, factors: first..first.checked_add(of_factors)? })
    }

    /// The stage of a plan, if it converts X.
    pub fn of_plan(planned: &PlannedExperts<'_>) -> Option<Self> {
        let PlannedExperts { op, plan, info, variant } = *planned;
        plan.config.tile.x_prologue.and_then(|_| Self::of(op, variant, list_bytes(op, info)))
    }

    /// End of the converted X in the scratch memory, in bytes.
    pub fn end(&self) -> usize {
        self.factors.end
    }

    /// X as the product reads it. Its row factors, if any, include
    /// the caller's token scales.
    pub fn product_x<'a>(&self, planned: &PlannedExperts<'a>) -> ProductX<'a> {
        let in_place = ProductX::in_place(planned.op);
        ProductX {
            op: Cow::Owned(self.product.clone()),
            x: planned.scratch(&self.x),
            token_scale: match self.factors.is_empty() {
                true => in_place.token_scale,
                false => planned.scratch(&self.factors),
            },
            ..in_place
        }
    }

    /// The launch with its operands.
    pub fn stage(&self, planned: &PlannedExperts<'_>) -> Stage {
        use ExpertOperand as O;
        let op = planned.op;
        let (x, to) = (op.each.plain_x().unwrap_or(op.each.d), self.product.each.plain_x().unwrap_or(op.each.d));
        let rows = op.x_rows();
        let launch = Convert {
            params: ExpertConvertParams {
                x_row: x.row_stride,
                to_row: to.row_stride,
                rows: rows as u32,
                sharers: (op.each.m / rows.max(1)) as u32,
                columns: op.each.k as u32,
                to_columns: op.each.k.next_multiple_of(GROUP) as u32,
                aligned16: x.aligned16.into(),
                ..ExpertConvertParams::zeroed()
            },
            factors: self.factors.start - self.x.start,
            scales: op.each.token_scale,
        };
        let launch = self.kernel.launch(planned.variant, [(rows as u32).max(1), 1, 1], Arc::new(launch));
        let scales = [O::TokenScale].into_iter().filter(|_| op.each.token_scale);
        let stage = Stage::new(launch).with_own([O::X]).with_own(scales);
        stage.with(O::Workspace, planned.scratch(&(self.x.start..self.end())))
    }
}

/// `ExpertConvertParams` in `entry/experts_convert.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ExpertConvertParams {
    x: u64,
    to: u64,
    factors: u64,
    to_factors: u64,
    x_row: u64,
    to_row: u64,
    rows: u32,
    sharers: u32,
    columns: u32,
    to_columns: u32,
    aligned16: u32,
    unused: u32,
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct Convert {
    params: ExpertConvertParams,
    /// Offset of the factors in the output.
    factors: usize,
    /// Whether the product's rows also have factors from the caller.
    scales: bool,
}

impl Params for Convert {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use ExpertOperand as O;
        let to = places.of(operands, O::Workspace)?;
        Ok(LaunchParams::of(&ExpertConvertParams {
            x: places.of(operands, O::X)?,
            to,
            factors: if self.scales { places.of(operands, O::TokenScale)? } else { 0 },
            to_factors: to + self.factors as u64,
            rows: operands.rows(self.params.rows as usize) as u32,
            ..self.params
        }))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

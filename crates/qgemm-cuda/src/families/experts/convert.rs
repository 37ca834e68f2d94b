//! X prologue of MoE GEMM: converts X to the 16-bit type
//! of the matrix instructions. f16 rows are scaled by powers of
//! two, which row factors undo in the product.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    CheckedExperts, CheckedGemm, Dense, ExpertOperand, ExpertStep, ExpertsPlan, HalError, LaunchStep, Operands,
    Variant, XPrologue,
};

use super::super::gemm::x_prologue;
use super::super::kernel_launch::{Addresses, MakeKernel, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::Step;
use crate::spec::KernelSpec;

/// Columns of a row that a thread writes at once.
const GROUP: usize = 8;
/// Alignment of the 16-bit rows and of the factors, in bytes.
const ALIGNMENT: usize = 256;
const THREADS: u32 = 256;
const FACTOR: usize = size_of::<f32>();

const fn step(x: DType, d: DType, row_factors: bool) -> ((DType, DType, bool), Step) {
    let constants = Prelude {
        x_dtype: Some(dtype_code(x)),
        d_dtype: Some(dtype_code(d)),
        row_factors: Some(row_factors as u32),
        whole_groups: Some(1),
        ..Prelude::EMPTY
    };
    let step = Step {
        step: ExpertStep::Convert { x, d },
        entry: "entry/experts_convert.cu",
        symbol: "qg_experts_convert",
        threads: THREADS,
        shared_bytes: THREADS / 32 * 4,
        constants,
    };
    ((x, d, row_factors), step)
}

/// Kernels by types and by whether rows have factors.
static STEPS: [((DType, DType, bool), Step); 3] =
    [step(DType::F32, DType::F16, true), step(DType::BF16, DType::F16, true), step(DType::F32, DType::BF16, false)];

pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    STEPS.iter().map(move |(_, step)| step.spec(variant))
}

/// Converted X in the scratch part of the workspace.
#[derive(Clone, Debug)]
pub(super) struct ConvertedX {
    /// The products that read it.
    pub product: CheckedExperts,
    /// The prologue.
    pub prologue: XPrologue,
    step: &'static Step,
    /// Byte ranges of the rows of X and of the row
    /// factors, relative to [`ExpertsPlan::scratch`].
    x: Range<usize>,
    factors: Range<usize>,
}

impl ConvertedX {
    /// Layout after the first `bytes` bytes of scratch. `None` when X
    /// is read in place, or sizes overflow.
    pub(super) fn of(op: &CheckedExperts, variant: Variant, bytes: usize) -> Option<Self> {
        let x = op.each.plain_x().ok()?;
        let (dtype, prologue) = x_prologue(&op.each, &x, variant)?;
        let XPrologue::Convert { row_factors } = prologue else { return None };
        let (_, step) = STEPS.iter().find(|(types, _)| *types == (x.dtype, dtype, row_factors))?;
        let columns = op.each.k.checked_next_multiple_of(GROUP)?;
        let converted = Dense::rows_of(dtype, columns);
        let start = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let end = start.checked_add(op.x_rows().checked_mul(columns)?.checked_mul(dtype.bytes())?)?;
        let of_factors = if row_factors { op.each.m.checked_mul(FACTOR)? } else { 0 };
        let first = end.checked_next_multiple_of(ALIGNMENT)?;
        let each =
            CheckedGemm { x: converted.into(), token_scale: op.each.token_scale || row_factors, ..op.each.clone() };
        let product = CheckedExperts { each, ..op.clone() };
        Some(Self { product, prologue, step, x: start..end, factors: first..first.checked_add(of_factors)? })
    }

    /// End of the converted X in the scratch memory, in bytes.
    pub(super) fn end(&self) -> usize {
        self.factors.end
    }

    fn in_workspace(plan: &ExpertsPlan, part: &Range<usize>) -> Range<usize> {
        plan.scratch + part.start..plan.scratch + part.end
    }

    /// Binds the converted X to `product`, and its row
    /// factors if it has any.
    pub(super) fn read_by(&self, product: LaunchStep, plan: &ExpertsPlan) -> LaunchStep {
        use ExpertOperand as O;
        let product = product.bind_part(O::X, O::Workspace, Self::in_workspace(plan, &self.x));
        match self.factors.is_empty() {
            true => product,
            false => product.bind_part(O::TokenScale, O::Workspace, Self::in_workspace(plan, &self.factors)),
        }
    }

    /// The launch that converts the X of `op`.
    pub(super) fn step(
        &self,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
        variant: Variant,
        make: &mut MakeKernel<'_>,
    ) -> Result<LaunchStep, HalError> {
        use ExpertOperand as O;
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
        let mut step = self.step.launch(variant, [(rows as u32).max(1), 1, 1], Arc::new(launch)).step::<O>(make)?;
        step = step.bind(O::X, O::X);
        if op.each.token_scale {
            step = step.bind(O::TokenScale, O::TokenScale);
        }
        Ok(step.bind_part(O::Workspace, O::Workspace, Self::in_workspace(plan, &(self.x.start..self.end()))))
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

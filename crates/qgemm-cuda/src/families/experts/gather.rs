//! Gather step: writes rows of a quantized X in the order
//! of the expert lists, for kernels that need each
//! expert's rows contiguous.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::XFactor;
use qgemm_hal::{
    CheckedExperts, ExpertForm, ExpertOperand, ExpertStep, ExpertsPlan, HalError, LaunchStep, Operands, Variant,
    XPlanes,
};

use super::super::kernel_launch::{Addresses, MakeKernel, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::Step;

const STEP: Step = Step {
    step: ExpertStep::Gather,
    entry: "entry/experts_gather.cu",
    symbol: "qg_experts_gather",
    threads: THREADS,
    shared_bytes: 0,
    constants: Prelude::EMPTY,
};
/// Threads of a CTA, which copies one row.
const THREADS: u32 = 128;
/// Alignment of the planes, in bytes.
const ALIGNMENT: usize = 256;
const CHUNK: usize = 16;
const WORD: usize = size_of::<u32>();

pub(super) fn spec(variant: Variant) -> crate::spec::KernelSpec {
    STEP.spec(variant)
}

/// Gathered planes of a quantized X.
#[derive(Clone, Debug)]
pub(super) struct GatheredX {
    /// Layout of the planes: one contiguous row for each slot.
    pub planes: XPlanes,
    /// Byte ranges of codes, scales and factors, relative to
    /// [`ExpertsPlan::scratch`]; empty when absent.
    parts: [Range<usize>; 3],
}

impl GatheredX {
    /// Layout after the first `bytes` bytes of scratch. `None` when rows
    /// are not slots, or sizes overflow.
    pub(super) fn of(op: &CheckedExperts, planes: &XPlanes, bytes: usize) -> Option<Self> {
        let ExpertForm::Indexed { .. } = op.form else { return None };
        let (parts, k) = (planes.parts, op.each.k);
        let (codes_row, scales_row) = (parts.code_bytes(k), parts.scale_bytes(k));
        let factor = if parts.factor == XFactor::PerToken { WORD } else { 0 };
        let mut end = bytes;
        let mut part = |row: usize| {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            end = start.checked_add(op.each.m.checked_mul(row)?)?;
            Some(start..end)
        };
        let all = [part(codes_row)?, part(scales_row)?, part(factor)?];
        let (codes_row, scales_row) = (codes_row as u64, scales_row as u64);
        Some(Self { planes: XPlanes { codes_row, scales_row, ..*planes }, parts: all })
    }

    /// End of the planes in the scratch memory, in bytes.
    pub(super) fn end(&self) -> usize {
        self.parts[2].end
    }

    fn in_workspace(&self, plan: &ExpertsPlan, part: usize) -> Range<usize> {
        let Range { start, end } = self.parts[part];
        plan.scratch + start..plan.scratch + end
    }

    /// Binds the gathered X to `product`.
    pub(super) fn read_by(&self, product: LaunchStep, plan: &ExpertsPlan) -> LaunchStep {
        use ExpertOperand as O;
        let planes = [O::X, O::XScales, O::XPlaneFactors].into_iter().enumerate();
        let planes = planes.filter(|(part, _)| !self.parts[*part].is_empty());
        planes
            .fold(product, |step, (part, operand)| step.bind_part(operand, O::Workspace, self.in_workspace(plan, part)))
    }

    /// The launch that gathers X with `planes`. The
    /// lists are left unbound.
    pub(super) fn step(
        &self,
        op: &CheckedExperts,
        planes: &XPlanes,
        plan: &ExpertsPlan,
        variant: Variant,
        make: &mut MakeKernel<'_>,
    ) -> Result<LaunchStep, HalError> {
        use ExpertOperand as O;
        let launch = Gather {
            params: GatherParams {
                codes_row: planes.codes_row,
                scales_row: planes.scales_row,
                slots: op.each.m as u32,
                x_sharers: (op.each.m / op.x_rows().max(1)) as u32,
                chunks: (self.planes.codes_row as usize / CHUNK) as u32,
                words: (self.planes.scales_row as usize / WORD) as u32,
                ..GatherParams::zeroed()
            },
            list: op.list_parts().map_or(0, |[_, slots]| slots.start),
            parts: self.parts.clone().map(|part| part.start - self.parts[0].start),
            has_factors: !self.parts[2].is_empty(),
        };
        let grid = [(op.each.m as u32).max(1), 1, 1];
        let mut step = STEP.launch(variant, grid, Arc::new(launch)).step::<O>(make)?;
        for operand in [O::X, O::XScales, O::XPlaneFactors] {
            step = step.bind(operand, operand);
        }
        let all = plan.scratch + self.parts[0].start..plan.scratch + self.end();
        Ok(step.bind_part(O::Workspace, O::Workspace, all))
    }
}

/// `GatherParams` in `entry/experts_gather.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct GatherParams {
    codes: u64,
    scales: u64,
    factors: u64,
    to_codes: u64,
    to_scales: u64,
    to_factors: u64,
    list: u64,
    codes_row: u64,
    scales_row: u64,
    slots: u32,
    x_sharers: u32,
    chunks: u32,
    words: u32,
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct Gather {
    params: GatherParams,
    /// Byte offset of the slots in the lists.
    list: usize,
    /// Byte offsets of the planes in the output.
    parts: [usize; 3],
    has_factors: bool,
}

impl Params for Gather {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use ExpertOperand as O;
        let to = places.of(operands, O::Workspace)?;
        let [to_codes, to_scales, to_factors] = self.parts.map(|part| to + part as u64);
        Ok(LaunchParams::of(&GatherParams {
            codes: places.of(operands, O::X)?,
            scales: places.of(operands, O::XScales)?,
            factors: if self.has_factors { places.of(operands, O::XPlaneFactors)? } else { 0 },
            to_codes,
            to_scales,
            to_factors,
            list: places.of(operands, O::Lists)? + self.list as u64,
            slots: operands.rows(self.params.slots as usize) as u32,
            ..self.params
        }))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

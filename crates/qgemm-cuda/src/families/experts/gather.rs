//! Gather stage: writes rows of a quantized X in the order
//! of the expert lists, for kernels that need each
//! expert's rows contiguous.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::XFactor;
use qgemm_hal::{
    CheckedExperts, CheckedGemm, DeviceInfo, ExpertForm, ExpertOperand, ExpertStep, HalError, Operands, Variant,
    XPlanes,
};

use super::list::ListStage;
use super::planned::{PlannedExperts, ProductX};
use super::stage::{Source, Stage};
use super::stage_kernel::StageKernel;
use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::spec::KernelSpec;

const KERNEL: StageKernel = StageKernel {
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

pub(super) fn spec(variant: Variant) -> KernelSpec {
    KERNEL.spec(variant)
}

/// The gather stage, with its regions of the scratch memory.
#[derive(Clone, Debug)]
pub(super) struct GatherStage {
    /// Planes of the given X.
    from: XPlanes,
    /// Gathered planes: one contiguous row for each slot.
    to: XPlanes,
    /// Byte ranges of codes, scales and factors, relative to
    /// [`scratch`](qgemm_hal::ExpertsPlan::scratch); empty when absent.
    parts: [Range<usize>; 3],
}

impl GatherStage {
    /// Regions after the expert lists, if the run builds them. `None`
    /// when rows are not slots, the slots cannot be listed, or
    /// sizes overflow.
    pub fn of(op: &CheckedExperts, planes: &XPlanes, info: &DeviceInfo) -> Option<Self> {
        let ExpertForm::Indexed { .. } = op.form else { return None };
        let lists = if op.lists { 0 } else { ListStage::of(op, info)?.end() };
        let (parts, k) = (planes.parts, op.each.k);
        let (codes_row, scales_row) = (parts.code_bytes(k), parts.scale_bytes(k));
        let factor = if parts.factor == XFactor::PerToken { WORD } else { 0 };
        let mut end = lists;
        let mut part = |row: usize| {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            end = start.checked_add(op.each.m.checked_mul(row)?)?;
            Some(start..end)
        };
        let all = [part(codes_row)?, part(scales_row)?, part(factor)?];
        let (codes_row, scales_row) = (codes_row as u64, scales_row as u64);
        Some(Self { from: *planes, to: XPlanes { codes_row, scales_row, ..*planes }, parts: all })
    }

    /// The stage of a plan. `None` when X is not quantized, or
    /// its rows are in the order of experts.
    pub fn of_plan(planned: &PlannedExperts<'_>) -> Option<Self> {
        let planes = planned.op.each.x.planes.filter(|_| planned.groups_slots())?;
        Self::of(planned.op, &planes, planned.info)
    }

    /// End of the planes in the scratch memory, in bytes.
    pub fn end(&self) -> usize {
        self.parts[2].end
    }

    /// X as the product reads it.
    pub fn product_x<'a>(&self, planned: &PlannedExperts<'a>) -> ProductX<'a> {
        let (op, in_place) = (planned.op, ProductX::in_place(planned.op));
        let [x, scales, factors] = &self.parts;
        let gathered = |part: &Range<usize>, given| if part.is_empty() { given } else { planned.scratch(part) };
        let each = CheckedGemm { x: self.to.operand(op.each.x.format), ..op.each.clone() };
        ProductX {
            op: Cow::Owned(CheckedExperts { each, ..op.clone() }),
            x: gathered(x, in_place.x),
            scales: gathered(scales, in_place.scales),
            factors: gathered(factors, in_place.factors),
            token_scale: in_place.token_scale,
        }
    }

    /// The launch with its operands.
    pub fn stage(&self, planned: &PlannedExperts<'_>, lists: Source) -> Stage {
        use ExpertOperand as O;
        let op = planned.op;
        let launch = Gather {
            params: GatherParams {
                codes_row: self.from.codes_row,
                scales_row: self.from.scales_row,
                slots: op.each.m as u32,
                x_sharers: (op.each.m / op.x_rows().max(1)) as u32,
                chunks: (self.to.codes_row as usize / CHUNK) as u32,
                words: (self.to.scales_row as usize / WORD) as u32,
                ..GatherParams::zeroed()
            },
            list: op.list_parts().map_or(0, |[_, slots]| slots.start),
            parts: self.parts.clone().map(|part| part.start - self.parts[0].start),
            has_factors: !self.parts[2].is_empty(),
        };
        let grid = [(op.each.m as u32).max(1), 1, 1];
        let launch = KERNEL.launch(planned.variant, grid, Arc::new(launch));
        let stage = Stage::new(launch).with_own([O::X, O::XScales, O::XPlaneFactors]).with(O::Lists, lists);
        stage.with(O::Workspace, planned.scratch(&(self.parts[0].start..self.end())))
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

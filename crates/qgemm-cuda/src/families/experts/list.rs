//! List stage: kernels of `routing` that list the slots of
//! each expert, when no router has.

use qgemm_hal::{CheckedExperts, DeviceInfo, ExpertOperand, HalError, LaunchStep, ListedSlots};

use super::planned::PlannedExperts;
use super::stage::Source;
use crate::families::kernel_launch::MakeKernel;
use crate::families::routing::{list_steps, list_workspace_bytes};

/// The list stage, with its regions of the scratch memory.
#[derive(Debug)]
pub(super) struct ListStage(ListedSlots);

impl ListStage {
    /// Regions at the start of the scratch memory. `None` when
    /// the slots cannot be listed.
    pub fn of(op: &CheckedExperts, info: &DeviceInfo) -> Option<Self> {
        ListedSlots::of(op, |routing| list_workspace_bytes(routing, info.units)).map(Self)
    }

    /// The stage of a plan; `None` when its product needs no
    /// lists, or the caller gives them.
    ///
    /// # Errors
    /// [`HalError::KernelUnavailable`] when the scratch memory is too small.
    pub fn of_plan(planned: &PlannedExperts<'_>) -> Result<Option<Self>, HalError> {
        if !planned.groups_slots() || planned.op.lists {
            return Ok(None);
        }
        let stage = Self::of(planned.op, planned.info);
        let stage = stage.filter(|stage| stage.end() <= planned.plan.config.scratch_bytes);
        stage.map(Some).ok_or_else(|| planned.unavailable("the plan has no room for lists of slots"))
    }

    /// End of the regions, in bytes.
    pub fn end(&self) -> usize {
        self.0.bytes()
    }

    /// The launches.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn steps(&self, planned: &PlannedExperts<'_>, make: &mut MakeKernel<'_>) -> Result<Vec<LaunchStep>, HalError> {
        let steps = list_steps(&self.0.routing, planned.info, make)?;
        Ok(steps.into_iter().map(|step| self.0.bound(step, planned.plan)).collect())
    }
}

/// Bytes of the lists that a run builds itself.
pub(super) fn list_bytes(op: &CheckedExperts, info: &DeviceInfo) -> usize {
    if op.lists { 0 } else { ListStage::of(op, info).map_or(0, |stage| stage.end()) }
}

/// The expert lists: those of `stage`, or the caller's. `None` when
/// slots are not grouped.
pub(super) fn lists(planned: &PlannedExperts<'_>, stage: Option<&ListStage>) -> Option<Source> {
    let written = stage.map(|stage| Source::Workspace(stage.0.in_workspace(planned.plan)));
    planned.groups_slots().then(|| written.unwrap_or(Source::Operand(ExpertOperand::Lists)))
}

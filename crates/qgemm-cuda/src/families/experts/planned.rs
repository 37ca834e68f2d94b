//! [`PlannedExperts`]: an operation with its plan and device.

use std::borrow::Cow;
use std::ops::Range;

use qgemm_hal::{CheckedExperts, DeviceInfo, ExpertForm, ExpertOperand, ExpertsPlan, HalError, Variant};

use super::stage::Source;

/// An operation with its plan and device, from which
/// every stage is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedExperts<'a> {
    pub op: &'a CheckedExperts,
    pub plan: &'a ExpertsPlan,
    pub info: &'a DeviceInfo,
    pub variant: Variant,
}

impl<'a> PlannedExperts<'a> {
    /// # Errors
    /// [`HalError::WrongDevice`] when the device has no kernel variant.
    pub fn new(op: &'a CheckedExperts, plan: &'a ExpertsPlan, info: &'a DeviceInfo) -> Result<Self, HalError> {
        let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
        Ok(Self { op, plan, info, variant })
    }

    /// Whether slots are grouped by expert, so that the
    /// product reads expert lists.
    pub fn groups_slots(&self) -> bool {
        self.plan.config.grouped && matches!(self.op.form, ExpertForm::Indexed { .. })
    }

    /// A byte range of the kernels' scratch memory.
    pub fn scratch(&self, part: &Range<usize>) -> Source {
        Source::Workspace(self.plan.scratch + part.start..self.plan.scratch + part.end)
    }

    /// The slot products before the combine stage.
    pub fn products(&self) -> Source {
        Source::Workspace(self.plan.products..self.plan.products + self.plan.product_bytes)
    }

    /// The error that the plan's kernel cannot be launched.
    pub fn unavailable(&self, why: impl Into<String>) -> HalError {
        let kernel = self.plan.config.kernel_id(self.op).to_string();
        HalError::KernelUnavailable { kernel, target: self.info.arch.clone(), why: why.into() }
    }
}

/// X of the product, as the caller gives it or as an
/// earlier stage writes it.
#[derive(Debug)]
pub(super) struct ProductX<'a> {
    /// The operation on this X.
    pub op: Cow<'a, CheckedExperts>,
    /// Numbers, or codes of a quantized X.
    pub x: Source,
    /// Scales and factors of a quantized X.
    pub scales: Source,
    pub factors: Source,
    pub token_scale: Source,
}

impl<'a> ProductX<'a> {
    /// X of `op`, read in place.
    pub fn in_place(op: &'a CheckedExperts) -> Self {
        Self {
            op: Cow::Borrowed(op),
            x: Source::Operand(ExpertOperand::X),
            scales: Source::Operand(ExpertOperand::XScales),
            factors: Source::Operand(ExpertOperand::XPlaneFactors),
            token_scale: Source::Operand(ExpertOperand::TokenScale),
        }
    }
}

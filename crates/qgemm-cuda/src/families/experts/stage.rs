//! [`Stage`]: a launch with the source of each operand.

use std::ops::Range;

use qgemm_hal::{ExpertOperand, HalError, LaunchStep};

use crate::families::kernel_launch::{KernelLaunch, MakeKernel};

/// Where a stage finds an operand.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// An operand of the operation.
    Operand(ExpertOperand),
    /// A byte range of the workspace.
    Workspace(Range<usize>),
}

/// A launch with the source of each operand. An operand
/// without a source is absent.
#[derive(Debug)]
pub(super) struct Stage {
    launch: KernelLaunch,
    operands: Vec<(ExpertOperand, Source)>,
}

impl Stage {
    /// The launch, without operands.
    pub fn new(launch: KernelLaunch) -> Self {
        Self { launch, operands: Vec::new() }
    }

    /// The stage's `operands` are the operation's operands of the
    /// same names.
    pub fn with_own(mut self, operands: impl IntoIterator<Item = ExpertOperand>) -> Self {
        self.operands.extend(operands.into_iter().map(|operand| (operand, Source::Operand(operand))));
        self
    }

    /// The stage finds `operand` at `source`.
    pub fn with(mut self, operand: ExpertOperand, source: Source) -> Self {
        self.operands.push((operand, source));
        self
    }

    /// The launch step, with its kernel prepared by `make`.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn step(self, make: &mut MakeKernel<'_>) -> Result<LaunchStep, HalError> {
        let step = self.launch.step::<ExpertOperand>(make)?;
        Ok(self.operands.into_iter().fold(step, |step, (operand, source)| match source {
            Source::Operand(of_operation) => step.bind(operand, of_operation),
            Source::Workspace(range) => step.bind_part(operand, ExpertOperand::Workspace, range),
        }))
    }
}

//! Combine stage: the weighted sum of each token's slots.

use std::sync::Arc;

use qgemm_hal::abi::{ExpertCombine, FLAG_D_ALIGNED16, FLAG_RESIDUAL_ALIGNED16, dtype_code};
use qgemm_hal::{CheckedExperts, Combine, ExpertOperand, ExpertStep, HalError, Operands, Variant};

use super::grid::two_dimensions;
use super::planned::PlannedExperts;
use super::stage::Stage;
use super::stage_kernel::StageKernel;
use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::spec::KernelSpec;

const KERNEL: StageKernel = StageKernel {
    step: ExpertStep::Combine,
    entry: "entry/experts_combine.cu",
    symbol: "qg_experts_combine",
    threads: THREADS,
    shared_bytes: 0,
    constants: Prelude::EMPTY,
};
/// Threads of a CTA, and features of each (`RUN`).
const THREADS: u32 = 128;
const RUN: u32 = 8;

pub(super) fn spec(variant: Variant) -> KernelSpec {
    KERNEL.spec(variant)
}

/// The combine stage. It reads the slot products
/// from the workspace.
#[derive(Debug)]
pub(super) struct CombineStage(Combine);

impl CombineStage {
    /// The stage of `op`, if it combines slots.
    pub fn of(op: &CheckedExperts) -> Option<Self> {
        op.combine.map(Self)
    }

    /// The launch with its operands.
    pub fn stage(&self, planned: &PlannedExperts<'_>) -> Stage {
        use ExpertOperand as O;
        let op = planned.op;
        let [y, z] = two_dimensions(op.tokens());
        let grid = [(op.each.out_features as u32).div_ceil(THREADS * RUN), y, z];
        let launch = KERNEL.launch(planned.variant, grid, Arc::new(self.params(op)));
        let stage = Stage::new(launch).with_own([O::Index, O::RouterWeights, O::Residual, O::D]);
        stage.with(O::Products, planned.products())
    }

    /// Kernel parameter without addresses.
    fn params(&self, op: &CheckedExperts) -> ExpertCombine {
        let Combine { d, residual } = self.0;
        let tokens = op.tokens();
        ExpertCombine {
            d_row: d.row_stride,
            residual_row: residual.map_or(0, |residual| residual.row_stride),
            tokens: tokens as u32,
            features: op.each.out_features as u32,
            top_k: (op.each.m / tokens) as u32,
            experts: op.experts as u32,
            d_dtype: dtype_code(d.dtype),
            residual_dtype: residual.map_or(0, |residual| dtype_code(residual.dtype)),
            flags: if d.aligned16 { FLAG_D_ALIGNED16 } else { 0 }
                | if residual.is_some_and(|residual| residual.aligned16) { FLAG_RESIDUAL_ALIGNED16 } else { 0 },
            ..ExpertCombine::default()
        }
    }
}

impl Params for ExpertCombine {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut params = *self;
        params.products = places.of(operands, ExpertOperand::Products)?;
        params.index = places.of(operands, ExpertOperand::Index)?;
        params.router_weights = places.of(operands, ExpertOperand::RouterWeights)?;
        params.residual = places.of(operands, ExpertOperand::Residual)?;
        params.d = places.of(operands, ExpertOperand::D)?;
        params.tokens = operands.rows(self.tokens as usize) as u32;
        Ok(LaunchParams::of(&params))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

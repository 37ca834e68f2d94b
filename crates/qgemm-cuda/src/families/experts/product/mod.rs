//! Product stage: a kernel of `gemm` whose CTAs find their
//! rows and expert in an index.

mod codes;
mod decoded;
mod identity;
mod params;
mod plain;
mod staged;
mod w_map;

use qgemm_hal::{CheckedExperts, ExpertOperand, ExpertsConfig, HalError, Variant};

pub(super) use codes::configs as quantized_configs;
pub(super) use plain::configs as plain_configs;

use super::planned::{PlannedExperts, ProductX};
use super::stage::{Source, Stage};
use crate::families::kernel_launch::KernelLaunch;
use crate::spec::KernelSpec;

/// All product kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    plain::specs(variant).chain(codes::specs(variant))
}

/// Checks whether each product kernel fits in registers,
/// using its line of `kernels.spills`.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    plain::ask_registers(variant, fits);
    staged::ask_registers(variant, fits);
}

/// The kernel of a config.
pub(super) fn spec_of(op: &CheckedExperts, config: &ExpertsConfig) -> Option<KernelSpec> {
    let variant = config.tile.variant?;
    match op.each.x.planes {
        Some(_) => codes::spec_of(op, config, variant),
        None => plain::spec_of(op, config, variant),
    }
}

/// The product stage: its launch, X and expert lists.
#[derive(Debug)]
pub(super) struct ProductStage<'a> {
    launch: KernelLaunch,
    x: ProductX<'a>,
    lists: Option<Source>,
}

impl<'a> ProductStage<'a> {
    /// The product of `x` by the plan's kernel.
    ///
    /// # Errors
    /// [`HalError::KernelUnavailable`] when the backend lacks the kernel.
    pub fn of(planned: &PlannedExperts<'_>, x: ProductX<'a>, lists: Option<Source>) -> Result<Self, HalError> {
        let launch = match &x.op.each.x.planes {
            Some(planes) => codes::launch(planned, &x.op, planes)?,
            None => plain::launch(planned, &x.op)?,
        };
        Ok(Self { launch, x, lists })
    }

    /// The launch with its operands. With a combine stage, D is the
    /// slot products in the workspace.
    pub fn stage(self, planned: &PlannedExperts<'_>) -> Stage {
        use ExpertOperand as O;
        let Self { launch, x, lists } = self;
        let own = [O::W, O::RowScale, O::KOrder, O::C, O::Bias, O::Index];
        let of_index = [O::Status].into_iter().filter(|_| planned.op.checks_index);
        let x_operands =
            [(O::X, x.x), (O::XScales, x.scales), (O::XPlaneFactors, x.factors), (O::TokenScale, x.token_scale)];
        let lists = lists.map(|lists| (O::Lists, lists));
        let stage = Stage::new(launch).with_own(own).with_own(of_index);
        let stage = x_operands.into_iter().chain(lists).fold(stage, |stage, (o, source)| stage.with(o, source));
        match planned.op.combine {
            None => stage.with_own([O::Residual, O::D]),
            Some(_) => {
                let weights = [O::RouterWeights].into_iter().filter(|_| planned.op.checks_index);
                stage.with_own(weights).with(O::D, planned.products())
            }
        }
    }
}

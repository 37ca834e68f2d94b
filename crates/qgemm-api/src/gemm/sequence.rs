//! The launches of a product whose X may have to be normalized, made plain, or quantized first.

use qgemm_hal::{CheckedGemm, Device, Family, GemmOperand, LaunchPlan, LaunchSequence, Placed, QuantizeOperand};
use qgemm_sched::quantize;

use crate::error::Error;
use crate::normed::{Shared, behind_norm};
use crate::plain_x::{XOperands, behind_dequantize};

/// Makes the kernels of `plan` ready: the norm's, where X is normalized, and those of the product.
pub(super) fn prepare(
    device: &dyn Device,
    op: &CheckedGemm,
    family: &dyn Family<CheckedGemm>,
    plan: &LaunchPlan,
) -> Result<LaunchSequence, Error> {
    let product = of_product(device, op, family, plan)?;
    let Some((norm, regions)) = op.norm_prologue().zip(op.normed_regions(op.m, plan.workspace.bytes)) else {
        return Ok(product);
    };
    use GemmOperand as O;
    let planes = Some([O::XScales, O::XPlaneFactors, O::XSums]);
    let shared = Shared { x: O::X, gamma: O::Gamma, beta: O::Beta, workspace: O::Workspace, planes };
    behind_norm(device, &norm, regions, product, shared)
}

/// Makes the kernels of the product ready: those of `family`, behind the one that makes X plain where `family` sees it so.
fn of_product(
    device: &dyn Device,
    op: &CheckedGemm,
    family: &dyn Family<CheckedGemm>,
    plan: &LaunchPlan,
) -> Result<LaunchSequence, Error> {
    use GemmOperand as O;
    use QuantizeOperand as Q;
    let product = family.prepare(device, &op.product(plan), plan)?;
    if let Some((first, regions)) = op.quantize_step(plan) {
        let (family, first_plan) = quantize::choose(&first, device.info(), device.catalog().quantize)?;
        let sequence = family.prepare(device, &first, &first_plan)?;
        let part = |of_first: Q, plane| Placed::part(of_first, O::Workspace, regions.range(plane));
        let places =
            [Placed::at(Q::X, O::X), part(Q::Codes, 0), part(Q::Scales, 1), part(Q::TokenFactors, 2), part(Q::Sums, 3)];
        let part = |of_product: O, plane| Placed::part(of_product, O::Workspace, regions.range(plane));
        let of_product = [
            part(O::X, 0),
            part(O::XScales, 1),
            part(O::XPlaneFactors, 2),
            part(O::XSums, 3),
            Placed::part(O::Workspace, O::Workspace, 0..regions.range(0).start),
        ];
        return Ok(product.behind::<O>(sequence, &places, &of_product));
    }
    let (Some(region), Some((_, first))) = (&plan.workspace.dequantized, op.dequantized()) else { return Ok(product) };
    let of = XOperands { x: O::X, scales: O::XScales, factors: O::XPlaneFactors, workspace: O::Workspace };
    behind_dequantize(device, &first, region, product, of)
}

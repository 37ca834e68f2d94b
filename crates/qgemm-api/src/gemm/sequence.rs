//! Launch sequence of a product, with optional steps that normalize,
//! dequantize or quantize X first.

use qgemm_hal::{CheckedGemm, Device, Family, GemmOperand, LaunchPlan, LaunchSequence};

use crate::error::Error;
use crate::normed::{Shared, behind_norm};
use crate::plain_x::{XOperands, behind_dequantize, behind_quantize};

/// Makes the kernels of `plan` ready: the optional norm and the product.
pub(super) fn prepare(
    device: &dyn Device,
    op: &CheckedGemm,
    family: &dyn Family<CheckedGemm>,
    plan: &LaunchPlan,
) -> Result<LaunchSequence, Error> {
    let product = of_product(device, op, family, plan)?;
    let Some((norm, regions)) = op.norm_before(plan) else { return Ok(product) };
    use GemmOperand as O;
    let planes = Some([O::XScales, O::XPlaneFactors, O::XSums]);
    let shared = Shared { x: O::X, gamma: O::Gamma, beta: O::Beta, workspace: O::Workspace, planes };
    behind_norm(device, &norm, regions, product, shared)
}

/// Makes the kernels of the product ready, with an
/// optional dequantization of X.
fn of_product(
    device: &dyn Device,
    op: &CheckedGemm,
    family: &dyn Family<CheckedGemm>,
    plan: &LaunchPlan,
) -> Result<LaunchSequence, Error> {
    use GemmOperand as O;
    let product = family.prepare(device, &op.product(plan), plan)?;
    if let Some((first, regions)) = op.quantize_step(plan) {
        let of = XOperands { x: O::X, scales: O::XScales, factors: O::XPlaneFactors, workspace: O::Workspace };
        return behind_quantize(device, &first, regions, product, of, O::XSums);
    }
    let (Some(region), Some((_, first))) = (&plan.workspace.dequantized, op.dequantized()) else { return Ok(product) };
    let of = XOperands { x: O::X, scales: O::XScales, factors: O::XPlaneFactors, workspace: O::Workspace };
    behind_dequantize(device, &first, region, product, of)
}

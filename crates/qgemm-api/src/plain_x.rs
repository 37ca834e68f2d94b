//! X prologue of a product: dequantizes X for kernels without its
//! format, or quantizes a plain X.

use qgemm_hal::{
    CheckedDequantize, CheckedQuantize, DequantizeOperand, Device, LaunchSequence, Operand, Operation, Placed,
    QuantizeOperand, XPlaneRegions, XRegion,
};
use qgemm_sched::memory_bound;

use crate::error::Error;

/// Operands of a product that belong to its X.
#[derive(Clone, Copy)]
pub(crate) struct XOperands<O> {
    pub x: O,
    pub scales: O,
    pub factors: O,
    pub workspace: O,
}

/// `product` after the launch of `step`, which writes the dequantized X
/// to `region` of the workspace.
pub(crate) fn behind_dequantize<O: Operand>(
    device: &dyn Device,
    step: &CheckedDequantize,
    region: &XRegion,
    product: LaunchSequence,
    of: XOperands<O>,
) -> Result<LaunchSequence, Error> {
    use DequantizeOperand as D;
    let (family, plan) = memory_bound::choose(step, device.info(), device.catalog().dequantize)?;
    let sequence = family.prepare(device, step, &plan)?;
    let numbers = region.x_of(step.rows);
    let place = |operand: D| match operand {
        D::Codes => Placed::at(D::Codes, of.x),
        D::Scales => Placed::at(D::Scales, of.scales),
        D::Factors => Placed::at(D::Factors, of.factors),
        D::D => Placed::part(D::D, of.workspace, numbers.clone()),
    };
    let places: Vec<_> = step.operands().into_iter().map(place).collect();
    let of_product = [
        Placed::part(of.x, of.workspace, numbers.clone()),
        // The workspace of the first step ends at the region.
        Placed::part(of.workspace, of.workspace, 0..region.x),
    ];
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

/// `product` after the launch of `step`, which writes the quantized X
/// to `regions` of the workspace.
pub(crate) fn behind_quantize<O: Operand>(
    device: &dyn Device,
    step: &CheckedQuantize,
    regions: XPlaneRegions,
    product: LaunchSequence,
    of: XOperands<O>,
    sums: O,
) -> Result<LaunchSequence, Error> {
    use QuantizeOperand as Q;
    let (family, plan) = memory_bound::choose(step, device.info(), device.catalog().quantize)?;
    let sequence = family.prepare(device, step, &plan)?;
    let part = |of_step: Q, plane| Placed::part(of_step, of.workspace, regions.range(plane));
    let places =
        [Placed::at(Q::X, of.x), part(Q::Codes, 0), part(Q::Scales, 1), part(Q::TokenFactors, 2), part(Q::Sums, 3)];
    let part = |of_product: O, plane| Placed::part(of_product, of.workspace, regions.range(plane));
    let of_product = [
        part(of.x, 0),
        part(of.scales, 1),
        part(of.factors, 2),
        part(sums, 3),
        // The workspace of the first step ends at the first region.
        Placed::part(of.workspace, of.workspace, 0..regions.range(0).start),
    ];
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

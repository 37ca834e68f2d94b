//! The step before a product that makes a quantized X plain, for kernels that multiply no codes of its format, or quantizes a plain one.

use qgemm_hal::{
    CheckedDequantize, CheckedQuantize, DequantizeOperand, Device, LaunchSequence, Operand, Operation, Placed,
    QuantizeOperand, XPlaneRegions, XRegion,
};
use qgemm_sched::memory_bound;

use crate::error::Error;

/// The operands of a product that have to do with its X.
#[derive(Clone, Copy)]
pub(crate) struct XOperands<O> {
    pub x: O,
    pub scales: O,
    pub factors: O,
    pub workspace: O,
}

/// `product` behind the launch of `step`, which writes the numbers that it multiplies into `region` of the workspace.
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
        // Its own part of the workspace ends where that of the first step begins.
        Placed::part(of.workspace, of.workspace, 0..region.x),
    ];
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

/// `product` behind the launch of `step`, which writes the codes that it multiplies, and what belongs to them, into `regions` of the
/// workspace.
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
        // Its own part of the workspace ends where that of the first step begins.
        Placed::part(of.workspace, of.workspace, 0..regions.range(0).start),
    ];
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

//! A quantized X made plain before a product that multiplies no codes of its format.

use qgemm_hal::{CheckedDequantize, DequantizeOperand, Device, LaunchSequence, Operand, Operation, Placed, XRegion};
use qgemm_sched::dequantize::choose;

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
    let (family, plan) = choose(step, device.info(), device.catalog().dequantize)?;
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

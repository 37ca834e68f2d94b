//! Norm prologue of a product: choice of its kernel, and its
//! launch before the product.

use qgemm_formats::XFactor;
use qgemm_hal::{CheckedNorm, Device, LaunchSequence, NormOperand, Operand, Operation, Placed, XPlaneRegions};
use qgemm_sched::Preferences;
use qgemm_sched::memory_bound::choose;

use crate::error::Error;

/// Operands that product and norm share.
#[derive(Clone, Copy)]
pub(crate) struct Shared<O> {
    pub x: O,
    pub gamma: O,
    pub beta: O,
    pub workspace: O,
    /// Scales, factors and sums of a product with a quantized X.
    pub planes: Option<[O; 3]>,
}

/// `product` after the launch of `norm`, which writes the product's X into
/// `regions` of the workspace.
pub(crate) fn behind_norm<O: Operand>(
    device: &dyn Device,
    norm: &CheckedNorm,
    regions: XPlaneRegions,
    product: LaunchSequence,
    shared: Shared<O>,
) -> Result<LaunchSequence, Error> {
    let (family, plan) = choose(norm, device.info(), device.catalog().norm)?;
    let sequence = family.prepare(device, norm, &plan)?;
    let place = |operand: NormOperand| match operand {
        NormOperand::Gamma => Placed::at(operand, shared.gamma),
        NormOperand::Beta => Placed::at(operand, shared.beta),
        NormOperand::D | NormOperand::Codes => Placed::part(operand, shared.workspace, regions.range(0)),
        NormOperand::Scales => Placed::part(operand, shared.workspace, regions.range(1)),
        NormOperand::TokenFactors => Placed::part(operand, shared.workspace, regions.range(2)),
        NormOperand::Sums => Placed::part(operand, shared.workspace, regions.range(3)),
        NormOperand::Factor => Placed::at(operand, shared.planes.map_or(shared.x, |[_, factors, _]| factors)),
        _ => Placed::at(operand, shared.x),
    };
    let places: Vec<_> = norm.operands().into_iter().map(place).collect();
    let mut of_product = vec![
        Placed::part(shared.x, shared.workspace, regions.range(0)),
        // The norm's workspace ends at the first region.
        Placed::part(shared.workspace, shared.workspace, 0..regions.all().start),
    ];
    if let (Some([scales, factors, sums]), Some(quantized)) = (shared.planes, norm.quantized) {
        of_product.push(Placed::part(scales, shared.workspace, regions.range(1)));
        of_product.push(Placed::part(sums, shared.workspace, regions.range(3)));
        if quantized.planes.parts.factor == XFactor::PerToken {
            of_product.push(Placed::part(factors, shared.workspace, regions.range(2)));
        }
    }
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

/// Scheduler preferences for the product's own steps, with the workspace minus
/// the `regions` of normalized rows.
pub(crate) fn preferences_beside(regions: Option<XPlaneRegions>, asked: &Preferences) -> Result<Preferences, Error> {
    let (Some(regions), Some(limit)) = (regions, asked.max_workspace) else { return Ok(asked.clone()) };
    let expected = regions.all().end;
    match limit.checked_sub(expected) {
        Some(rest) => Ok(Preferences { max_workspace: Some(rest), ..asked.clone() }),
        None => Err(Error::NoRoomForNorm { expected, limit }),
    }
}

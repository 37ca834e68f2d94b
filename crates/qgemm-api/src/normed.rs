//! The norm before a product: which of its kernels, and its launch before those of the product.

use std::ops::Range;

use qgemm_hal::{CheckedNorm, Device, LaunchSequence, NormOperand, Operand, Operation, Placed};
use qgemm_sched::Preferences;
use qgemm_sched::norm::choose;

use crate::error::Error;

/// The operands of a product that its norm has, too.
#[derive(Clone, Copy)]
pub(crate) struct Shared<O> {
    pub x: O,
    pub gamma: O,
    pub beta: O,
    pub workspace: O,
}

/// `product` behind the launch of `norm`, which writes what it multiplies into the bytes `region` of the workspace.
pub(crate) fn behind_norm<O: Operand>(
    device: &dyn Device,
    norm: &CheckedNorm,
    region: Range<usize>,
    product: LaunchSequence,
    shared: Shared<O>,
) -> Result<LaunchSequence, Error> {
    let (family, plan) = choose(norm, device.info(), device.catalog().norm)?;
    let sequence = family.prepare(device, norm, &plan)?;
    let place = |operand: NormOperand| match operand {
        NormOperand::Gamma => Placed::at(operand, shared.gamma),
        NormOperand::Beta => Placed::at(operand, shared.beta),
        NormOperand::D => Placed::part(operand, shared.workspace, region.clone()),
        _ => Placed::at(operand, shared.x),
    };
    let places: Vec<_> = norm.operands().into_iter().map(place).collect();
    let of_product = [
        Placed::part(shared.x, shared.workspace, region.clone()),
        // Its own part of the workspace ends where that of the norm begins.
        Placed::part(shared.workspace, shared.workspace, 0..region.start),
    ];
    Ok(product.behind::<O>(sequence, &places, &of_product))
}

/// What the scheduler may give to the product's own steps, where normalized rows take the bytes `region` of a workspace in which
/// there is nothing else.
pub(crate) fn preferences_beside(region: Option<Range<usize>>, asked: &Preferences) -> Result<Preferences, Error> {
    let (Some(region), Some(limit)) = (region, asked.max_workspace) else { return Ok(asked.clone()) };
    match limit.checked_sub(region.end) {
        Some(rest) => Ok(Preferences { max_workspace: Some(rest), ..asked.clone() }),
        None => Err(Error::NoRoomForNorm { expected: region.end, limit }),
    }
}

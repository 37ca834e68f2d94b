//! `optimizer`: which kernel.

use qgemm_hal::{CheckedOptimizer, DeviceInfo, Family, OptimizerLaunch};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Chooses how to run `op` on the device of `info`: the family and configuration that move its bytes in the least time. Among
/// equals, earlier ones win.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedOptimizer,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedOptimizer>],
) -> Result<(&'f dyn Family<CheckedOptimizer>, OptimizerLaunch), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let operation = format!("{} of {} parameters", op.rule.kind(), op.len);
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// Every way to run `op` that [`choose`] has the choice of.
pub fn candidates<'f>(
    op: &CheckedOptimizer,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedOptimizer>],
) -> Candidates<'f, CheckedOptimizer> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, 1);
            [(OptimizerLaunch { config, estimate: cost.seconds }, cost)]
        },
    )
}

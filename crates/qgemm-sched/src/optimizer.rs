//! Kernel choice for `optimizer`.

use qgemm_hal::{CheckedOptimizer, DeviceInfo, Family, OptimizerLaunch};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
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

/// All candidates that [`choose`] ranks for `op`.
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

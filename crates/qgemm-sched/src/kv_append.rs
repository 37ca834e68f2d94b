//! Kernel choice for `kv_append`.

use qgemm_hal::{CheckedKvAppend, DeviceInfo, Family, KvAppendLaunch};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedKvAppend,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedKvAppend>],
) -> Result<(&'f dyn Family<CheckedKvAppend>, KvAppendLaunch), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let tokens = op.addressing.tokens;
        let operation = format!("appending {tokens} tokens in {} to a cache in {}", op.dtype, op.kv);
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedKvAppend,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedKvAppend>],
) -> Candidates<'f, CheckedKvAppend> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, config.launches);
            [(KvAppendLaunch { config, estimate: cost.seconds }, cost)]
        },
    )
}

//! `kv_append`: which kernel.

use qgemm_hal::{CheckedKvAppend, DeviceInfo, Family, KvAppendLaunch};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Chooses how to run `op` on the device of `info`: the family and configuration that move its bytes in the least time. Among
/// equals, earlier ones win.
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

/// Every way to run `op` that [`choose`] has the choice of.
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

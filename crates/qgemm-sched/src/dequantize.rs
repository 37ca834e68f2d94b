//! Kernel choice for `dequantize`.

use qgemm_hal::{CheckedDequantize, DequantizePlan, DeviceInfo, Family};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedDequantize,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedDequantize>],
) -> Result<(&'f dyn Family<CheckedDequantize>, DequantizePlan), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let CheckedDequantize { rows, columns, format, .. } = op;
        let operation = format!("dequantize of {rows} x {columns} from {format}");
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedDequantize,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedDequantize>],
) -> Candidates<'f, CheckedDequantize> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, 1);
            [(DequantizePlan { config, estimate: cost.seconds }, cost)]
        },
    )
}

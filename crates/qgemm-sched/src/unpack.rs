//! Kernel choice for `unpack`.

use qgemm_hal::{CheckedUnpack, DeviceInfo, Family, UnpackPlan};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedUnpack,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedUnpack>],
) -> Result<(&'f dyn Family<CheckedUnpack>, UnpackPlan), SchedError> {
    let Candidates { offered, refusals } = Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, 1);
            Some((UnpackPlan { config, estimate: cost.seconds }, cost))
        },
    );
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let CheckedUnpack { out_features, features, format, d, .. } = op;
        let operation = format!("unpack of {out_features} x {features} {} to {}", format.name, d.dtype);
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_formats::prepack::FragmentLayout;
    use qgemm_hal::Dense;

    use super::*;
    use crate::gemm::tests::info;

    #[test]
    fn a_device_without_families_says_what_was_asked() {
        let op = CheckedUnpack {
            out_features: 8,
            gated: false,
            k: 64,
            stored_k: 64,
            first: 0,
            features: 64,
            format: "q4_0".parse().expect("exists"),
            class: FragmentLayout::Canonical,
            row_scale: false,
            k_order: false,
            d: Dense::rows_of(DType::F16, 8),
        };
        let error = choose(&op, &info(), &[]).expect_err("no family").to_string();
        assert!(error.contains("unpack of 8 x 64 q4_0 to f16"), "{error}");
    }
}

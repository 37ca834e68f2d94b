//! Kernel choice for `quantize`.

use qgemm_hal::{CheckedQuantize, DeviceInfo, Family, QuantizePlan};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedQuantize,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedQuantize>],
) -> Result<(&'f dyn Family<CheckedQuantize>, QuantizePlan), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let CheckedQuantize { rows, columns, x, format, .. } = op;
        let operation = format!("quantize of {rows} x {columns} from {} to {format}", x.dtype);
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedQuantize,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedQuantize>],
) -> Candidates<'f, CheckedQuantize> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, 1);
            [(QuantizePlan { config, estimate: cost.seconds }, cost)]
        },
    )
}

#[cfg(test)]
mod tests {
    use qgemm_formats::{DType, XFormat};
    use qgemm_hal::{
        Dense, Device, HalError, KernelId, LaunchSequence, QuantizeConfig, QuantizeSpec, Spec, Unsupported,
    };

    use super::*;
    use crate::gemm::tests::info;

    #[derive(Debug)]
    struct TestFamily(&'static str, Option<u32>);

    impl Family<CheckedQuantize> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, op: &CheckedQuantize, _: &DeviceInfo) -> Result<Vec<QuantizeConfig>, Unsupported> {
            let efficiency = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
            let kernel = KernelId::new(self.0, None, Spec::Quantize(QuantizeSpec::of(op)));
            Ok(vec![QuantizeConfig { kernel, efficiency }])
        }
        fn prepare(
            &self,
            device: &dyn Device,
            _: &CheckedQuantize,
            _: &QuantizePlan,
        ) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedQuantize, _: &QuantizeConfig) -> u64 {
            0
        }
    }

    #[test]
    fn the_fastest_family_is_chosen_and_refusals_are_listed() {
        let (slow, fast, never) =
            (TestFamily("slow", Some(100)), TestFamily("fast", Some(900)), TestFamily("never", None));
        let format = XFormat::Q8_0;
        let parts = format.parts(false, None).expect("it has codes");
        let x = Dense::rows_of(DType::F16, 64);
        let op = CheckedQuantize { rows: 8, columns: 64, x, format, parts, codes_row: 64, scales_row: 8, sums_row: 0 };
        let (family, plan) = choose(&op, &info(), &[&never, &slow, &fast]).expect("two serve it");
        assert_eq!((family.name(), plan.config.efficiency), ("fast", 900));
        let expected = info().launch_seconds + 8.0 * (64.0 * 3.0 + 8.0) / (info().bandwidth * 0.9);
        assert!((plan.estimate / expected - 1.0).abs() < 1e-9, "{plan:?}");
        let error = choose(&op, &info(), &[&never]).expect_err("serves nothing").to_string();
        assert!(error.contains("quantize of 8 x 64 from f16 to q8_0: never serves nothing"), "{error}");
    }
}

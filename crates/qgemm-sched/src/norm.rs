//! Kernel choice for `norm`.

use qgemm_hal::{CheckedNorm, DeviceInfo, Family, NormLaunch};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The one that moves the bytes fastest wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedNorm,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedNorm>],
) -> Result<(&'f dyn Family<CheckedNorm>, NormLaunch), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let CheckedNorm { rows, columns, function, x, .. } = op;
        let operation = format!("{} norm of {rows} x {columns} from {} to {}", function.kind, x.dtype, op.d_format());
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedNorm,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedNorm>],
) -> Candidates<'f, CheckedNorm> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, 1);
            [(NormLaunch { config, estimate: cost.seconds }, cost)]
        },
    )
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{
        Dense, Device, HalError, KernelId, LaunchSequence, NormConfig, NormFunction, NormSpec, Spec, Unsupported,
        XPlace,
    };

    use super::*;
    use crate::gemm::tests::info;

    #[derive(Debug)]
    struct TestFamily(&'static str, Option<u32>);

    impl Family<CheckedNorm> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, _: &CheckedNorm, _: &DeviceInfo) -> Result<Vec<NormConfig>, Unsupported> {
            let efficiency = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
            let spec = NormSpec::any(0);
            Ok(vec![NormConfig { kernel: KernelId::new(self.0, None, Spec::Norm(spec)), efficiency }])
        }
        fn prepare(&self, device: &dyn Device, _: &CheckedNorm, _: &NormLaunch) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedNorm, _: &NormConfig) -> u64 {
            0
        }
    }

    fn op() -> CheckedNorm {
        let (x, d) = (Dense::rows_of(DType::F32, 64), Dense::rows_of(DType::F16, 64));
        CheckedNorm {
            rows: 8,
            columns: 64,
            d_columns: 64,
            function: NormFunction::rms(1e-6),
            x,
            d,
            quantized: None,
            added: None,
            x_place: XPlace::Own,
            gathers: false,
        }
    }

    #[test]
    fn the_fastest_family_is_chosen_and_refusals_are_listed() {
        let (slow, fast, never) =
            (TestFamily("slow", Some(100)), TestFamily("fast", Some(900)), TestFamily("never", None));
        let (family, plan) = choose(&op(), &info(), &[&never, &slow, &fast]).expect("two serve it");
        assert_eq!((family.name(), plan.config.efficiency), ("fast", 900));
        let expected = info().launch_seconds + 8.0 * 64.0 * 6.0 / (info().bandwidth * 0.9);
        assert!((plan.estimate / expected - 1.0).abs() < 1e-9, "{plan:?}");
        let error = choose(&op(), &info(), &[&never]).expect_err("serves nothing").to_string();
        assert!(error.contains("rms norm of 8 x 64 from f32 to f16: never serves nothing"), "{error}");
    }
}

//! Kernel choice for `routing`.

use qgemm_hal::{CheckedRouting, DeviceInfo, Family, RoutingLaunches};

use crate::candidates::{Candidates, moving};
use crate::error::SchedError;

/// Picks the family and config for `op` on the device of
/// `info`. The least time for launches and bytes wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedRouting,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedRouting>],
) -> Result<(&'f dyn Family<CheckedRouting>, RoutingLaunches), SchedError> {
    let Candidates { offered, refusals } = candidates(op, info, families);
    let best = offered.into_iter().next().map(|best| (best.family, best.plan));
    best.ok_or_else(|| {
        let CheckedRouting { tokens, experts, top_k, .. } = op;
        let operation = format!("routing of {tokens} tokens to {top_k} of {experts} experts");
        SchedError::NoFamily { device: info.name.clone(), operation, refusals }
    })
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedRouting,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedRouting>],
) -> Candidates<'f, CheckedRouting> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, config.efficiency, config.launches);
            Some((RoutingLaunches { config, estimate: cost.seconds }, cost))
        },
    )
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{
        Dense, Device, HalError, KernelId, LaunchSequence, RoutingConfig, RoutingSource, RoutingSpec, RoutingStep,
        Scoring, Spec, Unsupported,
    };

    use super::*;
    use crate::gemm::tests::info;

    /// Launches, and the share of the bandwidth.
    #[derive(Debug)]
    struct TestFamily(&'static str, Option<(u32, u32)>);

    impl Family<CheckedRouting> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, op: &CheckedRouting, _: &DeviceInfo) -> Result<Vec<RoutingConfig>, Unsupported> {
            let (launches, efficiency) = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
            let spec = RoutingSpec { step: RoutingStep::TopK, experts: op.experts as u32 };
            let kernel = KernelId::new(self.0, None, Spec::Routing(spec));
            Ok(vec![RoutingConfig { kernel, launches, workspace_bytes: 0, efficiency }])
        }
        fn prepare(
            &self,
            device: &dyn Device,
            _: &CheckedRouting,
            _: &RoutingLaunches,
        ) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedRouting, _: &RoutingConfig) -> u64 {
            0
        }
    }

    fn op(tokens: usize) -> CheckedRouting {
        CheckedRouting {
            tokens,
            experts: 128,
            top_k: 8,
            from: RoutingSource::Logits(Dense::rows_of(DType::F32, 128)),
            scoring: Scoring::Softmax,
            renormalize: true,
            scale: 1.0,
            bias: false,
            groups: None,
            lists: true,
            shared: false,
        }
    }

    #[test]
    fn few_tokens_want_few_launches_and_many_want_bandwidth() {
        let (short, wide, never) =
            (TestFamily("short", Some((1, 10))), TestFamily("wide", Some((3, 900))), TestFamily("never", None));
        let chosen = |tokens| {
            let (family, launches) = choose(&op(tokens), &info(), &[&never, &short, &wide]).expect("two serve it");
            assert!(launches.estimate >= f64::from(launches.config.launches) * info().launch_seconds);
            family.name()
        };
        assert_eq!([chosen(1), chosen(1 << 20)], ["short", "wide"]);
        let error = choose(&op(7), &info(), &[&never]).expect_err("serves nothing").to_string();
        assert!(error.contains("routing of 7 tokens to 8 of 128 experts: never serves nothing"), "{error}");
    }
}

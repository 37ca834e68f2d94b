//! Kernel choice for memory-bound operations: conversions, norms,
//! quantization, routing, KV-cache append, optimizer steps.

use qgemm_hal::{DeviceInfo, Family, MemoryBound, Operation};

use crate::candidates::Candidates;
use crate::error::SchedError;
use crate::gemm::Cost;

/// Picks the family and config for `op` on the device of
/// `info`. The least time for launches and bytes wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f, O: MemoryBound>(
    op: &O,
    info: &DeviceInfo,
    families: &[&'f dyn Family<O>],
) -> Result<(&'f dyn Family<O>, O::Plan), SchedError> {
    candidates(op, info, families).best(op, info)
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f, O: MemoryBound>(op: &O, info: &DeviceInfo, families: &[&'f dyn Family<O>]) -> Candidates<'f, O> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = moving(op, info, O::efficiency(&config), O::launches(&config), O::chain_seconds(&config));
            [(O::plan(config, cost.seconds), cost)]
        },
    )
}

/// Cost of a memory-bound operation: `per_mille` of the
/// bandwidth or `chain` seconds of dependent steps, plus `launches`.
fn moving(op: &impl Operation, info: &DeviceInfo, per_mille: u32, launches: u32, chain: f64) -> Cost {
    let memory = op.traffic() / (info.bandwidth * (f64::from(per_mille.max(1)) / 1000.0));
    let launch = f64::from(launches) * info.launch_seconds;
    Cost::of_parts(memory, chain, launch, launch + memory.max(chain))
}

#[cfg(test)]
mod tests {
    use qgemm_formats::prepack::FragmentLayout;
    use qgemm_formats::{DType, XFormat};
    use qgemm_hal::{
        CheckedConvert, CheckedNorm, CheckedQuantize, CheckedRouting, CheckedUnpack, Dense, Device, HalError,
        LaunchSequence, NormFunction, RoutingSource, Scoring, Unsupported, XOverwrite,
    };

    use super::*;
    use crate::gemm::tests::info;

    /// A family with one config of so many launches and this share of
    /// the bandwidth, or none.
    #[derive(Debug)]
    struct TestFamily(&'static str, Option<(u32, u32)>);

    macro_rules! test_families {
        ($($op:ty: |$config:ident, $launches:pat_param| $set:block)*) => {
            $(impl Family<$op> for TestFamily {
                fn name(&self) -> &'static str {
                    self.0
                }

                fn configs(
                    &self,
                    op: &$op,
                    _: &DeviceInfo,
                ) -> Result<Vec<<$op as Operation>::Config>, Unsupported> {
                    let ($launches, efficiency) = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
                    let mut $config = op.noop_config()?;
                    $config.efficiency = efficiency;
                    $set
                    Ok(vec![$config])
                }

                fn prepare(
                    &self,
                    device: &dyn Device,
                    _: &$op,
                    _: &<$op as Operation>::Plan,
                ) -> Result<LaunchSequence, HalError> {
                    let what = "a family made for a test of the scheduler";
                    Err(HalError::WrongDevice { device: device.info().id, what })
                }

                fn source_hash(&self, _: &$op, _: &<$op as Operation>::Config) -> u64 {
                    0
                }
            })*
        };
    }

    test_families! {
        CheckedConvert: |config, _| {}
        CheckedNorm: |config, _| {}
        CheckedQuantize: |config, _| {}
        CheckedRouting: |config, launches| { config.launches = launches; }
    }

    /// Checks that the faster of two families is chosen, and that a
    /// refusal names the operation.
    fn check<O: MemoryBound>(op: &O, bytes: f64, refusal: &str)
    where
        TestFamily: Family<O>,
    {
        let family = |name, efficiency: Option<u32>| TestFamily(name, efficiency.map(|share| (1, share)));
        let (slow, fast, never) = (family("slow", Some(100)), family("fast", Some(900)), family("never", None));
        let (family, plan) = choose(op, &info(), &[&never, &slow, &fast]).expect("two serve it");
        assert_eq!((family.name(), O::efficiency(O::config(&plan))), ("fast", 900));
        let expected = info().launch_seconds + bytes / (info().bandwidth * 0.9);
        assert!((O::estimate(&plan) / expected - 1.0).abs() < 1e-9, "{plan:?}");
        let error = choose(op, &info(), &[&never]).expect_err("serves nothing").to_string();
        assert!(error.contains(&format!("{refusal}: never serves nothing")), "{error}");
    }

    #[test]
    fn the_fastest_conversion_is_chosen_and_refusals_are_listed() {
        let (x, d) = (Dense::rows_of(DType::F32, 64), Dense::rows_of(DType::F16, 64));
        let op = CheckedConvert { rows: 8, columns: 64, d_columns: 64, x, d, gathers: false, row_factors: false };
        check(&op, 8.0 * 64.0 * 6.0, "convert of 8 x 64 from f32 to f16");
    }

    #[test]
    fn the_fastest_norm_is_chosen_and_refusals_are_listed() {
        let (x, d) = (Dense::rows_of(DType::F32, 64), Dense::rows_of(DType::F16, 64));
        let op = CheckedNorm {
            rows: 8,
            columns: 64,
            d_columns: 64,
            function: NormFunction::rms(1e-6),
            x,
            d,
            quantized: None,
            added: None,
            x_overwrite: XOverwrite::Own,
            gathers: false,
            groups: 1,
            gate: None,
        };
        check(&op, 8.0 * 64.0 * 6.0, "norm of 8 x 64 (rms) from f32 to f16");
    }

    #[test]
    fn the_fastest_quantization_is_chosen_and_refusals_are_listed() {
        let format = XFormat::Q8_0;
        let parts = format.parts(false, None).expect("it has codes");
        let x = Dense::rows_of(DType::F16, 64);
        let op = CheckedQuantize { rows: 8, columns: 64, x, format, parts, codes_row: 64, scales_row: 8, sums_row: 0 };
        check(&op, 8.0 * (64.0 * 3.0 + 8.0), "quantize of 8 x 64 from f16 to q8_0");
    }

    #[test]
    fn a_long_chain_of_steps_outweighs_bytes() {
        let (x, d) = (Dense::rows_of(DType::F32, 64), Dense::rows_of(DType::F16, 64));
        let op = CheckedConvert { rows: 8, columns: 64, d_columns: 64, x, d, gathers: false, row_factors: false };
        let seconds = |chain| moving(&op, &info(), 1000, 2, chain).seconds - 2.0 * info().launch_seconds;
        assert!((seconds(0.5) - 0.5).abs() < 1e-9);
        assert_eq!(seconds(1e-12), seconds(0.0));
    }

    #[test]
    fn few_tokens_want_few_launches_and_many_want_bandwidth() {
        let op = |tokens| CheckedRouting {
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
            local: 0..128,
        };
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

//! Kernel choice for `attention`.

use qgemm_hal::{AttentionConfig, AttentionPlan, CheckedAttention, DeviceInfo, Family, Operation};

use crate::candidates::Candidates;
use crate::error::SchedError;
use crate::gemm::Cost;

/// Picks the family and config for `op` on the device
/// of `info`. The shortest expected time wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedAttention,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedAttention>],
) -> Result<(&'f dyn Family<CheckedAttention>, AttentionPlan), SchedError> {
    candidates(op, info, families).best(op, info)
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedAttention,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedAttention>],
) -> Candidates<'f, CheckedAttention> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = cost(op, info, &config);
            [(AttentionPlan { config, estimate: cost.seconds }, cost)]
        },
    )
}

/// Expected cost of `config`: launches, then the larger of
/// memory and arithmetic time.
fn cost(op: &CheckedAttention, info: &DeviceInfo, config: &AttentionConfig) -> Cost {
    let share = |per_mille: u32| f64::from(per_mille.max(1)) / 1000.0;
    let (of_bandwidth, of_rate) = config.efficiency;
    // Split-KV partial results are written once and read once.
    let partial = if config.parts > 1 { 2.0 * config.workspace_bytes as f64 } else { 0.0 };
    // So are dequantized keys and values.
    let dequantized = 2.0 * config.dequantized_bytes as f64;
    let moving = (op.traffic() + partial + dequantized) / (info.bandwidth * share(of_bandwidth));
    let multiplying = info.rate(config.math).map_or(0.0, |rate| op.macs() * config.padding / (rate * share(of_rate)));
    let launches = f64::from(config.launches) * info.launch_seconds;
    Cost::of_parts(moving, multiplying, launches, launches + moving.max(multiplying))
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{
        AttentionSpec, Device, HalError, HeadRows, KernelId, KvAddressing, KvFormat, KvFormats, KvRows, LaunchSequence,
        Math, QueryLengths, Spec, Unsupported,
    };

    use super::*;
    use crate::gemm::tests::info;

    /// Launches and both efficiencies, with matrix instructions
    /// on tiles of that many rows.
    #[derive(Debug)]
    struct TestFamily(&'static str, Option<(u32, Math, u32)>);

    impl Family<CheckedAttention> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, op: &CheckedAttention, _: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
            let (launches, math, rows) = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
            let spec = AttentionSpec::attend(op.kv, [128, 128], rows, 64);
            Ok(vec![AttentionConfig {
                kernel: KernelId::new(self.0, None, Spec::Attention(spec)),
                launches,
                parts: 1,
                part_keys: op.most_keys as u32,
                workspace_bytes: 0,
                dequantized_bytes: 0,
                math,
                padding: op.most_queries().next_multiple_of(rows as usize) as f64 / op.most_queries() as f64,
                efficiency: (900, 500),
            }])
        }
        fn prepare(
            &self,
            device: &dyn Device,
            _: &CheckedAttention,
            _: &AttentionPlan,
        ) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
            0
        }
    }

    fn op(queries: usize) -> CheckedAttention {
        let rows = HeadRows { token_stride: 4096, head_stride: 128, aligned: true };
        CheckedAttention {
            sequences: 1,
            tokens: queries,
            queries: QueryLengths::Each(queries),
            most_keys: 8192,
            places: KvAddressing::Pages { capacity: 8192, lengths: false },
            keys_ready: false,
            heads: 32,
            kv_heads: 32,
            qk_dim: 128,
            v_dim: 128,
            dtype: DType::F16,
            kv: KvFormats::both(KvFormat::Plain(DType::F16)),
            q: rows,
            k: KvRows { page_stride: 0, rows },
            v: KvRows { page_stride: 0, rows },
            d: rows,
            causal: true,
            window: None,
            mask: None,
            sinks: false,
            gate: None,
            scale: 0.1,
            soft_cap: None,
            lse: false,
            batch_invariant: false,
        }
    }

    #[test]
    fn one_query_wants_few_rows_and_many_want_matrix_instructions() {
        let (few, many, never) = (
            TestFamily("few", Some((1, Math::FmaF32, 1))),
            TestFamily("many", Some((2, Math::TensorF16, 64))),
            TestFamily("never", None),
        );
        let chosen = |queries| {
            let (family, plan) = choose(&op(queries), &info(), &[&never, &few, &many]).expect("two serve it");
            assert!(plan.estimate >= f64::from(plan.config.launches) * info().launch_seconds);
            family.name()
        };
        assert_eq!([chosen(1), chosen(2048)], ["few", "many"]);
        let error = choose(&op(7), &info(), &[&never]).expect_err("serves nothing").to_string();
        assert!(error.contains("attention of 7 tokens of "), "{error}");
    }
}

//! Kernel choice and split-K for `matmul`.

use qgemm_hal::{CheckedMatmul, DeviceInfo, Family, MatmulConfig, MatmulPlan, Operation, WorkspaceLayout};

use crate::candidates::Candidates;
use crate::error::SchedError;
use crate::gemm::{Cost, TunedTable, overlapping};

/// Minimum K of a split. Shorter parts do not pay for
/// writing and re-reading their partial sums.
const LEAST_PART: usize = 256;
/// Bytes of traffic for each partial sum: one
/// write and one read of f32.
const PARTIAL_BYTES: f64 = 8.0;
/// Share of the bandwidth that the launch before the kernel
/// reaches while it copies factors.
const COPY_SHARE: f64 = 0.7;
/// Multiply-adds per second assumed for a kernel whose
/// arithmetic rate is unknown.
const UNKNOWN_RATE: f64 = 1e10;

/// Picks the family, config and split-K for `op`
/// on the device of `info`.
///
/// A tuned measurement decides if one exists, otherwise the cost model.
/// The earlier candidate of equals wins.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedMatmul,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedMatmul>],
    tuned: &TunedTable,
) -> Result<(&'f dyn Family<CheckedMatmul>, MatmulPlan), SchedError> {
    candidates(op, info, families, tuned).best(op, info)
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedMatmul,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedMatmul>],
    tuned: &TunedTable,
) -> Candidates<'f, CheckedMatmul> {
    let all = Candidates::ask(families, |family| family.configs(op, info), |config| plans(op, info, config));
    all.measured(op, info, tuned)
}

/// Plans for each split-K that is worth considering. Splits are powers
/// of two, so that few kernels differ in their bits.
fn plans(op: &CheckedMatmul, info: &DeviceInfo, config: MatmulConfig) -> Vec<(MatmulPlan, Cost)> {
    let tiles = op.tiles(config.tile_m, config.tile_n);
    let most = config.max_splits.min(u32::try_from(op.k_of_product() / LEAST_PART).unwrap_or(u32::MAX)).max(1);
    let splits = (0..31).map(|power| 1u32 << power).take_while(|&splits| splits <= most);
    let plan = |splits: u32| {
        let tile_values = u64::from(config.tile_m) * u64::from(config.tile_n);
        let workspace = WorkspaceLayout::split(splits, tiles, tile_values)?;
        let (workspace, factors) = workspace.with_factors(config.factor_bytes)?;
        let cost = cost(op, info, &config, tiles, splits);
        Some((MatmulPlan { config, splits, workspace, factors, estimate: cost.seconds }, cost))
    };
    splits.filter_map(plan).collect()
}

/// Expected cost of `config`: whole waves of tiles, each bound by
/// a unit's multiply-adds or by memory.
fn cost(op: &CheckedMatmul, info: &DeviceInfo, config: &MatmulConfig, tiles: u64, splits: u32) -> Cost {
    let units = f64::from(info.units.max(1));
    let rate = info.rate(config.math).unwrap_or(UNKNOWN_RATE) * f64::from(config.efficiency.max(1)) / 1000.0;
    let at_once = units * f64::from(config.ctas_per_unit.max(1));
    let ctas = tiles as f64 * f64::from(splits);
    let k = (op.k_of_product() as f64 / f64::from(splits)).max(f64::from(config.tile_k));
    let of_cta = f64::from(config.tile_m) * f64::from(config.tile_n) * k;
    // CTAs on one unit share its rate. A unit with one
    // CTA less hides latency worse but is no slower at arithmetic.
    let resident = (ctas / units).ceil().min(f64::from(config.ctas_per_unit.max(1)));
    let arithmetic = (ctas / at_once).ceil().max(1.0) * of_cta * resident * units / rate;
    let partials = if splits > 1 { ctas * f64::from(config.tile_m) * f64::from(config.tile_n) } else { 0.0 };
    let memory = op.traffic() / info.bandwidth;
    // The last CTA of a tile reads the partial sums of
    // its peers after all products are done.
    let fixup = match splits {
        1 => 0.0,
        _ => info.launch_seconds * 0.5 + partials * PARTIAL_BYTES / info.bandwidth,
    };
    // A separate launch reads and writes the factors once.
    let prologue = match config.factor_bytes {
        0 => 0.0,
        bytes => info.launch_seconds + bytes as f64 * 2.0 / (info.bandwidth * COPY_SHARE),
    };
    // In memory-bound problems the smaller tile hides the latency better.
    let seconds = info.launch_seconds + prologue + overlapping(arithmetic, memory) + fixup;
    Cost { fixup, prologue, ..Cost::of_parts(memory, arithmetic, info.launch_seconds, seconds) }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::op::gemm::Activation;
    use qgemm_hal::{
        BatchedDense, Device, HalError, KernelId, LaunchSequence, Math, MatmulSpec, Name, Spec, Unsupported, XPrecision,
    };

    use super::*;
    use crate::gemm::tests::info;

    /// Tile edge, and the share of the rate.
    #[derive(Debug)]
    struct TestFamily(&'static str, Option<(u32, u32)>);

    impl Family<CheckedMatmul> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, op: &CheckedMatmul, _: &DeviceInfo) -> Result<Vec<MatmulConfig>, Unsupported> {
            let (edge, efficiency) = self.1.ok_or_else(|| Unsupported::new("serves nothing"))?;
            let (a, b, layout) = (op.a.dtype, op.b.dtype, op.layout());
            let spec = MatmulSpec { main_loop: Name::new("test"), a, b, layout, m: edge, n: edge, k: 32 };
            Ok(vec![MatmulConfig {
                kernel: KernelId::new(self.0, None, Spec::Matmul(spec)),
                math: Math::FmaF32,
                tile_m: edge,
                tile_n: edge,
                tile_k: 32,
                ctas_per_unit: 1,
                max_splits: 32,
                efficiency,
                factor_bytes: 0,
            }])
        }
        fn prepare(&self, device: &dyn Device, _: &CheckedMatmul, _: &MatmulPlan) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedMatmul, _: &MatmulConfig) -> u64 {
            0
        }
    }

    fn op(m: usize, n: usize, k: usize) -> CheckedMatmul {
        let dense = |columns: usize| BatchedDense {
            dtype: DType::F32,
            row_stride: columns as u64,
            col_stride: 1,
            batch_stride: 0,
            aligned16: true,
        };
        CheckedMatmul {
            batch: 1,
            m,
            n,
            k,
            a: dense(k).into(),
            b: dense(n).into(),
            a_scaled: false,
            b_scaled: false,
            a_scale_row: 0,
            b_scale_row: 0,
            d: dense(n),
            c: None,
            slope: false,
            k_grouped: false,
            rows_grouped: false,
            operand_precision: XPrecision::Exact,
            accumulates: false,
            bias: None,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
        }
    }

    #[test]
    fn what_was_measured_overrules_the_model_until_its_sources_change() {
        let (small, large) = (TestFamily("small", Some((32, 500))), TestFamily("large", Some((128, 900))));
        let families: [&dyn Family<CheckedMatmul>; 2] = [&small, &large];
        let (op, info) = (op(8192, 8192, 512), info());
        let all = candidates(&op, &info, &families, &TunedTable::new()).offered;
        assert_eq!(all[0].family.name(), "large");
        let slow = all.iter().rfind(|offer| offer.family.name() == "small").expect("it serves it");
        let hash = slow.family.source_hash(&op, &slow.plan.config);
        let mut table = TunedTable::new();
        assert!(table.record_other(&info, &op, &slow.plan, hash, 1e-9) && table.len() == 1);
        assert!(!table.record_other(&info, &op, &slow.plan, hash, 2e-9), "a faster one is known");
        let table = TunedTable::from_json(&table.to_json().expect("finite")).expect("as written");
        let first = &candidates(&op, &info, &families, &table).offered[0];
        assert_eq!((first.plan.splits, first.measured), (slow.plan.splits, Some(1e-9)));
        assert_eq!(choose(&op, &info, &families, &table).expect("served").0.name(), "small");
        let other = CheckedMatmul { m: 8191, ..op.clone() };
        assert_eq!(choose(&other, &info, &families, &table).expect("served").0.name(), "large");
        let mut outdated = TunedTable::new();
        outdated.record_other(&info, &op, &slow.plan, hash ^ 1, 1e-9);
        assert_eq!(choose(&op, &info, &families, &outdated).expect("served").0.name(), "large");
        assert_eq!((outdated.merge(table), outdated.len()), (1, 1));
        let mut avoid = TunedTable::new();
        avoid.avoid(crate::AvoidedKernel::new(all[0].plan.config.kernel, "a test says so"));
        let left = candidates(&op, &info, &families, &avoid);
        assert!(left.offered.iter().all(|offer| offer.family.name() == "small"));
        assert!(left.refusals[0].to_string().contains("a test says so"), "{:?}", left.refusals);
    }

    #[test]
    fn factors_that_a_launch_rewrites_have_room_and_cost_time() {
        let (op, info) = (op(512, 512, 512), info());
        let family = TestFamily("large", Some((128, 900)));
        let config = family.configs(&op, &info).expect("serves it")[0];
        let rewriting = MatmulConfig { factor_bytes: 1 << 20, ..config };
        for ((plain, of_plain), (plan, cost)) in plans(&op, &info, config).into_iter().zip(plans(&op, &info, rewriting))
        {
            assert!(plan.factors >= plain.workspace.bytes && plan.factors >= WorkspaceLayout::RESERVED, "{plan:?}");
            assert_eq!(plan.workspace.bytes, plan.factors + (1 << 20));
            assert!(cost.prologue > info.launch_seconds && of_plain.prologue == 0.0);
            assert!((plan.estimate - plain.estimate - cost.prologue).abs() < 1e-9, "{cost:?}");
        }
    }

    #[test]
    fn large_products_want_large_tiles_and_small_ones_are_cut() {
        let (small, large, never) =
            (TestFamily("small", Some((32, 500))), TestFamily("large", Some((128, 900))), TestFamily("never", None));
        let chosen = |op: &CheckedMatmul| {
            choose(op, &info(), &[&never, &small, &large], &TunedTable::new()).expect("two serve it")
        };
        let (family, plan) = chosen(&op(8192, 8192, 512));
        assert_eq!((family.name(), plan.splits, plan.workspace.bytes), ("large", 1, 0));
        let (family, plan) = chosen(&op(32, 32, 65536));
        assert_eq!(family.name(), "small");
        assert!(plan.splits > 1 && plan.workspace.bytes > WorkspaceLayout::RESERVED, "{plan:?}");
        // A product with K = 0 is not split.
        assert_eq!(chosen(&op(32, 32, 0)).1.splits, 1);
        let error =
            choose(&op(7, 8, 9), &info(), &[&never], &TunedTable::new()).expect_err("serves nothing").to_string();
        assert!(error.contains("matmul of 1 x 7 x 8 x 9, nn, f32 by f32: never serves nothing"), "{error}");
    }
}

//! Choice of family, config and K partition for GEMM.

use qgemm_hal::{CheckedGemm, DeviceInfo, Family, LaunchPlan};

use super::search::{Offer, Preferences, Search};
use super::tuned::TunedTable;
use crate::error::{Refusal, SchedError};

/// Picks the family, config and K split for `op`
/// on the device of `info`.
///
/// A tuned measurement decides if one exists, otherwise the
/// cost model. Ties go to the earlier family and config.
/// Kernels that round weights must be expected to be a
/// little faster than exact ones.
///
/// With `op.batch_invariant`, the family and config are those for
/// [`INVARIANT_M`](super::INVARIANT_M) tokens, chosen among families that support any M. K is
/// not split, because the workspace of a split grows with M.
/// The order of additions then does not depend on M.
///
/// # Errors
/// [`SchedError::UnknownFamily`], or [`SchedError::NoFamily`]
/// with the reason of every family.
pub fn choose<'f>(
    op: &CheckedGemm,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedGemm>],
    prefs: &Preferences,
    tuned: &TunedTable,
) -> Result<(&'f dyn Family<CheckedGemm>, LaunchPlan), SchedError> {
    let mut refusals = Vec::new();
    let mut best: Option<(&'f dyn Family<CheckedGemm>, Offer)> = None;
    for search in Search::all(op, info, prefs, tuned) {
        for family in search.wanted(families)? {
            match search.best_of(family) {
                Err(reason) => refusals.push(Refusal { family: family.name(), reason }),
                Ok(offer) if best.as_ref().is_none_or(|(_, b)| offer.is_better_than(b)) => best = Some((family, offer)),
                Ok(_) => {}
            }
        }
    }
    let (family, offer) = best.ok_or_else(|| no_family(op, info, refusals))?;
    tracing::debug!(kernel = op.kernel_name(family.name()), plan = ?offer.plan, tuned = offer.measured, "chosen");
    Ok((family, offer.plan))
}

/// All candidates that [`choose`] ranks for `op`, with their
/// expected cost; fastest first.
///
/// # Errors
/// As [`choose`].
pub fn candidates<'f>(
    op: &CheckedGemm,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedGemm>],
    prefs: &Preferences,
    tuned: &TunedTable,
) -> Result<Vec<(&'f dyn Family<CheckedGemm>, LaunchPlan)>, SchedError> {
    let mut refusals = Vec::new();
    let mut all = Vec::new();
    for search in Search::all(op, info, prefs, tuned) {
        for family in search.wanted(families)? {
            match search.configs_of(family) {
                Err(reason) => refusals.push(Refusal { family: family.name(), reason }),
                Ok(configs) => {
                    let offers = configs.iter().flat_map(|config| search.offers(config));
                    all.extend(offers.map(|offer| (family, offer)));
                }
            }
        }
    }
    if all.is_empty() {
        return Err(no_family(op, info, refusals));
    }
    all.sort_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds));
    Ok(all.into_iter().map(|(family, offer)| (family, offer.plan)).collect())
}

fn describe(op: &CheckedGemm) -> String {
    let CheckedGemm { m, stored_rows, k, format, x, d, class, .. } = op;
    let x = x.format;
    format!("{m} x {stored_rows} x {k} with {format} weights (layout {class:?}), {x} activations, {} output", d.dtype)
}

/// The error when every family refuses.
fn no_family(op: &CheckedGemm, info: &DeviceInfo, refusals: Vec<Refusal>) -> SchedError {
    SchedError::NoFamily { device: info.name.clone(), operation: describe(op), refusals }
}

#[cfg(test)]
pub(crate) mod tests {
    use qgemm_formats::prepack::FragmentLayout;
    use qgemm_formats::{DType, XFormat};
    use qgemm_hal::{
        Activation, Dense, Device, DeviceId, HalError, LaunchSequence, Math, Name, Schedule, TileConfig, Unsupported,
        XPrecision, XPrologue,
    };

    use super::super::partition::{Cut, Partition};
    use super::super::search::ranked;
    use super::*;

    /// A Q4_0 problem with f16 activations and output.
    pub(crate) fn op(m: usize, n: usize, k: usize) -> CheckedGemm {
        let dense = |columns| Dense { dtype: DType::F16, row_stride: columns as u64, col_stride: 1, aligned16: false };
        CheckedGemm {
            m,
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: k,
            format: "q4_0".parse().expect("a format"),
            class: FragmentLayout::MmaM16,
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            x: dense(k).into(),
            norm: None,
            x_precision: XPrecision::default(),
            d: dense(n),
            c: None,
            bias: None,
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        }
    }

    /// An H200, approximately.
    pub(crate) fn info() -> DeviceInfo {
        DeviceInfo {
            id: DeviceId::CPU,
            name: "test GPU".into(),
            arch: "sm_90".into(),
            variant: None,
            driver: "1.0".into(),
            units: 132,
            memory_bytes: 0,
            bandwidth: 4e12,
            cache_bytes: 0,
            shared_bytes: 0,
            max_buffer_bytes: 0,
            rates: vec![(Math::TensorF16, 4e14), (Math::FmaF32, 3e13)],
            launch_seconds: 2e-6,
            features: Default::default(),
        }
    }

    pub(crate) fn config(family: &'static str) -> TileConfig {
        TileConfig {
            family,
            main_loop: Name::new("main_loop"),
            variant: None,
            math: Math::TensorF16,
            tile_n: 64,
            tile_m: 16,
            tile_k: 64,
            threads: 128,
            ctas_per_unit: 2,
            cluster: 1,
            schedule: Schedule::Grid,
            max_splits: 1,
            warps_n: 4,
            k_groups: 1,
            stages: 3,
            shared_bytes: 0,
            x_format: XFormat::Plain(DType::F16),
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (700, 900),
        }
    }

    #[derive(Debug)]
    struct TestFamily {
        name: &'static str,
        max_m: usize,
        configs: Vec<TileConfig>,
    }

    impl Family<CheckedGemm> for TestFamily {
        fn name(&self) -> &'static str {
            self.name
        }
        fn configs(&self, op: &CheckedGemm, _: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
            if op.m > self.max_m {
                return Err(Unsupported::new(format!("serves at most {} tokens", self.max_m)));
            }
            Ok(self.configs.clone())
        }
        fn prepare(&self, device: &dyn Device, _: &CheckedGemm, _: &LaunchPlan) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
            SOURCES
        }
    }

    /// Source hash of the test families.
    const SOURCES: u64 = 7;

    fn gemv() -> TestFamily {
        let config = TileConfig { tile_m: 2, tile_n: 16, math: Math::FmaF32, ..config("gemv") };
        TestFamily { name: "gemv", max_m: 2, configs: vec![config] }
    }

    fn gemm() -> TestFamily {
        let small = TileConfig { max_splits: 8, efficiency: (350, 900), ..config("gemm") };
        let large = TileConfig { tile_m: 128, tile_n: 128, max_splits: 8, ..config("gemm") };
        TestFamily { name: "gemm", max_m: usize::MAX, configs: vec![small, large] }
    }

    fn pick(op: &CheckedGemm, prefs: &Preferences, tuned: &TunedTable) -> Result<LaunchPlan, SchedError> {
        let (gemv, gemm) = (gemv(), gemm());
        choose(op, &info(), &[&gemv, &gemm], prefs, tuned).map(|(family, plan)| {
            assert_eq!(family.name(), plan.config.family);
            plan
        })
    }

    fn pick_freely(op: &CheckedGemm) -> LaunchPlan {
        pick(op, &Preferences::default(), &TunedTable::new()).expect("gemm serves everything")
    }

    #[test]
    fn small_and_large_problems_get_different_configurations() {
        assert_eq!(pick_freely(&op(1, 28672, 8192)).config.family, "gemv");
        assert_eq!(pick_freely(&op(8, 28672, 8192)).config.tile_m, 16);
        assert_eq!(pick_freely(&op(4096, 28672, 8192)).config.tile_m, 128);
    }

    #[test]
    fn weights_are_rounded_only_where_that_is_worth_it() {
        let exact = config("gemm");
        let rounds = |(arithmetic, bandwidth): (u32, u32)| {
            let efficiency = (exact.efficiency.0 + arithmetic, exact.efficiency.1 + bandwidth);
            let rounding = TileConfig { rounded_weights: Some(DType::BF16), efficiency, ..exact };
            let family = TestFamily { name: "gemm", max_m: usize::MAX, configs: vec![rounding, exact] };
            let chosen = choose(&op(512, 4096, 4096), &info(), &[&family], &Preferences::default(), &TunedTable::new());
            chosen.expect("serves everything").1.config.rounded_weights.is_some()
        };
        assert!(!rounds((0, 0)), "as fast, and named first");
        assert!(!rounds((20, 20)), "3 % faster");
        assert!(rounds((200, 90)), "a quarter faster");
    }

    #[test]
    fn a_narrow_problem_is_split_and_a_limit_prevents_it() {
        let narrow = op(16, 512, 16384);
        let plan = pick_freely(&narrow);
        assert!(plan.splits > 1 && plan.workspace.bytes > 0, "{plan:?}");
        assert_eq!(plan.grid, [plan.n_tiles, plan.m_tiles, plan.splits]);
        let none = Preferences { max_workspace: Some(0), ..Default::default() };
        assert_eq!(pick(&narrow, &none, &TunedTable::new()).expect("unsplit").workspace.bytes, 0);
        let some = Preferences { max_workspace: Some(plan.workspace.bytes - 1), ..Default::default() };
        let within = pick(&narrow, &some, &TunedTable::new()).expect("fewer splits");
        assert!(within.workspace.bytes < plan.workspace.bytes);
    }

    #[test]
    fn a_family_can_be_asked_for_and_refusals_are_listed() {
        let gemv = Preferences { family: Some("gemv".into()), ..Default::default() };
        assert_eq!(pick(&op(2, 64, 64), &gemv, &TunedTable::new()).expect("serves 2").config.family, "gemv");
        let error = pick(&op(3, 64, 64), &gemv, &TunedTable::new()).expect_err("serves 2");
        assert!(error.to_string().ends_with(": gemv serves at most 2 tokens"), "{error}");
        let unknown = Preferences { family: Some("mmq".into()), ..Default::default() };
        let error = pick(&op(3, 64, 64), &unknown, &TunedTable::new()).expect_err("unknown");
        assert!(matches!(error, SchedError::UnknownFamily { known, .. } if known == ["gemv", "gemm"]));
    }

    #[test]
    fn an_absent_arithmetic_is_a_refusal() {
        let config = TileConfig { math: Math::DotI8, ..config("mmq") };
        let mmq = TestFamily { name: "mmq", max_m: usize::MAX, configs: vec![config] };
        let error = choose(&op(1, 64, 64), &info(), &[&mmq], &Preferences::default(), &TunedTable::new());
        assert!(matches!(error, Err(SchedError::NoFamily { refusals, .. }) if refusals.len() == 1));
    }

    #[test]
    fn batch_invariant_plans_share_family_configuration_and_k_partition() {
        for (n, k) in [(512, 16384), (28672, 8192), (64, 64)] {
            let invariant = |m| CheckedGemm { batch_invariant: true, ..op(m, n, k) };
            let first = pick_freely(&invariant(1));
            for m in [2, 3, 64, 65, 5000] {
                let plan = pick_freely(&invariant(m));
                assert_eq!((plan.config, plan.splits, plan.k_tiles), (first.config, 1, first.k_tiles));
                assert_eq!(plan.m_tiles as usize, m.div_ceil(plan.config.tile_m as usize));
            }
        }
        let gemv = Preferences { family: Some("gemv".into()), ..Default::default() };
        let invariant = CheckedGemm { batch_invariant: true, ..op(1, 64, 64) };
        assert!(pick(&invariant, &gemv, &TunedTable::new()).is_err());
    }

    /// One token of X has contiguous columns in either
    /// orientation; two tokens do not.
    #[test]
    fn a_transposed_token_is_planned_as_its_batch() {
        let transposed = |m: usize, k| {
            let mut op = CheckedGemm { batch_invariant: true, ..op(m, 64, k) };
            (op.x.row_stride, op.x.col_stride) = (1, m as u64);
            ranked(&op)
        };
        assert_eq!(transposed(1, 4096), transposed(64, 4096));
        assert_eq!(transposed(1, 1), transposed(2, 1));
        let stored_by_rows = ranked(&CheckedGemm { batch_invariant: true, ..op(1, 64, 4096) });
        assert_eq!(stored_by_rows.x.col_stride, 1);
    }

    #[test]
    fn converted_activations_need_room_and_no_limit_where_the_batch_must_not_matter() {
        let direct = TileConfig { efficiency: (10, 100), ..config("gemm") };
        let prologue = XPrologue::Convert { row_factors: true };
        let family = TestFamily {
            name: "gemm",
            max_m: usize::MAX,
            configs: vec![direct, TileConfig { x_prologue: Some(prologue), ..config("gemm") }],
        };
        let converts_with = |op: &CheckedGemm, max_workspace| {
            let prefs = Preferences { max_workspace, ..Default::default() };
            let (_, plan) = choose(op, &info(), &[&family], &prefs, &TunedTable::new()).expect("serves everything");
            assert!(plan.workspace.bytes <= max_workspace.unwrap_or(usize::MAX));
            plan.config.x_prologue.is_some()
        };
        let plain = op(512, 4096, 4096);
        assert!(converts_with(&plain, None) && converts_with(&plain, Some(1 << 23)));
        assert!(!converts_with(&plain, Some(1 << 22)));
        for m in [1, 512] {
            let invariant = CheckedGemm { batch_invariant: true, ..op(m, 4096, 4096) };
            assert!(converts_with(&invariant, None) && !converts_with(&invariant, Some(1 << 23)));
        }
    }

    #[test]
    fn a_measurement_overrules_the_model_while_its_configuration_exists() {
        let problem = op(512, 28672, 8192);
        let [small, _] = gemm().configs[..] else { unreachable!("two configurations") };
        let measured = |config: TileConfig, parts: u32, seconds: f64, table: &mut TunedTable| {
            let plan = Partition::new(&problem, &config, Cut::Parts(parts), 264).expect("small").plan(0.0);
            table.record(&info(), &problem, &plan, SOURCES, seconds)
        };
        let mut tuned = TunedTable::new();
        assert!(measured(small, 2, 1e-3, &mut tuned));
        assert!(!measured(small, 3, 2e-3, &mut tuned));
        let plan = pick(&problem, &Preferences::default(), &tuned).expect("serves it");
        assert_eq!((plan.config, plan.splits, plan.estimate, tuned.len()), (small, 2, 1e-3, 1));
        let other_shape = pick(&op(512, 28672, 4096), &Preferences::default(), &tuned).expect("serves it");
        assert_eq!(other_shape.config.tile_m, 128);

        let mut stale = TunedTable::new();
        let gone = TileConfig { tile_m: 24, ..small };
        assert!(measured(gone, 1, 1e-9, &mut stale));
        assert_eq!(pick(&problem, &Preferences::default(), &stale).expect("serves it").config.tile_m, 128);

        let mut of_other_sources = TunedTable::new();
        let plan = Partition::new(&problem, &small, Cut::Parts(2), 264).expect("small").plan(0.0);
        assert!(of_other_sources.record(&info(), &problem, &plan, SOURCES + 1, 1e-9));
        assert_eq!(pick(&problem, &Preferences::default(), &of_other_sources).expect("serves it").config.tile_m, 128);
    }
}

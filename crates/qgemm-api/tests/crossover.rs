//! Crossovers between CUDA configs over M, by the cost model of an
//! H200. No call may be slower than one with more tokens.
//! One more token may cost at most one tile of tokens.
#![cfg(feature = "cuda")]

use qgemm_api::{Context, DType, Format, FragmentLayout, Problem, quantize};
use qgemm_hal::{CheckedGemm, Dense, DeviceId, DeviceInfo, DeviceKind, LaunchPlan, Math, Variant, XOperand};
use qgemm_sched::gemm::choose;
use qgemm_sched::{Preferences, TunedTable};

const MOST: usize = 256;
const SHAPES: [(usize, usize); 5] = [(14336, 4096), (4096, 14336), (28672, 8192), (4096, 4096), (1024, 4096)];
const FORMATS: [&str; 6] = ["q4_0", "q4_k", "q6_k", "q8_0", "int4_g128", "fp8_e4m3"];

/// Share of time that a plan gives up for exact weights
/// (`EXACTNESS` of the scheduler).
const TOLERANCE: f64 = 0.05;

/// H200, as the backend describes it.
fn h200() -> DeviceInfo {
    let rate = |per_clock: f64| per_clock * 132.0 * 1.98e9;
    DeviceInfo {
        id: DeviceId { kind: DeviceKind::Cuda, ordinal: 0 },
        name: "NVIDIA H200".into(),
        arch: "sm_90".into(),
        variant: Some(Variant::Sm90),
        driver: String::new(),
        units: 132,
        memory_bytes: 141 << 30,
        bandwidth: 4.47e12,
        cache_bytes: 60 << 20,
        shared_bytes: 227 << 10,
        max_buffer_bytes: 141 << 30,
        rates: vec![(Math::FmaF32, rate(128.0)), (Math::TensorF16, rate(2048.0)), (Math::DotI8, rate(256.0))],
        launch_seconds: 3e-6,
        features: Default::default(),
    }
}

/// `X[1, 256] · W[16, 256]ᵀ` in f16, to be enlarged.
fn small(format: &str) -> CheckedGemm {
    let ctx = Context::open("noop").expect("always there");
    let format: Format = format.parse().expect("a format");
    let (weight, _) = quantize(&[0.5; 16 * 256], 16, 256, format).expect("K suits");
    let weight = ctx.load(&weight).expect("memory");
    ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16)).expect("valid").op().clone()
}

/// Same operation at another shape, on a GPU.
fn op(small: &CheckedGemm, m: usize, n: usize, k: usize) -> CheckedGemm {
    let x = XOperand { row_stride: k as u64, ..small.x };
    let d = Dense { row_stride: n as u64, ..small.d };
    CheckedGemm {
        m,
        stored_rows: n,
        out_features: n,
        k,
        stored_k: k,
        class: FragmentLayout::MmaM16,
        x,
        d,
        ..small.clone()
    }
}

/// Plans for 1 to `MOST` tokens.
fn plans(n: usize, k: usize, format: &str) -> Vec<LaunchPlan> {
    let (info, prefs, tuned) = (h200(), Preferences::default(), TunedTable::new());
    let small = small(format);
    let plan = |m| choose(&op(&small, m, n, k), &info, qgemm_cuda::CATALOG.gemm, &prefs, &tuned).expect("served").1;
    (1..=MOST).map(plan).collect()
}

/// Short description of a plan.
fn describe(plan: &LaunchPlan) -> String {
    let LaunchPlan { config, grid, splits, stream_k, estimate, .. } = plan;
    let cut = stream_k.map_or(0, |cut| cut.cut_tiles);
    format!("{:.2} us {} {}x{} {grid:?} /{splits} {cut}", estimate * 1e6, config.family, config.tile_n, config.tile_m)
}

/// Checks the plans of every shape and format. `wrong` describes
/// a mistake at some number of tokens.
fn check(wrong: impl Fn(&[LaunchPlan], usize) -> Option<String>) {
    let mut findings = Vec::new();
    for (n, k) in SHAPES {
        for format in FORMATS {
            let plans = plans(n, k, format);
            let finding = |i| wrong(&plans, i).map(|what| format!("{format} {n}x{k}, {} tokens: {what}", i + 1));
            findings.extend((0..MOST).filter_map(finding));
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn no_call_is_slower_than_one_with_more_tokens() {
    check(|plans, i| {
        let here = &plans[i];
        let fastest = plans[i + 1..].iter().min_by(|a, b| a.estimate.total_cmp(&b.estimate))?;
        (here.estimate > fastest.estimate * (1.0 + TOLERANCE))
            .then(|| format!("{}, with more {}", describe(here), describe(fastest)))
    });
}

/// The cost is at most that of as many tokens as a
/// tile of either plan.
#[test]
fn one_token_more_costs_at_most_a_tile() {
    check(|plans, i| {
        let (before, here) = (&plans[i], plans.get(i + 1)?);
        let tile = plans[before.config.tile_m.max(here.config.tile_m) as usize - 1].estimate;
        let step = here.estimate - before.estimate;
        (step > tile * (1.0 + TOLERANCE))
            .then(|| format!("{:.2} us more: {}, then {}", step * 1e6, describe(before), describe(here)))
    });
}

//! Regression tests of random cases that once failed
//! (`docs/numerics.md`, "What random cases found").

use qgemm_api::{Context, DType, XPrecision, quantize};
use qgemm_testkit::{ActivationKind, Case, Epilogue, Failure, Layout, TestCase, Verdict, WeightKind, skipped};

const DEVICES: [&str; 4] = ["cpu", "wgpu:0", "cuda:0", "emu:sm80"];

fn case(format: &str, m: usize, n: usize, k: usize) -> Case {
    Case::new(format.parse().expect("a format"), m, n, k)
}

/// Runs `cases` on every available device.
fn all_pass(test: &str, cases: &[Case]) {
    for device in DEVICES {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(why) => {
                skipped(test, &why.to_string());
                continue;
            }
        };
        for case in cases {
            let outcome = case.run(&ctx);
            assert_eq!(outcome.verdict, Verdict::Pass, "{device}: {case}");
        }
    }
}

#[test]
fn a_transposed_token_alone_has_the_bits_of_its_batch() {
    let layout = Layout { x_transposed: true, ..Layout::default() };
    let of = |case: Case, seed| Case {
        layout,
        batch_invariant: true,
        weights: WeightKind::Raw,
        activations: ActivationKind::Outliers,
        seed,
        ..case
    };
    let cases: Vec<Case> =
        (1..3).flat_map(|seed| [of(case("q6_k", 62, 286, 256), seed), of(case("int8_g64", 2, 27, 17), seed)]).collect();
    all_pass("a_transposed_token_alone_has_the_bits_of_its_batch", &cases);
}

#[test]
fn a_transposed_weight_has_no_channel_scale_to_be_folded_in() {
    let plain = Case {
        x_dtype: DType::BF16,
        weights: WeightKind::TinyScales,
        epilogue: Epilogue { alpha: 3.0, ..Epilogue::default() },
        layout: Layout { w_transposed: true, ..Layout::default() },
        ..case("f16", 4, 48, 261)
    };
    let huge = Case { weights: WeightKind::HugeScales, ..plain };
    all_pass("a_transposed_weight_has_no_channel_scale_to_be_folded_in", &[plain, huge]);
    let scaled = Case { epilogue: Epilogue { channel_scale: true, ..plain.epilogue }, ..plain };
    let outcome = scaled.run(&Context::open("cpu").expect("always there"));
    assert!(matches!(outcome.verdict, Verdict::Fail(Failure::Weight(_))), "{:?}", outcome.verdict);
    // The same scale of a row-major weight acts on sums.
    let by_rows = Case { layout: Layout::default(), ..scaled };
    all_pass("a_transposed_weight_has_no_channel_scale_to_be_folded_in", &[by_rows]);
}

#[test]
fn subnormal_rows_and_narrow_results_are_judged_by_their_range() {
    let subnormal = Case { activations: ActivationKind::Denormals, ..case("f32", 5, 7, 1) };
    let narrow = Case { d_dtype: DType::F16, weights: WeightKind::HugeScales, ..case("q4_0", 9, 33, 64) };
    all_pass("subnormal_rows_and_narrow_results_are_judged_by_their_range", &[subnormal, narrow]);
}

#[test]
fn outliers_with_huge_scales_keep_the_limit() {
    let of = |format, seed| Case {
        weights: WeightKind::HugeScales,
        activations: ActivationKind::Outliers,
        seed,
        ..case(format, 17, 40, 512)
    };
    let cases: Vec<Case> = ["q4_k", "q6_k", "int4_g32"].into_iter().flat_map(|f| [of(f, 1), of(f, 2)]).collect();
    all_pass("outliers_with_huge_scales_keep_the_limit", &cases);
}

/// The last tile has one element, which is judged as one of few.
#[test]
fn a_tile_of_one_element_is_judged_as_one_of_few() {
    let of = |m, seed| Case { x_dtype: DType::BF16, seed, ..case("q5_1", m, 257, 512) };
    all_pass("a_tile_of_one_element_is_judged_as_one_of_few", &[of(33, 1), of(33, 2)]);
    let ctx = Context::open("cpu").expect("always there");
    assert_eq!(of(4097, 1).run(&ctx).verdict, Verdict::Pass);
}

/// X up to 2¹²⁸ / (K · largest code) in
/// magnitude, with every kernel.
#[test]
fn large_activations_within_the_documented_bound_stay_finite() {
    const K: usize = 64;
    let largest = 2f64.powi(128) / (K as f64 * 127.0);
    let x: Vec<f32> = (0..K).map(|i| (largest * 0.99 * if i % 3 == 0 { -1.0 } else { 1.0 }) as f32).collect();
    let values: Vec<f32> = (0..16 * K).map(|i| (i % 29) as f32 / 1e4).collect();
    for device in DEVICES {
        let Ok(ctx) = Context::open(device) else {
            skipped("large_activations_within_the_documented_bound_stay_finite", device);
            continue;
        };
        for format in ["q8_0", "q4_0", "f16"] {
            let (host, _) = quantize(&values, 16, K, format.parse().expect("a format")).expect("K suits");
            let weight = ctx.load(&host).expect("memory");
            for (m, precision) in [(1, XPrecision::Exact), (3, XPrecision::Auto)] {
                let got = ctx.linear(&weight, &x.repeat(m), m, precision).expect("valid");
                for (row, &got) in got[..16].iter().enumerate() {
                    let w = host.dequantize_row(row);
                    let expected: f64 = w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    let size: f64 = w.iter().zip(&x).map(|(&w, &x)| f64::from(w * x).abs()).sum();
                    assert!(
                        (f64::from(got) - expected).abs() < 0.02 * size,
                        "{device} {format} M={m}: {got} {expected}"
                    );
                }
            }
        }
    }
}

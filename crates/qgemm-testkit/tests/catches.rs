//! Comparison tests: it must find the mistakes that kernels make.
//! Each test breaks a correct result in one way. The matrix is so large
//! that one global average would hide the damage.

use qgemm_api::Context;
use qgemm_formats::{DType, Format, HostWeight};
use qgemm_hal::Math;
use qgemm_testkit::{
    ActivationKind, Added, Case, Comparison, ConvertCase, Expected, Failure, MatmulCase, PATHS, QuantizeCase,
    RoutingCase, TILE, Tolerance, Verdict, WeightKind, activations, compare, first_difference, multiply, path, run,
    run_conversion, run_matmul, run_quantize, run_routing, weight,
};

const M: usize = 256;
const N: usize = 512;
const K: usize = 256;

fn q4_k() -> Format {
    "q4_k".parse().expect("a format")
}

fn subject() -> (HostWeight, Vec<f32>, Expected) {
    let weight = weight(WeightKind::Raw, q4_k(), N, K, None, 5).expect("valid");
    let x = activations(ActivationKind::Normal, M, K, DType::F16, 5);
    let expected = multiply(&weight, &x, &Added::default());
    (weight, x, expected)
}

/// Widest limit for f32 outputs.
fn limit() -> Tolerance {
    Tolerance::relative(PATHS.iter().map(|p| p.nmse).fold(0.0, f64::max))
}

fn check(got: &[f32], expected: &Expected) -> Comparison {
    compare(got, expected, limit())
}

/// One column of these outputs, without other values that
/// errors could be relative to.
fn of_values(values: Vec<f64>) -> Expected {
    let (m, zeros) = (values.len(), vec![0.0; values.len()]);
    Expected { m, n: 1, values, energy: zeros.clone(), floor: zeros }
}

fn correct(expected: &Expected) -> Vec<f32> {
    expected.values.iter().map(|&v| v as f32).collect()
}

#[test]
fn a_correct_result_passes() {
    let (_, _, expected) = subject();
    let comparison = check(&correct(&expected), &expected);
    assert!(comparison.within(Tolerance::relative(1e-12)), "{comparison:?}");
    assert_eq!(comparison.first_bad, None);
}

#[test]
fn a_zeroed_tile_is_found_and_named() {
    let (_, _, expected) = subject();
    let mut got = correct(&expected);
    for row in 64..64 + TILE {
        got[row * N + 96..row * N + 96 + TILE].fill(0.0);
    }
    let comparison = check(&got, &expected);
    assert!(!comparison.within(limit()));
    assert_eq!(comparison.worst_tile_at, (64, 96));
    assert!(comparison.worst_tile > 0.1 && comparison.nmse < 0.02, "{comparison:?}");
    let bad = comparison.first_bad.expect("an element is named");
    assert_eq!((bad.row, bad.column), (64, 96));
}

#[test]
fn a_transposed_pair_is_found() {
    let (_, _, expected) = subject();
    let mut got = correct(&expected);
    got.swap(10 * N + 11, 11 * N + 10);
    let comparison = check(&got, &expected);
    assert!(!comparison.within(limit()), "{comparison:?}");
    assert_eq!(comparison.worst_tile_at, (0, 0));
    assert_eq!(comparison.first_bad.map(|b| (b.row, b.column)), Some((10, 11)));
}

#[test]
fn one_wrong_scale_is_found() {
    let (weight, x, expected) = subject();
    // One sub-block scale in one of 512 rows, wrong in its lowest bit.
    let row = 300;
    let mut blocks = weight.blocks().to_vec();
    blocks[weight.format().row_offset(row, K) + 4] ^= 1;
    let wrong = HostWeight::new(weight.format(), N, K, blocks.into()).expect("valid");
    let got = correct(&multiply(&wrong, &x, &Added::default()));
    let comparison = check(&got, &expected);
    assert!(!comparison.within(limit()), "{comparison:?}");
    assert_eq!(comparison.worst_tile_at.1, row / TILE * TILE);
    assert_eq!(comparison.first_bad.map(|b| b.column), Some(row));
}

#[test]
fn a_nan_is_found_wherever_it_is() {
    let (_, _, expected) = subject();
    for at in [0, 77 * N + 5, M * N - 1] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut got = correct(&expected);
            got[at] = value;
            let comparison = check(&got, &expected);
            assert!(!comparison.within(limit()), "{value} at {at}");
            assert_eq!(comparison.first_bad.map(|b| (b.row, b.column)), Some((at / N, at % N)));
        }
    }
}

#[test]
fn activations_rounded_in_secret_are_found() {
    let weight = weight(WeightKind::Raw, q4_k(), 64, K, None, 5).expect("valid");
    let x = activations(ActivationKind::Normal, 8, K, DType::F32, 5);
    let rounded = DType::F16.decode(&DType::F16.encode(&x));
    let got = correct(&multiply(&weight, &rounded, &Added::default()));
    let expected = multiply(&weight, &x, &Added::default());
    let f32_limit = path(Math::FmaF32).expect("a path in f32").tolerance(None, DType::F32);
    assert!(!compare(&got, &expected, f32_limit).within(f32_limit));
}

#[test]
fn a_small_row_that_a_large_one_outweighs_is_found() {
    let (_, x, _) = subject();
    let weight = weight(WeightKind::Raw, q4_k(), 64, K, None, 5).expect("valid");
    let mut x = x[..8 * K].to_vec();
    x[..K].iter_mut().for_each(|v| *v *= 1e-20);
    let expected = multiply(&weight, &x, &Added::default());
    let mut got = correct(&expected);
    assert!(check(&got, &expected).within(limit()));
    got[..64].fill(0.0);
    let comparison = check(&got, &expected);
    assert!(!comparison.within(limit()) && comparison.worst_tile <= limit().nmse, "{comparison:?}");
    assert_eq!(comparison.worst_row_at, 0);
}

#[test]
fn what_is_not_finite_must_not_be_and_hides_nothing_else() {
    let values = of_values(vec![f64::NAN, f64::INFINITY, 1.0, 2.0]);
    // Infinite activations: which infinity, or whether NaN, depends on the order of the sum.
    let expected = Expected { m: 2, n: 2, energy: vec![f64::INFINITY, f64::INFINITY, 1.0, 4.0], ..values };
    assert!(check(&[f32::NEG_INFINITY, f32::NAN, 1.0, 2.0], &expected).within(limit()));
    for wrong in [[0.0, f32::NAN, 1.0, 2.0], [f32::NAN, f32::NAN, 1.1, 2.0], [f32::NAN, f32::NAN, 1.0, f32::NAN]] {
        assert!(!check(&wrong, &expected).within(limit()), "{wrong:?}");
    }
    // With finite activations, only a NaN weight gives NaN, in any order.
    let of_weight = Expected { energy: vec![1.0; 4], ..expected };
    assert!(check(&[f32::NAN, f32::INFINITY, 1.0, 2.0], &of_weight).within(limit()));
    assert!(!check(&[f32::NEG_INFINITY, f32::INFINITY, 1.0, 2.0], &of_weight).within(limit()));
}

#[test]
fn minima_rounded_apart_from_their_scales_are_found() {
    // Affine trap: if activations have a mean, rounding scale·code and min to
    // bf16 separately is far off.
    let weight = weight(WeightKind::Quantized, q4_k(), 64, K, None, 5).expect("valid");
    let x = activations(ActivationKind::PositiveMean, 8, K, DType::BF16, 5);
    let round = |v: Vec<f32>| DType::BF16.decode(&DType::BF16.encode(&v));
    let format: Format = "f32".parse().expect("a format");
    let rounded: Vec<f32> = (0..64).flat_map(|row| round(weight.dequantize_row(row))).collect();
    let rounded = HostWeight::new(format, 64, K, DType::F32.encode(&rounded).into()).expect("valid");
    let got = correct(&multiply(&rounded, &x, &Added::default()));
    let expected = multiply(&weight, &x, &Added::default());
    assert!(!compare(&got, &expected, limit()).within(limit()));
}

#[test]
fn cancellation_in_a_corner_tile_is_not_a_mistake() {
    // 1 x 1 output with two summands that nearly cancel: the error is
    // relative to the summands.
    let expected = Expected { energy: vec![2.0], ..of_values(vec![1e-7]) };
    assert!(check(&[2e-7], &expected).within(limit()));
    assert!(!check(&[1e-2], &expected).within(limit()));
}

#[test]
fn a_backend_that_computes_nothing_fails() {
    let ctx = Context::open("noop").expect("always there");
    for case in [Case::new(q4_k(), 3, 33, K), Case { batch_invariant: true, ..Case::new(q4_k(), 9, 5, K) }] {
        let outcome = run(&ctx, &case);
        assert!(matches!(outcome.verdict, Verdict::Fail(Failure::Inaccurate(_))), "{case}: {:?}", outcome.verdict);
    }
}

#[test]
fn a_backend_that_converts_nothing_fails() {
    let ctx = Context::open("noop").expect("always there");
    let outcome = run_conversion(&ctx, &ConvertCase::new(2, 9, DType::F32, DType::BF16));
    let Verdict::Fail(Failure::WrongBits(wrong)) = outcome.verdict else { panic!("{:?}", outcome.verdict) };
    // An unwritten output is poison.
    assert_eq!((wrong.operand, wrong.row, wrong.column, wrong.got), ("D", 0, 0, 0xffff));
}

#[test]
fn a_backend_that_routes_nothing_fails() {
    let ctx = Context::open("noop").expect("always there");
    // An unwritten output is poison: -1 as i32, NaN as a
    // weight, and an empty list.
    for (case, what) in
        [(RoutingCase::new(3, 8, 2), "expected 2 to 2 experts, got 0"), (RoutingCase::of_ids(3, 8, 2), "status")]
    {
        let outcome = run_routing(&ctx, &case);
        let Verdict::Fail(Failure::Misrouted(why)) = outcome.verdict else { panic!("{:?}", outcome.verdict) };
        assert!(why.contains(what), "{why}");
    }
}

#[test]
fn a_backend_that_multiplies_nothing_fails() {
    let ctx = Context::open("noop").expect("always there");
    // An unwritten output is poison; an accumulated one has its old value.
    for case in [MatmulCase::new([3, 4, 5]), MatmulCase { accumulate: Some(1.0), ..MatmulCase::new([3, 4, 5]) }] {
        let outcome = run_matmul(&ctx, &case);
        assert!(matches!(outcome.verdict, Verdict::Fail(Failure::Inaccurate(_))), "{:?}", outcome.verdict);
    }
}

#[test]
fn codes_that_were_not_written_are_found() {
    let ctx = Context::open("noop").expect("always there");
    for format in QuantizeCase::formats() {
        let outcome = run_quantize(&ctx, &QuantizeCase::new(3, 40, DType::F16, format));
        let Verdict::Fail(Failure::WrongBits(wrong)) = outcome.verdict else { panic!("{:?}", outcome.verdict) };
        assert_eq!((wrong.operand, wrong.row), ("codes", 0));
    }
}

#[test]
fn subnormal_outputs_may_be_off_by_their_rounding_only() {
    let tolerance = PATHS[0].tolerance(None, DType::F16);
    let y = 2.4 * 2.0f64.powi(-24);
    let expected = of_values(vec![y]);
    assert!(compare(&[2.0 * 2.0f32.powi(-24)], &expected, tolerance).within(tolerance));
    assert!(!compare(&[3.0 * 2.0f32.powi(-24)], &expected, tolerance).within(tolerance));
}

#[test]
fn the_rounding_of_a_subnormal_output_adds_to_the_error_of_its_sum() {
    let y = 156.0 * 2.0f64.powi(-24);
    let expected = Expected { energy: vec![y * y], ..of_values(vec![y]) };
    let tolerance = Tolerance { absolute: 2.0f64.powi(-25), ..Tolerance::relative(1e-6) };
    let off =
        |share: f64| compare(&[(y + 2.0f64.powi(-25) + share * y) as f32], &expected, tolerance).within(tolerance);
    assert!(off(5e-4));
    assert!(!off(1e-2));
}

#[test]
fn what_a_type_cannot_hold_is_infinite() {
    let tolerance = PATHS[0].tolerance(None, DType::F16);
    let passes = |got: f32, y: f64| {
        let expected = of_values(vec![y, 1.0]);
        let comparison = compare(&[got, 1.0], &expected, tolerance);
        assert_eq!(comparison.within(tolerance), comparison.first_bad.is_none(), "{got} for {y}");
        comparison.within(tolerance)
    };
    assert!(passes(f32::INFINITY, 7e4) && passes(f32::NEG_INFINITY, -7e4));
    assert!(!passes(f32::NEG_INFINITY, 7e4) && !passes(65504.0, 7e4) && !passes(f32::NAN, 7e4));
    // Sums may fall on either side of the limit.
    assert!(passes(f32::INFINITY, 65_500.0) && passes(65504.0, 65_500.0) && passes(65504.0, 65_530.0));
    assert!(!passes(f32::INFINITY, 6e4) && passes(6e4, 6e4));
    // An infinity does not excuse its neighbours.
    let expected = of_values(vec![1e30, 1.0]);
    assert!(!compare(&[f32::INFINITY, 1.1], &expected, tolerance).within(tolerance));
}

#[test]
fn results_below_the_normal_range_may_be_zero() {
    let format: Format = "f32".parse().expect("a format");
    let weight = HostWeight::new(format, 1, 2, DType::F32.encode(&[4.0, 2.0]).into()).expect("valid");
    let tiny = f32::MIN_POSITIVE / 8.0;
    let expected = multiply(&weight, &[tiny, tiny], &Added::default());
    assert!(check(&[0.0], &expected).within(limit()));
    // Activations may have been flushed to 0, but not the other operand.
    assert!(!check(&[100.0 * f32::MIN_POSITIVE], &expected).within(limit()));
    let expected = multiply(&weight, &[1e-30, 1e-30], &Added::default());
    assert!(!check(&[0.0], &expected).within(limit()) && check(&[6e-30], &expected).within(limit()));
}

#[test]
fn a_weight_of_zero_is_a_code_that_was_multiplied() {
    let format: Format = "int4_g32".parse().expect("a format");
    let one = |kind, format| self::weight(kind, format, 1, 32, None, 5).expect("valid");
    let raw = one(WeightKind::Raw, format);
    let zero = raw.dequantize_row(0).iter().position(|&w| w == 0.0).expect("one of 32 codes is the zero point");
    let mut x = [0.0f32; 32];
    x[zero] = 100.0;
    let expected = multiply(&raw, &x, &Added::default());
    let step = f64::from(format.float_scales[0].read(raw.blocks()));
    assert_eq!((expected.values[0], expected.energy[0]), (0.0, (100.0 * 2.0 * step).powi(2)));
    // Otherwise steps come from the values, and weights of at least
    // two steps count fully.
    let q4_0 = one(WeightKind::Raw, "q4_0".parse().expect("a format"));
    let row = q4_0.dequantize_row(0);
    let largest = row.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
    let least = (0..32).map(|column| {
        let x: Vec<f32> = (0..32).map(|k| if k == column { 1.0 } else { 0.0 }).collect();
        multiply(&q4_0, &x, &Added::default()).energy[0].sqrt()
    });
    let least = least.fold(f64::INFINITY, f64::min);
    assert!((f64::from(largest) / least - 4.0).abs() < 1e-6, "{largest} and {least}");
}

#[test]
fn few_elements_are_judged_as_if_others_were_right() {
    let limit = Tolerance::relative(1e-6);
    let within = |n: usize, off: f32| {
        let expected = Expected { m: 1, n, values: vec![1.0; n], energy: vec![1.0; n], floor: vec![0.0; n] };
        compare(&vec![1.0 + off; n], &expected, limit).within(limit)
    };
    assert!(within(1, 1.5e-3) && !within(1, 2.5e-3), "one of four");
    assert!(within(4, 0.9e-3) && !within(4, 1.5e-3), "four");
}

#[test]
fn an_exact_result_must_be_exact() {
    let case =
        Case { weights: WeightKind::Exact, activations: ActivationKind::SmallIntegers, ..Case::new(q4_k(), 8, 64, K) };
    assert!(case.is_exact());
    let weight = weight(case.weights, case.format, case.n, case.k, None, 5).expect("valid");
    let x = activations(case.activations, case.m, case.k, case.x_dtype, 5);
    let expected = multiply(&weight, &x, &Added::default());
    let mut got = correct(&expected);
    assert_eq!(first_difference(&got, &expected, |v| v), None);
    let at = 3 * 64 + 9;
    got[at] = f32::from_bits(got[at].to_bits() ^ 1);
    let bad = first_difference(&got, &expected, |v| v).expect("one bit off");
    assert_eq!((bad.row, bad.column), (3, 9));
    // The average limit alone would not find it.
    assert!(check(&got, &expected).within(limit()));
}

#[test]
fn what_cancels_beyond_f16_may_be_either_infinity() {
    let limit = Tolerance { nmse: 1e-6, absolute: 0.0, overflow: 65520.0 };
    let within = |y: f64, energy: f64, got: f32| {
        let expected = Expected { m: 1, n: 1, values: vec![y], energy: vec![energy], floor: vec![0.0] };
        compare(&[got], &expected, limit).within(limit)
    };
    // At a magnitude of 1e10, 1e7 may be lost, or ten
    // times that in one element.
    assert!(within(-1e6, 1e20, f32::NEG_INFINITY) && within(-1e6, 1e20, f32::INFINITY));
    // At a magnitude of 1e6, the sign may not change.
    assert!(within(-1e6, 1e12, f32::NEG_INFINITY) && !within(-1e6, 1e12, f32::INFINITY));
    assert!(!within(1.0, 1.0, f32::INFINITY), "an infinity that is none");
}

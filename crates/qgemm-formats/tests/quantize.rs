//! Weight quantization (fallbacks, padding, errors) and X quantization.

use proptest::prelude::*;
use qgemm_formats::{
    ActivationFormat, Encoding, Format, FormatError, HostWeight, NO_COLUMN, QuantizedActivations, ScaleType, XFormat,
    XParts, XRow, format_for_k, quantize_matrix,
};

fn format(name: &str) -> Format {
    name.parse().expect("a format")
}

/// Smooth values between −1 and 1, with a period that no block hides.
fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7371).sin() * 0.8 + (i as f32 * 0.0113).cos() * 0.2).collect()
}

/// Σ(a−b)² / Σb².
fn nmse(a: &[f32], b: &[f32]) -> f64 {
    let error: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    error / b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()
}

/// Nearly normal values: sums of twelve uniform numbers minus 6.
/// With `outliers`, every 97th is 32 times larger.
fn almost_normal(count: usize, outliers: bool) -> Vec<f32> {
    let mut state = 0u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 24)
    };
    let value = |i: usize| {
        let sum: f64 = (0..12).map(|_| uniform()).sum();
        ((sum - 6.0) * if outliers && i.is_multiple_of(97) { 32.0 } else { 1.0 }) as f32
    };
    (0..count).map(value).collect()
}

/// Losses of ggml's activations on 64 rows of 1024 such values:
/// see `docs/ops/quantized-x.md`.
#[test]
fn activations_lose_no_more_than_those_of_ggml() {
    let golden = [
        (false, [2.796_540_027e-5, 2.796_540_027e-5, 4.600_043_334e-5]),
        (true, [1.493_392_875e-4, 1.493_392_875e-4, 9.064_941_965e-4]),
    ];
    for (outliers, expected) in golden {
        let x = almost_normal(64 * 1024, outliers);
        for (format, expected) in ActivationFormat::ALL.into_iter().zip(expected) {
            let mut blocks = vec![0; x.len() / format.block_len() * format.block_bytes()];
            format.quantize_blocks(&x, &mut blocks);
            let mut decoded = vec![0.0; x.len()];
            format.dequantize_blocks(&blocks, &mut decoded);
            let theirs = nmse(&decoded, &x);
            assert!((theirs / expected - 1.0).abs() < 1e-6, "{}: {theirs:e}, expected {expected:e}", format.name());
            let parts = format.x_format().parts(false, None).expect("quantized");
            let own: Vec<f32> = x.chunks_exact(1024).flat_map(|row| requantized(&parts, row)).collect();
            let ours = nmse(&own, &x);
            assert!(ours <= expected * 1.0005, "{}: {ours:e}, ggml's {expected:e}", format.x_format());
            // Planes have the same numbers as blocks.
            let planes = format.planes(&blocks);
            let of_planes = planes.codes.iter().enumerate();
            let of_planes = of_planes.map(|(i, &code)| planes.scales[i / format.block_len()] * f32::from(code));
            assert!(of_planes.eq(decoded.iter().copied()), "{}", format.name());
            assert_eq!(planes.sums.len(), if format == ActivationFormat::Q8_1 { planes.scales.len() } else { 0 });
        }
    }
}

/// Losses of ggml's 4-bit activations, the least of
/// its variants per format.
#[test]
fn activations_of_four_bits_lose_less_than_those_of_ggml() {
    let golden = [
        (XFormat::MxFp4, [1.318_411_826e-2, 2.480_416_383e-2]),
        (XFormat::NvFp4, [7.392_436_711e-3, 5.579_707_818e-3]),
    ];
    for (format, expected) in golden {
        let parts = format.parts(false, None).expect("quantized");
        for (outliers, expected) in [false, true].into_iter().zip(expected) {
            let x = almost_normal(64 * 1024, outliers);
            let own: Vec<f32> = x.chunks_exact(1024).flat_map(|row| requantized(&parts, row)).collect();
            let ours = nmse(&own, &x);
            assert!(ours < expected, "{format}: {ours:e}, ggml's {expected:e}");
        }
    }
}

fn requantized(parts: &XParts, row: &[f32]) -> Vec<f32> {
    let bytes = [parts.code_bytes(row.len()), parts.scale_bytes(row.len()), 4 * parts.sums(row.len())];
    let [mut codes, mut scales, mut sums] = bytes.map(|bytes| vec![0; bytes]);
    let factor = parts.quantize_row(row, None, XRow { codes: &mut codes, scales: &mut scales, sums: &mut sums });
    parts.dequantize_row(&codes, &scales, factor, row.len())
}

/// Formats that have a quantizer.
fn quantizable() -> impl Iterator<Item = Format> {
    Format::all().filter(|f| f.quantize_blocks.is_some() || f.quantize_matrix.is_some())
}

#[test]
fn every_format_quantizes_near_its_values() {
    for f in quantizable() {
        let (n, k) = (5, 512);
        let x = values(n * k);
        let q = quantize_matrix(&x, n, k, f).unwrap_or_else(|error| panic!("{f}: {error}"));
        assert_eq!((q.requested, q.used, q.weight.n(), q.weight.k()), (f, f, n, k));
        let decoded: Vec<f32> = (0..n).flat_map(|row| q.weight.dequantize_row(row)).collect();
        let limit = match f.encoding {
            Encoding::Plain(_) => 1e-5,
            Encoding::E5M2 => 3e-3,
            Encoding::E4M3 => 1e-3,
            // FP4's levels are uneven.
            Encoding::Codebook(_) => 2.5e-2,
            // Ternary.
            Encoding::IntOffset { offset: 1 } => 0.5,
            _ => 4.0 * 4f64.powi(-(f.code_bits() as i32)),
        };
        let error = nmse(&decoded, &x);
        assert!(error < limit, "{f}: NMSE {error:.1e}, limit {limit:.1e}");
    }
}

#[test]
fn rows_are_quantized_one_by_one() {
    let (n, k) = (7, 512);
    let x = values(n * k);
    for f in Format::all() {
        let Some(quantize) = f.quantize_blocks else { continue };
        let q = quantize_matrix(&x, n, k, f).expect("valid");
        let mut row = vec![0; f.row_bytes(k)];
        quantize(&x[3 * k..4 * k], &mut row);
        assert_eq!(q.weight.row(3), row, "{f}");
    }
}

#[test]
fn k_that_does_not_fill_super_blocks_falls_back_as_llama_cpp() {
    let expected = [
        ("tq2_0", "q4_0"),
        ("q2_k", "q4_0"),
        ("q3_k", "q4_0"),
        ("q4_k", "q5_0"),
        ("q5_k", "q5_1"),
        ("q6_k", "q8_0"),
        ("iq4_xs", "iq4_nl"),
    ];
    for (from, to) in expected {
        for k in [384, 896] {
            let q = quantize_matrix(&values(2 * k), 2, k, format(from)).expect("a fallback");
            assert_eq!((q.requested, q.used), (format(from), format(to)));
            assert_eq!(q.weight.format(), format(to));
        }
        assert_eq!(format_for_k(format(from), 512), Ok(format(from)));
        assert_eq!(format_for_k(format(from), 100), Ok(format("f16")));
        assert_eq!(format_for_k(format(from), 0), Err(FormatError::ZeroDimension { name: "K" }));
    }
    let error = quantize_matrix(&values(80), 2, 40, format("q4_0")).expect_err("no fallback");
    assert_eq!(error, FormatError::KNotMultiple { format: "q4_0", block: 32, k: 40 });
}

#[test]
fn ragged_rows_are_padded_with_zero_weights() {
    for f in Format::all().filter(|f| f.ragged_k) {
        let (n, k) = (3, f.block_len + 5);
        // All weights positive, so that zero is not among them.
        let x: Vec<f32> = values(n * k).iter().map(|v| v.abs() + 0.25).collect();
        let q = quantize_matrix(&x, n, k, f).expect("valid");
        let mut stored = vec![f32::NAN; f.blocks_per_row(k) * f.block_len];
        q.weight.dequantize_stored_row(1, &mut stored);
        assert!(stored[k..].iter().all(|&v| v == 0.0), "{f}: {:?}", &stored[k..]);
        assert_eq!(q.weight.dequantize_row(1), &stored[..k]);
    }
}

#[test]
fn values_that_no_scale_can_hold_are_errors() {
    for f in quantizable() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = values(2 * 256);
            x[300] = bad;
            let error = quantize_matrix(&x, 2, 256, f).expect_err("not finite");
            assert!(matches!(error, FormatError::NotQuantizable { .. }), "{f} {bad}: {error}");
        }
    }
    let has_f16 = |f: &Format| f.name == "f16" || f.float_scales.iter().any(|scale| scale.kind == ScaleType::F16);
    for f in quantizable().filter(has_f16) {
        for large in [1e9, 1e12, 1e20, 3e38] {
            let mut x = values(2 * 256);
            x[300] = large;
            let error = quantize_matrix(&x, 2, 256, f).expect_err("too large");
            assert!(matches!(error, FormatError::NonFiniteScale { row: 1, .. }), "{f} {large}: {error}");
        }
    }
}

#[test]
fn wrong_lengths_are_errors() {
    for f in quantizable() {
        let error = quantize_matrix(&values(511), 2, 256, f).expect_err("one value is missing");
        assert!(matches!(error, FormatError::WrongLength { expected: 2048, got: 2044, .. }), "{f}: {error}");
        assert!(matches!(quantize_matrix(&[], 0, 256, f), Err(FormatError::ZeroDimension { name: "N" })), "{f}");
        assert!(quantize_matrix(&[], usize::MAX / 2, 1 << 20, f).is_err(), "{f}");
    }
}

#[test]
fn activation_blocks_decode_to_their_codes() {
    let x = values(512);
    for f in ActivationFormat::ALL {
        let mut blocks = vec![0; 512 / f.block_len() * f.block_bytes()];
        f.quantize_blocks(&x, &mut blocks);
        let mut decoded = vec![0.0; 512];
        f.dequantize_blocks(&blocks, &mut decoded);
        assert!(nmse(&decoded, &x) < 3e-5, "{}", f.name());
    }
}

#[test]
fn activations_for_kernels_are_nearest_codes_of_ggmls_scales() {
    let x = values(512);
    for (format, block) in [(ActivationFormat::Q8_0, 32), (ActivationFormat::Q8K, 256)] {
        let planar = QuantizedActivations::new(&x, block, 16);
        let mut blocks = vec![0; 512 / block * format.block_bytes()];
        format.quantize_blocks(&x, &mut blocks);
        let mut ggml = vec![0.0; 512];
        format.dequantize_blocks(&blocks, &mut ggml);
        for (i, (&got, &x)) in planar.dequantize(512).iter().zip(&x).enumerate() {
            let scale = planar.scales[i / block];
            assert!((got - x).abs() <= scale * 0.50001, "{x} became {got}");
            // ggml rounds scales to f16, and ties away from zero.
            assert!((got - ggml[i]).abs() <= scale * 0.1 || (got - ggml[i]).abs() >= scale * 0.9, "{got} {}", ggml[i]);
        }
        for (i, &sum) in planar.sums.iter().enumerate() {
            let codes: i32 = planar.codes[i * 16..][..16].iter().map(|&q| i32::from(q)).sum();
            assert_eq!(sum, codes as f32 * planar.scales[i * 16 / block]);
        }
    }
}

#[test]
fn activations_may_end_inside_a_block_and_what_is_not_finite_spoils_its_own() {
    let mut x = values(70);
    let planar = QuantizedActivations::new(&x, 32, 32);
    assert_eq!((planar.codes.len(), planar.scales.len(), planar.sums.len()), (96, 3, 3));
    assert!(planar.codes[70..].iter().all(|&q| q == 0));
    assert_eq!(planar.dequantize(70).len(), 70);
    for bad in [f32::NAN, f32::INFINITY] {
        x[40] = bad;
        let planar = QuantizedActivations::new(&x, 32, 32);
        assert!(planar.scales[1].is_nan() && planar.sums[1].is_nan());
        assert!(planar.scales[0].is_finite() && planar.scales[2].is_finite());
        assert!(QuantizedActivations::new(&x, 256, 16).scales[0].is_nan());
    }
    assert!(QuantizedActivations::new(&[], 32, 16).codes.is_empty());
    let tiny = QuantizedActivations::new(&[1e-40, -1e-42, 0.0], 32, 32);
    assert!(tiny.scales[0] > 0.0 && tiny.dequantize(3).iter().all(|v| v.abs() <= 1e-38), "{tiny:?}");
}

/// Worst error of a quantized value, relative to the largest
/// magnitude of its block.
fn worst_error(format: Format, x: &[f32]) -> Option<f32> {
    let weight = quantize_matrix(x, 1, x.len(), format).ok()?.weight;
    let decoded = weight.dequantize_row(0);
    assert!(decoded.iter().all(|v| v.is_finite()), "{format}");
    let blocks = decoded.chunks(format.block_len).zip(x.chunks(format.block_len));
    blocks
        .map(|(decoded, x)| {
            let max = x.iter().fold(f32::MIN_POSITIVE, |max, v| max.max(v.abs()));
            decoded.iter().zip(x).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs() / max))
        })
        .reduce(f32::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any bit pattern yields an error or finite weights, never a panic.
    #[test]
    fn arbitrary_bits_never_panic(bits in prop::collection::vec(any::<u32>(), 256), mask in any::<u32>()) {
        let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(b & mask)).collect();
        for format in Format::all() {
            worst_error(format, &x);
        }
        for sum_span in [16, 32] {
            prop_assert_eq!(QuantizedActivations::new(&x, 32, sum_span).dequantize(256).len(), 256);
        }
        prop_assert_eq!(QuantizedActivations::new(&x, 256, 16).dequantize(256).len(), 256);
    }

    /// An error stays below the block's largest magnitude, until f16 scales
    /// become subnormal. There the minimum alone may round to twice that.
    #[test]
    fn errors_stay_within_the_block(
        x in prop::collection::vec(-1.0f32..1.0, 256),
        exponent in -6i32..12,
    ) {
        let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(exponent)).collect();
        for format in quantizable() {
            let worst = worst_error(format, &x);
            prop_assert!(worst.is_some_and(|worst| worst <= 1.0), "{}: {:?}", format, worst);
        }
    }
}

#[test]
fn what_would_decode_as_infinite_is_refused() {
    for f in quantizable().filter(|f| f.row_scale || f.float_scales.iter().any(|scale| scale.kind == ScaleType::F32)) {
        for largest in [f32::MAX, f32::MIN] {
            let mut x = values(3 * 256);
            x[2 * 256 + 200] = largest;
            match quantize_matrix(&x, 3, 256, f) {
                Ok(q) => assert!(q.weight.dequantize_row(2).iter().all(|v| v.is_finite()), "{f} {largest}"),
                Err(error) => assert!(matches!(error, FormatError::NonFiniteScale { row: 2, .. }), "{f}: {error}"),
            }
        }
    }
    let mut x = values(256);
    x[9] = f32::MAX;
    let error = quantize_matrix(&x, 1, 256, format("int8_channel")).expect_err("127 steps of a rounded scale");
    assert!(matches!(error, FormatError::NonFiniteScale { row: 0, block: 0, .. }), "{error}");
}

#[test]
fn rows_that_become_zero_are_counted() {
    let x: Vec<f32> = [values(256), vec![1e-9; 256], vec![0.0; 256], vec![-1e-9; 256]].concat();
    for (name, zeroed) in [("q4_0", 2), ("q6_k", 2), ("f16", 2), ("int4_g128", 2), ("bf16", 0), ("int8_channel", 0)] {
        let q = quantize_matrix(&x, 4, 256, format(name)).expect("valid");
        assert_eq!(q.zeroed_rows, zeroed, "{name}");
    }
}

#[test]
fn weights_change_their_format() {
    let x = values(3 * 256);
    let fine = quantize_matrix(&x, 3, 256, format("q8_0")).expect("valid").weight;
    let coarse = fine.to_format(format("q4_k")).expect("valid");
    assert_eq!((coarse.used, coarse.weight.n(), coarse.weight.k()), (format("q4_k"), 3, 256));
    let direct = quantize_matrix(&fine.dequantize().expect("fits"), 3, 256, format("q4_k")).expect("valid").weight;
    assert_eq!(coarse.weight.blocks(), direct.blocks());
    // Columns stored in another order are returned in natural order.
    let order: Vec<u32> = (0..256).rev().collect();
    let bytes = fine.blocks().to_vec().into();
    let reversed = HostWeight::with_k_order(format("q8_0"), 3, 256, bytes, order).expect("a permutation");
    let plain = reversed.to_format(format("f32")).expect("valid").weight;
    assert_eq!(plain.k_order(), None);
    let mut row = fine.dequantize_row(1);
    row.reverse();
    assert_eq!(plain.dequantize_row(1), row);
}

#[test]
fn rows_of_several_weights_are_one() {
    for f in quantizable() {
        let part = |n: usize| quantize_matrix(&values(n * 256), n, 256, f).expect("valid").weight;
        let (a, b, c) = (part(8), part(16), part(3));
        let all = HostWeight::concat_rows(&[&a, &b, &c]).expect("alike");
        assert_eq!((all.n(), all.k()), (27, 256));
        let expected = [&a, &b, &c].map(|w| w.dequantize().expect("fits")).concat();
        assert_eq!(all.dequantize().expect("fits"), expected, "{f}");
        let uneven = HostWeight::concat_rows(&[&c, &a]);
        match f.scale_planes.iter().any(|plane| plane.rows > 1) {
            true => {
                assert!(matches!(uneven, Err(FormatError::PartEndsInScale { number: 1, n: 3, rows: 8, .. })), "{f}")
            }
            false => assert!(uneven.is_ok(), "{f}"),
        }
    }
    let f32_weight = |n: usize, k: usize| quantize_matrix(&values(n * k), n, k, format("f32")).expect("valid").weight;
    let scaled = f32_weight(2, 4).with_row_scale(vec![2.0, 3.0]).expect("two");
    let both = HostWeight::concat_rows(&[&f32_weight(1, 4), &scaled]).expect("alike");
    assert_eq!(both.row_scale(), Some(&[1.0, 2.0, 3.0][..]));
    let mismatch = HostWeight::concat_rows(&[&scaled, &f32_weight(1, 5)]).expect_err("another K");
    assert!(matches!(mismatch, FormatError::PartMismatch { what: "K", number: 2, .. }), "{mismatch}");
    assert_eq!(HostWeight::concat_rows(&[]).err(), Some(FormatError::NoParts));
}

#[test]
fn column_orders_are_checked_before_anything_is_allocated() {
    let order = |k: usize, order: Vec<u32>| {
        HostWeight::with_k_order(format("f32"), 1, k, vec![0; 4 * order.len()].into(), order)
    };
    assert_eq!(order(1 << 40, vec![0, 1]).err(), Some(FormatError::TooManyColumns { k: 1 << 40 }));
    assert_eq!(order(2, vec![0, 2]).err(), Some(FormatError::ColumnOrder { at: 1, column: 2, k: 2 }));
    assert_eq!(order(2, vec![1, NO_COLUMN, 1]).err(), Some(FormatError::ColumnOrder { at: 2, column: 1, k: 2 }));
    // Features without a stored column have weight 0, whatever their number.
    let sparse = order(1 << 31, vec![7, NO_COLUMN]).expect("an order");
    assert_eq!((sparse.k(), sparse.stored_k()), (1 << 31, 2));
}

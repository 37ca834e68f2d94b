//! Kernels of attention at every level: tiles of a cache against each
//! number's definition, products against sums in order.

use qgemm_cpu::simd::{Extent, KvRow, LANES, Panel, Prefetch, TILE_KEYS, readable};
use qgemm_formats::DType;
use qgemm_formats::float8::e4m3_to_f32;
use qgemm_hal::KvFormat;
use qgemm_hal::op::attention::KV_BLOCK;

use super::*;

/// Number `i` of a row.
fn number(format: KvFormat, numbers: &[u8], scales: &[u8], i: usize) -> f32 {
    let scale = || DType::F16.read(scales, i / KV_BLOCK);
    match format {
        KvFormat::Plain(dtype) => dtype.read(numbers, i),
        KvFormat::Q8_0 => f32::from(numbers[i].cast_signed()) * scale(),
        KvFormat::Q4_0 => (f32::from(numbers[i / 2] >> (4 * (i % 2)) & 15) - 8.0) * scale(),
        _ => e4m3_to_f32(numbers[i]),
    }
}

#[test]
fn tiles_hold_every_number_of_every_format() {
    let mut next = words(7);
    for format in KvFormat::ALL {
        for features in [format.step().max(8), 96, 160] {
            let bytes = readable(format, features);
            let mut numbers: Vec<u8> = (0..TILE_KEYS * bytes).map(|_| next() as u8).collect();
            // Every code occurs.
            numbers.iter_mut().zip(0..=255).for_each(|(byte, code)| *byte = code);
            let scales: Vec<f32> = (0..TILE_KEYS * 8).map(|_| next() as f32 * 1e-9 - 0.005).collect();
            let scales = DType::F16.encode(&scales);
            let of_row = |(numbers, scales)| KvRow { numbers, scales, prefetch: Prefetch::default() };
            let rows: Vec<_> = numbers.chunks(bytes).zip(scales.chunks(16)).map(of_row).collect();
            let width = features.next_multiple_of(LANES);
            for simd in levels() {
                let (mut keys, mut values) = (vec![0.0; features * TILE_KEYS], vec![0.0; TILE_KEYS * width]);
                simd.load_keys(format, &rows[..48], features, &mut keys);
                simd.load_values(format, &rows[..37], features, &mut values);
                for (key, row) in rows[..48].iter().enumerate() {
                    for feature in 0..features {
                        let expected = number(format, row.numbers, row.scales, feature);
                        let got = [keys[feature * TILE_KEYS + key], values[key * width + feature]];
                        for (got, is_loaded) in got.into_iter().zip([true, key < 37]) {
                            let same = got == expected || got.is_nan() && expected.is_nan();
                            assert!(same || !is_loaded, "{format} {} [{key}][{feature}]", simd.level().name());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn sums_have_the_same_bits_in_blocks_of_any_size() {
    let mut next = words(3);
    let (depth, columns) = (37, 80);
    let a: Vec<f32> = (0..9 * depth).map(|_| next() as f32 * 1e-7 - 0.8).collect();
    let b: Vec<f32> = (0..depth * columns).map(|_| next() as f32 * 1e-7 - 0.8).collect();
    for simd in levels() {
        let multiply = |first: usize, rows: usize| {
            let mut sums = vec![0.25; rows * columns];
            let a = Panel { values: &a[first * depth..], stride: depth };
            let b = Panel { values: &b, stride: columns };
            simd.add_products(Extent { rows, depth, columns }, a, b, &mut sums, columns);
            sums
        };
        let all = multiply(0, 9);
        for (row, of_all) in all.chunks(columns).enumerate() {
            assert_eq!(multiply(row, 1), of_all, "{} row {row}", simd.level().name());
            for (column, got) in of_all.iter().enumerate() {
                let products = (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[k * columns + column]));
                let expected = products.sum::<f64>() + 0.25;
                assert!((f64::from(*got) - expected).abs() < 1e-5, "[{row}][{column}] {got} {expected}");
            }
        }
    }
}

#[test]
fn scores_are_scaled_and_the_largest_is_found() {
    for simd in levels() {
        for place in 0..32 {
            let mut scores: Vec<f32> = (0..32).map(|i| -(i as f32)).collect();
            (scores[place], scores[(place + 1) % 32]) = (3.0, f32::NAN);
            assert_eq!(simd.scale_scores(&mut scores, 0.5, f32::NEG_INFINITY), 1.5);
            assert!(scores[place] == 1.5 && scores[(place + 1) % 32].is_nan());
            assert_eq!(simd.scale_scores(&mut scores, 1.0, 2.0), 2.0);
        }
    }
}

#[test]
fn one_infinite_or_undefined_value_is_found() {
    for simd in levels() {
        let mut values = [f32::MAX; 48];
        assert!(simd.are_finite(&values));
        for (place, value) in [(0, f32::INFINITY), (17, f32::NAN), (47, f32::NEG_INFINITY)] {
            values[place] = value;
            assert!(!simd.are_finite(&values));
            values[place] = -1.0;
        }
    }
}

//! Decoding of packed and dense values.

use qgemm_cpu::simd::{KTile, LANES, Prefetch, Scales, scaled_sub_blocks};
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Encoding, Format, SubScale};

use super::*;

#[test]
fn every_level_decodes_every_format_as_its_description_says() {
    for format in Format::all() {
        let layout = PackedLayout::new(format, FragmentLayout::Simd16).expect("a layout");
        let mut word = words(7);
        let bytes: Vec<u8> = (0..layout.k_tile_bytes).map(|_| word() as u8).collect();
        let subs = scaled_sub_blocks(&layout);
        let mut numbers = |len: usize| -> Vec<f32> { (0..len).map(|_| word() as f32 / 1e6 - 8.0).collect() };
        let (scales, mins) = (numbers(subs * LANES), numbers(subs * LANES));
        let prefetch = Prefetch::new(bytes.as_ptr());
        let k_tile = KTile { layout: &layout, bytes: &bytes, prefetch, scales: &scales, mins: &mins };
        for simd in levels() {
            for first in (0..layout.k_tile).step_by(64) {
                let mut out = vec![0.0; 64 * LANES];
                simd.decode(&k_tile, first, 64, &mut out);
                for (i, &got) in out.iter().enumerate() {
                    let (column, row) = (first + i / LANES, i % LANES);
                    let number = format.encoding.number(layout.code_at(&bytes, 1, row, column));
                    let sub = column.checked_div(format.sub_block).unwrap_or(0) * LANES + row;
                    let (scale, min) = if subs == 0 { (1.0, 0.0) } else { (scales[sub], mins[sub]) };
                    let expected = f64::from(number) * f64::from(scale) + f64::from(min);
                    let size = (f64::from(number) * f64::from(scale)).abs() + f64::from(min).abs();
                    let close = (f64::from(got) - expected).abs() <= 2e-7 * size;
                    let same = f64::from(got) == expected || (got.is_nan() && expected.is_nan());
                    assert!(
                        if number.is_finite() { close } else { same },
                        "{format} {:?} {row} {column}: {got} {expected}",
                        simd.level()
                    );
                }
            }
        }
    }
}

#[test]
fn every_level_reads_dense_values_at_any_address() {
    let mut word = words(13);
    let values: Vec<f32> = (0..37).map(|_| word() as f32 / 1e6 - 8.0).chain([1e-7, f32::INFINITY]).collect();
    for dtype in DType::ALL {
        for (simd, shift) in levels().flat_map(|simd| (0..4).map(move |shift| (simd, shift))) {
            let bytes = [vec![0; shift], dtype.encode(&values)].concat();
            let mut out = vec![0.0; values.len()];
            simd.to_f32(dtype, &bytes[shift..], &mut out);
            assert_eq!(out, dtype.decode(&bytes[shift..]), "{dtype} shifted by {shift}, {:?}", simd.level());
        }
    }
}

#[test]
fn every_level_reads_the_scales_that_a_format_describes() {
    for format in Format::all().filter(|format| !matches!(format.encoding, Encoding::Plain(_))) {
        let layout = PackedLayout::new(format, FragmentLayout::Simd16).expect("a layout");
        let mut word = words(5);
        // Bytes below 0x70 are finite in every type; 0xff is NaN
        // in every one-byte type.
        let are_bytes = format.float_scales.iter().all(|scale| scale.kind.bytes() == 1);
        let byte = |i: usize| if are_bytes && i.is_multiple_of(5) { 0xff } else { word() as u8 % 0x70 };
        let bytes: Vec<u8> = (0..layout.k_tile_bytes).map(byte).collect();
        let scales = Scales::new(&layout);
        let subs = format.block_len / format.sub_block;
        for simd in levels() {
            let mut out = vec![0.0; scales.count() * LANES];
            let mut mins = out.clone();
            simd.unpack_scales(&layout, &scales, &bytes, &mut out, &mut mins);
            let mut without_mins = vec![0.0; out.len()];
            simd.unpack_scales(&layout, &scales, &bytes, &mut without_mins, &mut []);
            let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
            let all_same = without_mins.iter().zip(&out).all(|(&a, &b)| same(a, b));
            assert!(all_same, "{format} {:?}", simd.level());
            for row in 0..LANES {
                for block in 0..layout.k_tile / format.block_len {
                    let records = format.scale_planes.iter().enumerate().flat_map(|(p, plane)| {
                        let len = plane.bytes * format.block_len / plane.span;
                        layout.records(&bytes, 1, row, 0, p)[block * len..(block + 1) * len].to_vec()
                    });
                    let mut expected = vec![SubScale::default(); subs];
                    format.sub_scales.read(&records.collect::<Vec<_>>(), &mut expected);
                    for (sub, expected) in expected.into_iter().enumerate() {
                        let at = (block * subs + sub) * LANES + row;
                        let got = SubScale { scale: out[at], min: mins[at] };
                        // With a NaN scale, the minimum does not matter.
                        let is_right =
                            same(got.scale, expected.scale) && (got.scale.is_nan() || got.min == expected.min);
                        let place = format!("{format} {:?} row {row} sub-block {sub}", simd.level());
                        assert!(is_right, "{place}: {got:?} for {expected:?}");
                    }
                }
            }
        }
    }
}

//! Quantized tokens and products.

use qgemm_cpu::simd::{
    BLOCK_ROWS, CodeShape, LANES, Operands, Prefetch, Quantization, SCALED_COLUMNS, Scales, Simd, Tile, VALUE_BYTE,
};
use qgemm_formats::{Encoding, Format, QuantizedActivations};

use super::*;

/// Tokens with large, small and zero values, and
/// one with infinity or NaN.
fn tokens(columns: usize) -> Vec<f32> {
    let mut word = words(9);
    let mut token = |size: f32| -> Vec<f32> {
        (0..columns).map(|i| size * (word() as f32 / (1 << 23) as f32 - 1.0) * (1 + i / 32 % 3) as f32).collect()
    };
    let mut all = [token(1.0), token(3e37), token(1e-39), token(0.0), token(5.0)].concat();
    all[4 * columns + 70] = f32::NEG_INFINITY;
    all
}

#[test]
fn every_level_quantizes_as_the_model_does() {
    for (layout, how) in integer_formats() {
        let columns = 512;
        for (token, values) in tokens(columns).chunks_exact(columns).enumerate() {
            let model = QuantizedActivations::new(values, how.block, how.span);
            for simd in levels() {
                let how = simd.quantization(how);
                let row = how.row(columns);
                let mut out = vec![0; row.words];
                simd.quantize(&how, values, &mut out);
                for block in 0..columns / how.block {
                    let factor = f32::from_bits(out[row.factors + block]);
                    let scale = model.scales[block];
                    assert!(factor == scale || (factor.is_nan() && scale.is_nan()), "{factor} {scale}");
                    if scale.is_nan() {
                        continue;
                    }
                    for column in block * how.block..(block + 1) * how.block {
                        let byte = VALUE_BYTE[column % 4];
                        let byte_of = |first: usize| (out[first + column / 4] >> (8 * byte)) as u8;
                        let code = match (how.magnitudes, byte_of(0)) {
                            (false, code) => code as i8,
                            (true, magnitude) if byte_of(row.flips) == 0x80 => magnitude as i8,
                            (true, magnitude) => {
                                assert_eq!(byte_of(row.flips), 0x7f, "{} token {token}", layout.format());
                                -(magnitude as i8)
                            }
                        };
                        assert_eq!(code, model.codes[column], "{} token {token} {column}", layout.format());
                    }
                    for span in block * how.block / how.span..(block + 1) * how.block / how.span {
                        let codes = &model.codes[span * how.span..(span + 1) * how.span];
                        let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                        let negative: i32 = codes.iter().map(|&code| i32::from(code).min(0)).sum();
                        let expected = match how.offset {
                            _ if how.magnitudes => -negative as u32,
                            Some(offset) => (-offset * sum) as u32,
                            None if how.block > how.span => (sum as f32).to_bits(),
                            None => model.sums[span].to_bits(),
                        };
                        assert_eq!(out[row.sums + span], expected, "{} token {token}", layout.format());
                    }
                }
            }
        }
    }
}

/// Token values, quantized in groups.
fn quantized(simd: &Simd, how: &Quantization, values: &[f32], columns: usize, unpacked: bool) -> Vec<u32> {
    let row = how.row(columns);
    let mut x = Vec::new();
    let mut rows = values.chunks_exact(columns).map(|values| {
        let mut words = vec![0; row.words];
        simd.quantize(how, values, &mut words);
        words
    });
    for group in simd.token_groups(unpacked, values.len() / columns) {
        let group: Vec<_> = rows.by_ref().take(group).collect();
        x.extend((0..row.words).flat_map(|word| group.iter().map(move |row| row[word])));
    }
    x
}

#[test]
fn products_of_codes_are_those_of_their_values() {
    const TOKENS: usize = 27;
    const K_TILES: usize = 2;
    const TILES_AT_ONCE: usize = 3;
    for (layout, how) in integer_formats() {
        let (encoding, columns) = (layout.format().encoding, K_TILES * layout.k_tile);
        let mut word = words(21);
        // The largest and smallest codes too, because 16-bit
        // accumulators have no more room.
        let bytes = K_TILES * layout.k_tile_bytes;
        let k_tiles = [(0..bytes).map(|_| word() as u8).collect(), vec![0xff; bytes], vec![0; bytes]];
        let subs = columns / how.sub_block * LANES;
        let mut numbers = |len| -> Vec<f32> { (0..len).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect() };
        let [scales, mins] = [(); 2].map(|()| [(); TILES_AT_ONCE].map(|()| numbers(subs)));
        let mut values = numbers(TOKENS * columns);
        values[..columns].fill(1.0);
        values[columns..2 * columns].fill(-1.0);
        for simd in levels() {
            let how = simd.quantization(how);
            let unpacked = k_tiles.each_ref().map(|k_tiles| {
                let mut codes = vec![0; columns * LANES];
                simd.unpack_codes(&how, &layout, k_tiles, &mut codes);
                codes
            });
            let sums_of = |values: &[f32], unpacks: bool| {
                let x = quantized(simd, &how, values, columns, unpacks);
                let tiles = std::array::from_fn::<_, TILES_AT_ONCE, _>(|tile| Tile {
                    codes: if unpacks { &unpacked[tile] } else { &k_tiles[tile] },
                    prefetch: Prefetch::default(),
                    scales: &scales[tile],
                    mins: &mins[tile],
                });
                let at = Operands {
                    how: &how,
                    layout: &layout,
                    unpacked: unpacks,
                    tiles: &tiles,
                    prefetch_bytes: 0,
                    records: None,
                    x: &x,
                    row: how.row(columns),
                };
                let tokens = values.len() / columns;
                let mut sums = vec![1.0; tokens * BLOCK_ROWS];
                simd.multiply_codes(tokens, &at, &mut sums);
                sums
            };
            let single: Vec<f32> = values.chunks_exact(columns).flat_map(|values| sums_of(values, false)).collect();
            for tokens in 1..=TOKENS {
                for unpacks in [false, true] {
                    let sums = sums_of(&values[..tokens * columns], unpacks);
                    let what = format!("{:?}, {tokens} tokens, unpacks: {unpacks}", simd.level());
                    assert_eq!(sums, single[..tokens * BLOCK_ROWS], "{} {what}", layout.format());
                }
            }
            for (i, &got) in single.iter().enumerate() {
                let (token, tile, lane) = (i / BLOCK_ROWS, i % BLOCK_ROWS / LANES, i % LANES);
                if tile >= k_tiles.len() {
                    assert_eq!(got, 1.0, "only the tiles' sums are written");
                    continue;
                }
                let values = &values[token * columns..][..columns];
                let values = QuantizedActivations::new(values, how.block, how.block).dequantize(columns);
                let product = |column: usize| {
                    let number = encoding.number(layout.code_at(&k_tiles[tile], K_TILES, lane, column));
                    let offset = match encoding {
                        Encoding::IntOffset { offset } => offset as f32,
                        _ => 0.0,
                    };
                    let sub = column / how.sub_block * LANES + lane;
                    let min = if how.offset.is_some() { 0.0 } else { mins[tile][sub] };
                    let weight = f64::from(scales[tile][sub]) * f64::from(number - offset) + f64::from(min);
                    weight * f64::from(values[column])
                };
                let (sum, size) = (0..columns).map(product).fold((1.0, 1.0), |(s, a), p| (s + p, a + p.abs()));
                assert!((f64::from(got) - sum).abs() <= 1e-6 * size, "{} {got} for {sum}", layout.format());
            }
        }
    }
}

#[test]
fn kernels_unpack_scales_as_is_done_before_them() {
    for (layout, how) in integer_formats() {
        // Not a multiple of the columns that are unpacked at once.
        let k_tiles = SCALED_COLUMNS / layout.k_tile + 1;
        let columns = k_tiles * layout.k_tile;
        let mut word = words(17);
        let tile: Vec<u8> = (0..k_tiles * layout.k_tile_bytes).map(|_| word() as u8).collect();
        let values: Vec<f32> = (0..3 * columns).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect();
        let records = Scales::new(&layout);
        let subs = columns / how.sub_block * LANES;
        for simd in levels() {
            let how = simd.quantization(how);
            let (mut scales, mut mins) = (vec![0.0; subs], vec![0.0; subs]);
            simd.unpack_scales(&layout, &records, &tile, &mut scales, &mut mins);
            let x = quantized(simd, &how, &values, columns, false);
            let sums_of = |records, scales, mins| {
                let tiles = [Tile { codes: &tile, prefetch: Prefetch::default(), scales, mins }];
                let row = how.row(columns);
                let (how, layout) = (&how, &layout);
                let at =
                    Operands { how, layout, unpacked: false, tiles: &tiles, prefetch_bytes: 0, records, x: &x, row };
                let mut sums = vec![1.0; 3 * BLOCK_ROWS];
                simd.multiply_codes(3, &at, &mut sums);
                // Random scale records contain NaN, too.
                sums.into_iter().map(|sum| if sum.is_nan() { 0 } else { sum.to_bits() }).collect::<Vec<_>>()
            };
            let (before, within) = (sums_of(None, &scales, &mins), sums_of(Some(&records), &[], &[]));
            assert_eq!(before, within, "{} {:?}", layout.format(), simd.level());
            assert!(before.iter().any(|&sum| sum != 0), "{} has sums", layout.format());
        }
    }
}

#[test]
fn every_format_of_integers_has_kernels() {
    for format in Format::all() {
        let integers = match format.encoding {
            Encoding::Plain(_) | Encoding::E4M3 | Encoding::E5M2 => false,
            Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero | Encoding::Codebook(_) => true,
        };
        let quantization = Quantization::new(format, format.activation_block());
        assert_eq!(quantization.is_some(), integers, "{format}");
        if let Some(how) = quantization {
            let shapes = [CodeShape::ALL[how.shapes[0]], CodeShape::ALL[CodeShape::PACKED + how.shapes[1]]];
            assert_eq!(shapes.map(CodeShape::is_centered), [how.offset == Some(128); 2], "{format}");
        }
    }
}

#[test]
fn a_sum_does_not_depend_on_what_is_computed_beside_it() {
    let (columns, stride) = (64, 80);
    let mut word = words(3);
    let mut numbers = |len: usize| -> Vec<f32> { (0..len).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect() };
    let (w, x) = (numbers(BLOCK_ROWS * columns), numbers(8 * stride));
    for simd in levels() {
        let mut single = vec![1.0; simd.tokens() * BLOCK_ROWS];
        for (token, sums) in single.chunks_exact_mut(BLOCK_ROWS).enumerate() {
            simd.multiply(1, &w, &x[token * stride..], stride, columns, sums);
        }
        for tokens in 1..=simd.tokens() {
            let mut sums = vec![1.0; tokens * BLOCK_ROWS];
            simd.multiply(tokens, &w, &x, stride, columns, &mut sums);
            assert_eq!(sums, single[..tokens * BLOCK_ROWS], "{:?}, {tokens} tokens", simd.level());
        }
        for (i, &got) in single.iter().enumerate() {
            let (token, tile, lane) = (i / BLOCK_ROWS, i % BLOCK_ROWS / LANES, i % LANES);
            let products = (0..columns)
                .map(|k| f64::from(w[(tile * columns + k) * LANES + lane]) * f64::from(x[token * stride + k]));
            let expected = 1.0 + products.sum::<f64>();
            assert!((f64::from(got) - expected).abs() < 1e-4, "{:?}: {got} for {expected}", simd.level());
        }
    }
}

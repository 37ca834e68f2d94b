//! Properties of all formats: sizes, offsets, and values that follow
//! from codes and scales.

use half::f16;
use qgemm_formats::{Encoding, Format, FormatError, HostWeight, ScaleType};

/// Deterministic bytes (a linear congruential generator's upper bits).
fn random_bytes(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Random blocks of `format`, with scales and plain
/// values of moderate size.
fn random_blocks(format: Format, count: usize) -> Vec<u8> {
    let mut bytes = random_bytes(format.block_bytes * count, 7 + format.block_bytes as u32);
    for block in bytes.chunks_exact_mut(format.block_bytes) {
        for scale in format.float_scales {
            let at = scale.offset;
            match scale.kind {
                ScaleType::F32 => block[at..at + 4].copy_from_slice(&0.75f32.to_le_bytes()),
                ScaleType::F16 => block[at + 1] &= 0xbf,
                ScaleType::E4M3 => block[at] &= 0x3f,
                ScaleType::E8M0 => block[at] = block[at] % 32 + 112,
            }
        }
        match format.encoding {
            Encoding::Plain(dtype) => dtype.write(block, 0, f32::from(block[0]) - 77.5),
            // FP8 codes without NaN and infinity.
            Encoding::E4M3 | Encoding::E5M2 => {
                let codes = format.block_len;
                block[..codes].iter_mut().for_each(|code| *code &= 0xbf);
            }
            _ => {}
        }
    }
    bytes
}

#[test]
fn names_are_unique_and_parse() {
    for format in Format::all() {
        assert_eq!(Format::all().filter(|f| f.name == format.name).count(), 1, "{format}");
        assert_eq!(format.name.to_uppercase().parse(), Ok(format));
        assert_eq!(format.name, format.name.to_lowercase());
        if let Some(number) = format.ggml_type {
            assert_eq!(Format::from_ggml_type(number), Some(format));
        }
    }
    assert_eq!("q9_9".parse::<Format>(), Err(FormatError::UnknownFormat { name: "q9_9".into(), near: None }));
    for (mistyped, meant) in [("q4k", "q4_k"), ("Q4_K_M", "q4_k"), ("int4", "int4_g32"), ("mxf4", "mxfp4")] {
        let error = mistyped.parse::<Format>().expect_err(mistyped).to_string();
        assert!(error.ends_with(&format!("did you mean `{meant}`?")), "{error}");
    }
}

#[test]
fn gguf_numbers_and_sizes() {
    // ggml_type, values and bytes of a block, from the GGUF specification.
    let expected = [
        ("f32", 0, 1, 4),
        ("f16", 1, 1, 2),
        ("bf16", 30, 1, 2),
        ("q4_0", 2, 32, 18),
        ("q4_1", 3, 32, 20),
        ("q5_0", 6, 32, 22),
        ("q5_1", 7, 32, 24),
        ("q8_0", 8, 32, 34),
        ("q2_k", 10, 256, 84),
        ("q3_k", 11, 256, 110),
        ("q4_k", 12, 256, 144),
        ("q5_k", 13, 256, 176),
        ("q6_k", 14, 256, 210),
        ("iq4_nl", 20, 32, 18),
        ("iq4_xs", 23, 256, 136),
        ("tq2_0", 35, 256, 66),
        ("mxfp4", 39, 32, 17),
    ];
    for (name, number, block_len, block_bytes) in expected {
        let format: Format = name.parse().expect("a format");
        assert_eq!((format.ggml_type, format.block_len, format.block_bytes), (Some(number), block_len, block_bytes));
        assert!(!format.ragged_k && !format.row_scale, "{name}");
    }
}

#[test]
fn blocks_hold_codes_and_scales_and_nothing_else() {
    for format in Format::all() {
        let bits = format.block_len * format.code_bits() as usize + format.scale_bytes() * 8;
        assert_eq!(bits, format.block_bytes * 8, "{format}");
        let per_weight = f64::from(format.code_bits()) + format.scale_bytes() as f64 * 8.0 / format.block_len as f64;
        assert!((format.bits_per_weight() - per_weight).abs() < 1e-12, "{format}");
        assert_eq!(format.block_len % format.sub_block, 0, "{format}");
        for plane in format.scale_planes {
            assert_eq!(format.block_len % plane.span, 0, "{format} {}", plane.name);
        }
    }
}

#[test]
fn rows_follow_one_another() {
    for format in Format::all() {
        let k = format.block_len * 3;
        assert_eq!(format.row_offset(0, k), 0);
        assert_eq!(format.row_offset(5, k), 5 * 3 * format.block_bytes, "{format}");
        assert_eq!(format.row_bytes(k + 1), format.row_bytes(k) + format.block_bytes, "{format}");
        assert!(format.check_k(k).is_ok());
        assert_eq!(format.check_k(0), Err(FormatError::ZeroDimension { name: "K" }));
        if format.block_len > 1 {
            assert_eq!(format.check_k(k + 1).is_ok(), format.ragged_k, "{format}");
        }
    }
}

#[test]
fn every_byte_of_a_block_is_unpacked() {
    for format in Format::all() {
        let block = random_blocks(format, 1);
        let unpack = |block: &[u8]| {
            let (mut codes, mut scales) = (vec![0; format.block_len], vec![0; format.scale_bytes()]);
            (format.unpack_block)(block, &mut codes, &mut scales);
            (codes, scales)
        };
        let original = unpack(&block);
        assert!(original.0.iter().all(|&code| u64::from(code) < 1 << format.code_bits()), "{format}");
        for bit in 0..block.len() * 8 {
            let mut changed = block.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let (codes, scales) = unpack(&changed);
            let code_bits: u32 = codes.iter().zip(&original.0).map(|(a, b)| (a ^ b).count_ones()).sum();
            let scale_bits: u32 = scales.iter().zip(&original.1).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert_eq!(code_bits + scale_bits, 1, "{format}: bit {bit} must show up once");
        }
    }
}

/// Within a sub-block, a value must be an affine function of its code's
/// number. The test needs no knowledge of the packing of sub-scales.
#[test]
fn values_are_affine_in_the_numbers_of_their_codes() {
    for format in Format::all() {
        for block in random_blocks(format, 40).chunks_exact(format.block_bytes) {
            let (mut codes, mut scales) = (vec![0; format.block_len], vec![0; format.scale_bytes()]);
            (format.unpack_block)(block, &mut codes, &mut scales);
            let mut values = vec![0.0; format.block_len];
            (format.dequantize_block)(block, &mut values);
            for (codes, values) in codes.chunks_exact(format.sub_block).zip(values.chunks_exact(format.sub_block)) {
                let numbers: Vec<f64> = codes.iter().map(|&code| number(format.encoding, code)).collect();
                assert_affine(format, &numbers, values);
            }
        }
    }
}

/// Number of `code` before scale, with offset, zero
/// point or minimum applied.
fn number(encoding: Encoding, code: u32) -> f64 {
    match encoding {
        Encoding::IntOffset { offset } => f64::from(code) - f64::from(offset),
        Encoding::IntAffine | Encoding::IntZero => f64::from(code),
        Encoding::Codebook(table) => f64::from(table[code as usize]),
        Encoding::E4M3 => f64::from(qgemm_formats::float8::e4m3_to_f32(code as u8)),
        Encoding::E5M2 => f64::from(qgemm_formats::float8::e5m2_to_f32(code as u8)),
        Encoding::Plain(dtype) => f64::from(dtype.read(&code.to_le_bytes(), 0)),
    }
}

fn assert_affine(format: Format, numbers: &[f64], values: &[f32]) {
    let scaled_only = !matches!(format.encoding, Encoding::IntAffine | Encoding::IntZero);
    let order = |a: &usize, b: &usize| numbers[*a].total_cmp(&numbers[*b]);
    let low = (0..numbers.len()).min_by(order).expect("a value");
    let high = (0..numbers.len()).max_by(order).expect("a value");
    let (slope, intercept) = if scaled_only {
        let largest = if numbers[low].abs() > numbers[high].abs() { low } else { high };
        let slope = if numbers[largest] == 0.0 { 0.0 } else { f64::from(values[largest]) / numbers[largest] };
        (slope, 0.0)
    } else if numbers[high] == numbers[low] {
        (0.0, f64::from(values[low]))
    } else {
        let slope = (f64::from(values[high]) - f64::from(values[low])) / (numbers[high] - numbers[low]);
        (slope, f64::from(values[low]) - slope * numbers[low])
    };
    let size = values.iter().fold(intercept.abs(), |size, v| size.max(f64::from(v.abs())));
    for (&number, &value) in numbers.iter().zip(values) {
        let expected = slope * number + intercept;
        assert!((expected - f64::from(value)).abs() <= 1e-5 * size, "{format}: {expected} is not {value}");
    }
}

#[test]
fn single_scale_blocks_decode_by_definition() {
    for format in Format::all() {
        let Encoding::IntOffset { offset } = format.encoding else { continue };
        let [plane] = format.scale_planes else { continue };
        if plane.span != format.block_len {
            continue;
        }
        assert_eq!(plane.bytes, 2, "{format}: an f16 scale");
        for block in random_blocks(format, 20).chunks_exact(format.block_bytes) {
            let (mut codes, mut scales) = (vec![0; format.block_len], vec![0; 2]);
            (format.unpack_block)(block, &mut codes, &mut scales);
            let mut values = vec![0.0; format.block_len];
            (format.dequantize_block)(block, &mut values);
            let d = f16::from_le_bytes([scales[0], scales[1]]).to_f32();
            for (code, value) in codes.into_iter().zip(values) {
                assert_eq!(value, d * (code as i32 - offset) as f32, "{format}");
            }
        }
    }
}

#[test]
fn finite_scales_are_told_from_infinite_ones() {
    for format in Format::all() {
        let block = random_blocks(format, 1);
        assert!(format.float_scales.iter().all(|scale| scale.is_finite(&block)), "{format}");
        for scale in format.float_scales {
            let mut spoiled = block.clone();
            match scale.kind {
                ScaleType::F32 => spoiled[scale.offset..][..4].copy_from_slice(&f32::NAN.to_le_bytes()),
                ScaleType::F16 => spoiled[scale.offset..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes()),
                ScaleType::E4M3 => spoiled[scale.offset] = 0x7f,
                ScaleType::E8M0 => spoiled[scale.offset] = 0xff,
            }
            assert!(!scale.is_finite(&spoiled), "{format}");
            let mut values = vec![0.0; format.block_len];
            (format.dequantize_block)(&spoiled, &mut values);
            assert!(values.iter().any(|v| !v.is_finite()), "{format}: the scale at {} counts", scale.offset);
        }
    }
}

/// Extreme sub-scales and codes occur in bits of all zeros,
/// all ones and random bits.
#[test]
fn values_of_unit_scales_lie_within_the_unit_range_and_nearly_fill_it() {
    for format in Format::all().filter(|f| !matches!(f.encoding, Encoding::Plain(_))) {
        let mut blocks = random_bytes(format.block_bytes * 3000, 5);
        for pattern in [0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0] {
            blocks.extend(std::iter::repeat_n(pattern, format.block_bytes));
        }
        let mut largest = 0.0f32;
        for (i, block) in blocks.chunks_exact_mut(format.block_bytes).enumerate() {
            for (s, scale) in format.float_scales.iter().enumerate() {
                let one = if i >> s & 1 == 0 { 1.0 } else { -1.0f32 };
                match scale.kind {
                    ScaleType::F32 => block[scale.offset..][..4].copy_from_slice(&one.to_le_bytes()),
                    ScaleType::F16 => block[scale.offset..][..2].copy_from_slice(&f16::from_f32(one).to_le_bytes()),
                    ScaleType::E4M3 => block[scale.offset] = 0x38,
                    ScaleType::E8M0 => block[scale.offset] = 127,
                }
                assert_eq!(scale.read(block).abs(), 1.0, "{format}");
            }
            if let Some(largest) = format.largest_zero_point() {
                block[format.block_bytes - 1] = block[format.block_bytes - 1].min(largest);
            }
            let mut values = vec![0.0; format.block_len];
            (format.dequantize_block)(block, &mut values);
            largest = values.iter().filter(|v| v.is_finite()).fold(largest, |largest, v| largest.max(v.abs()));
        }
        assert!(largest <= format.unit_range, "{format}: {largest} is beyond {}", format.unit_range);
        assert!(largest >= 0.7 * format.unit_range, "{format}: {} is far beyond {largest}", format.unit_range);
    }
}

#[test]
fn zero_points_beyond_the_codes_are_refused() {
    for (name, largest) in [("int2_g64", 4), ("int3_g32", 8), ("int4_g128", 16), ("int8_g32", 255)] {
        let format: Format = name.parse().expect("a format");
        let mut blocks = vec![0; format.row_offset(3, 2 * format.block_len)];
        let last = |row: usize, block: usize| (row * 2 + block + 1) * format.block_bytes - 1;
        let weight = |blocks: &[u8]| HostWeight::new(format, 3, 2 * format.block_len, blocks.to_vec().into());
        blocks[last(1, 1)] = largest;
        assert!(weight(&blocks).is_ok(), "{name}");
        let Some(got) = largest.checked_add(1) else { continue };
        (blocks[last(1, 1)], blocks[last(2, 0)]) = (got, 0xff);
        let error = weight(&blocks).expect_err("no such zero point");
        assert_eq!(error, FormatError::ZeroPoint { format: name, row: 1, block: 1, largest, got });
    }
}

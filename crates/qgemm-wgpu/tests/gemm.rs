//! GEMM families and configs on an adapter against an f64 product.
//! `conformance.rs` covers all formats: a software adapter takes half
//! a second to compile a shader.

#[path = "common/case.rs"]
mod case;
mod common;

use case::{Case, Options, POISON, plan};
use common::{adapter, download, upload};
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Format, HostWeight, QuantizedActivations, XFormat};
use qgemm_hal::{CheckedGemm, Dense, GemmOperand, HalError, Operands, XOperand};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// K of two blocks and a part, if rows may be ragged.
fn some_k(format: Format) -> usize {
    match (format.block_len, format.ragged_k) {
        (1, _) => 83,
        (len, true) => 2 * len + len / 2 + 3,
        (len, false) => 2 * len,
    }
}

#[test]
fn every_configuration() {
    let Some(device) = adapter() else { return };
    // Two-plane integers with many scales, a codebook, and wide values.
    for (i, name) in ["q6_k", "iq4_nl", "f16"].into_iter().enumerate() {
        let format: Format = name.parse().expect("exists");
        let mut runs = 0;
        for m in [1, 2, 3, 7, 35] {
            let case = Case::new(format, [m, 85, 512], DType::F16, DType::F32, Options::default(), i as u64);
            runs += case.check_all(&*device);
        }
        // gemv offers 1 or 2 configs for these M except the last;
        // gemm at least 3 for each.
        assert!(runs >= 4 + 5 * 3, "{format}: {runs}");
    }
}

#[test]
fn every_type() {
    let Some(device) = adapter() else { return };
    let format: Format = "q5_0".parse().expect("exists");
    for (i, (x, d)) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))).enumerate() {
        for gaps in [false, true] {
            let other = DType::ALL[(i + i / 3) % 3];
            let options = Options { gaps, c: Some(other), bias: Some(d), ..Options::default() };
            for m in [2, 9] {
                Case::new(format, [m, 7, 96], x, d, options, i as u64).check(&*device, i, false);
            }
        }
    }
}

#[test]
fn orders_strides_and_epilogues() {
    let Some(device) = adapter() else { return };
    for (seed, name) in (1..).zip(["int4_g32", "int3_g128", "fp8_e4m3", "nvfp4", "f16"]) {
        let format: Format = name.parse().expect("exists");
        for bits in 0..32 {
            let bit = |i: u32| bits >> i & 1 == 1;
            let options = Options {
                transposed_x: bit(0),
                gaps: bit(1),
                c: bit(2).then_some(DType::F16),
                bias: bit(3).then_some(DType::BF16),
                k_order: bit(4) && format.ragged_k,
                integers: false,
            };
            let m = [1, 4, 6][bits as usize % 3];
            let case = Case::new(format, [m, 9, some_k(format)], DType::F16, DType::F16, options, seed);
            case.check(&*device, bits as usize, false);
        }
    }
}

#[test]
fn small_integers_are_exact() {
    let Some(device) = adapter() else { return };
    let options = Options { integers: true, bias: Some(DType::F32), ..Options::default() };
    for x in DType::ALL {
        for m in [1, 17] {
            let mut case = Case::new("f32".parse().expect("exists"), [m, 33, 301], x, DType::F32, options, 5);
            let mut rng = StdRng::seed_from_u64(6);
            let weights: Vec<f32> = (0..33 * 301).map(|_| rng.random_range(-7i32..=7) as f32).collect();
            let blocks = DType::F32.encode(&weights).into();
            case.weight = HostWeight::new(case.op.format, 33, 301, blocks).expect("well formed");
            case.check(&*device, m, true);
        }
    }
}

#[test]
fn scales_at_the_edges_of_their_range() {
    let Some(device) = adapter() else { return };
    // E8M0 exponents whose scale is subnormal in f32 though products are not,
    // and the largest finite one.
    for exponent in [0u8, 1, 2, 127, 244] {
        let format: Format = "mxfp4".parse().expect("exists");
        let mut case = Case::new(format, [2, 5, 64], DType::F32, DType::F32, Options::default(), 3);
        let mut blocks = case.weight.blocks().to_vec();
        for block in blocks.chunks_exact_mut(17) {
            block[0] = exponent;
            // Magnitudes of 6, so that products with the scale 2^-128 are
            // normal after scaling X.
            block[1..].iter_mut().for_each(|b| *b |= 0x77);
        }
        case.weight = HostWeight::new(format, 5, 64, blocks.into()).expect("well formed");
        if exponent < 100 {
            // Keeps products well above the smallest normal f32.
            let x: Vec<f32> = case.x_dtype().decode(&case.x).iter().map(|v| v * 1e12).collect();
            case.x = case.x_dtype().encode(&x);
        }
        case.check(&*device, 0, false);
    }
    // Subnormal f16 scales.
    let format: Format = "q4_0".parse().expect("exists");
    let mut case = Case::new(format, [2, 5, 64], DType::F32, DType::F32, Options::default(), 3);
    let mut blocks = case.weight.blocks().to_vec();
    for (i, block) in blocks.chunks_exact_mut(18).enumerate() {
        block[..2].copy_from_slice(&(i as u16 * 37 + 1).to_le_bytes());
    }
    case.weight = HostWeight::new(format, 5, 64, blocks.into()).expect("well formed");
    case.check(&*device, 0, false);
}

#[test]
fn halves_are_rounded_to_nearest_even() {
    let Some(device) = adapter() else { return };
    let mut values = vec![0.0, 1.0, 2049.0, 2051.0, 65519.0, 65520.0, -1e9, f32::INFINITY, 5.9e-8, 2.9e-8, 3e-8];
    let mut rng = StdRng::seed_from_u64(1);
    values.extend((0..500).map(|_| f32::from_bits(rng.random_range(0x2f80_0000u32..0x4780_0000))));
    let n = values.len();
    for d in [DType::F16, DType::BF16] {
        let mut case = Case::new("f32".parse().expect("exists"), [1, n, 1], DType::F32, d, Options::default(), 1);
        case.weight = HostWeight::new(case.op.format, n, 1, DType::F32.encode(&values).into()).expect("well formed");
        case.x = 1.0f32.to_le_bytes().to_vec();
        for (index, family) in device.catalog().gemm.iter().enumerate() {
            for config in case.configs(&*device, index).into_iter().take(1) {
                assert_eq!(case.run(&*device, index, config), d.encode(&values), "{} to {d}", family.name());
            }
        }
    }
}

/// Identity matrix in Q8_0: every scale is 1.
fn identity(format: Format, k: usize) -> HostWeight {
    let mut blocks = Vec::new();
    for (row, block) in (0..k).flat_map(|row| (0..k / 32).map(move |block| (row, block))) {
        blocks.extend([0x00, 0x3c]);
        blocks.extend((0..32).map(|i| u8::from(block * 32 + i == row)));
    }
    HostWeight::new(format, k, k, blocks.into()).expect("well formed")
}

/// Blocks of 32 of any magnitude, with few and with many
/// bits, and one of zeros.
fn blocks_of_any_magnitude(count: usize, rng: &mut StdRng) -> Vec<f32> {
    let mut values = Vec::new();
    for block in 0..count {
        let exponent = rng.random_range(1u32..=250);
        let bits = rng.random_range(0..=23);
        values.extend((0..32).map(|_| {
            let below = exponent.saturating_sub(rng.random_range(0..=8)).max(1);
            let mantissa = rng.random_range(0u32..1 << 23) >> (23 - bits) << (23 - bits);
            let value = f32::from_bits(rng.random_range(0u32..=1) << 31 | below << 23 | mantissa);
            if block == 5 { 0.0 } else { value }
        }));
    }
    values
}

#[test]
fn activations_are_quantized_as_the_model_does() {
    let Some(device) = adapter() else { return };
    let format: Format = "q8_0".parse().expect("exists");
    let family = device.catalog().gemm.iter().position(|family| family.name() == "gemv_int8").expect("is offered");
    let (tokens, k) = (8, 128);
    let mut rng = StdRng::seed_from_u64(7);
    for round in 0..40 {
        let mut case = Case::new(format, [tokens, k, k], DType::F32, DType::F32, Options::default(), 1);
        let x = blocks_of_any_magnitude(tokens * k / 32, &mut rng);
        (case.weight, case.x) = (identity(format, k), DType::F32.encode(&x));
        let configs = case.configs(&*device, family);
        let got = DType::F32.decode(&case.run(&*device, family, configs[round % configs.len()]));
        for (token, (got, x)) in got.chunks(k).zip(x.chunks(k)).enumerate() {
            let expected = QuantizedActivations::new(x, 32, 32).dequantize(k);
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            assert_eq!(wrong, None, "round {round}, token {token}: {got:?}, expected {expected:?}");
        }
    }
}

#[test]
fn tiles_beyond_one_grid_dimension() {
    let Some(device) = adapter() else { return };
    // 65 535 tiles of 64 outputs plus 6 outputs, narrow enough for one binding.
    let n = 65_535 * 64 + 6;
    let case =
        Case::new("int2_g32".parse().expect("exists"), [1, n, 32], DType::F32, DType::F16, Options::default(), 8);
    case.check_family(&*device, 0, 0, false);
}

#[test]
fn what_cannot_be_served_is_refused() {
    let Some(device) = adapter() else { return };
    let case = Case::new("q4_0".parse().expect("exists"), [1, 8, 32], DType::F32, DType::F32, Options::default(), 1);
    let gemm = device.catalog().gemm[1];
    let config = gemm.configs(&case.op, device.info()).expect("supported")[0];

    let n = device.info().max_buffer_bytes as usize / 4 + 1;
    let large = CheckedGemm {
        stored_rows: n,
        out_features: n,
        d: Dense { row_stride: n as u64, ..case.op.d },
        ..case.op.clone()
    };
    let why = gemm.configs(&large, device.info()).expect_err("too large a row of D").why;
    assert!(why.contains("a row of D takes") && why.contains("max_storage_buffer_binding_size"), "{why}");
    let error = gemm.prepare(&*device, &large, &plan(&large, config)).expect_err("too large a row of D");
    assert!(matches!(error, HalError::Unsupported { .. }), "{error}");

    let packed = CheckedGemm { class: FragmentLayout::MmaM16, ..case.op.clone() };
    assert!(gemm.configs(&packed, device.info()).is_err());

    let quantized = XOperand { format: XFormat::Q8_0, ..case.op.x };
    let quantized = CheckedGemm { x: quantized, ..case.op.clone() };
    for family in device.catalog().gemm {
        let why = family.configs(&quantized, device.info()).expect_err("X is quantized").why;
        assert!(why.contains("q8_0") || why.contains("cooperative"), "{}: {why}", family.name());
    }

    let invariant = CheckedGemm { batch_invariant: true, ..case.op.clone() };
    assert!(device.catalog().gemm[0].configs(&invariant, device.info()).is_err());
    assert!(gemm.configs(&invariant, device.info()).is_ok());

    let sequence = gemm.prepare(&*device, &case.op, &plan(&case.op, config)).expect("supported");
    let (x, w, mut d) = (upload(&*device, &case.x), upload(&*device, &[0; 17]), upload(&*device, &[POISON; 32]));
    let mut operands = Operands::new();
    operands.read(GemmOperand::X, (&x).into());
    operands.read(GemmOperand::W, (&w).into());
    operands.write(GemmOperand::D, (&mut d).into());
    let error = sequence.run(&device.default_stream(), operands).expect_err("W is too short");
    assert!(matches!(error, HalError::OutOfBounds { what: "the weight", .. }), "{error}");
    assert_eq!(download(&*device, &d), [POISON; 32]);
}

#[test]
fn batch_invariant_rows_keep_their_bits() {
    let Some(device) = adapter() else { return };
    let format: Format = "q6_k".parse().expect("exists");
    let mut large = Case::new(format, [40, 33, 512], DType::F16, DType::F32, Options::default(), 4);
    large.op.batch_invariant = true;
    let gemm = device.catalog().gemm[1];
    let row = 33 * 4;
    let mut bits = None;
    for m in [40, 7, 1] {
        large.op.m = m;
        for config in gemm.configs(&large.op, device.info()).expect("supported") {
            let first = large.run(&*device, 1, config)[..row].to_vec();
            assert_eq!(bits.get_or_insert_with(|| first.clone()), &first, "{m} tokens, tile of {}", config.tile_m);
        }
    }
}

//! X quantization through the API: refusals, and
//! the caller's planes.

use qgemm_api::{
    ActivationFormat, Args, Context, DType, Error, Problem, Quantization, QuantizationArgs, QuantizedX,
    QuantizedXParts, XFormat, quantize,
};

fn q8(rows: usize, columns: usize) -> Quantization {
    Quantization::new(rows, columns, DType::F32, XFormat::Q8_0)
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_runs() {
    let ctx = Context::open("cpu").expect("always there");
    let refused = |quantization: &Quantization| ctx.plan_quantization(quantization).expect_err("refused");
    let plain = Quantization::new(2, 64, DType::F32, XFormat::Plain(DType::F16));
    assert!(matches!(refused(&plain), Error::NotQuantized { .. }));
    for quantization in [
        q8(2, 64).given_factor(),
        q8(2, 64).sums_of(32),
        Quantization::new(2, 64, DType::F32, XFormat::Q8_1).sums_of(8),
        Quantization::new(2, 64, DType::F32, XFormat::E4M3Tensor).scales_row_stride(4),
    ] {
        let error = refused(&quantization);
        assert!(matches!(error, Error::NotOfXFormat { .. }), "{error}");
    }
    for quantization in [q8(2, 64).codes_row_stride(48), q8(2, 64).codes_row_stride(72), q8(2, 64).scales_row_stride(6)]
    {
        let error = refused(&quantization);
        assert!(matches!(error, Error::PlaneStride { .. }), "{error}");
    }
    assert!(matches!(refused(&q8(2, 64).x_row_stride(63)), Error::StrideTooSmall { .. }));
    assert!(matches!(refused(&q8(1 << 20, 64).codes_row_stride(1 << 60)), Error::ExtentOverflow { .. }));
}

#[test]
fn runs_want_every_plane_and_no_other() {
    let ctx = Context::open("cpu").expect("always there");
    let plan = ctx.plan_quantization(&q8(2, 40)).expect("valid");
    let x = ctx.upload(&[1.0f32; 80]).expect("uploads");
    let (mut codes, mut scales) = (ctx.allocate(128).expect("fits"), ctx.allocate(16).expect("fits"));
    let missing = plan.run(&ctx.default_stream(), QuantizationArgs::new(&x, &mut codes));
    assert!(matches!(missing, Err(Error::MissingOperand { operand: "scales", .. })), "{missing:?}");
    let mut args = QuantizationArgs::new(&x, &mut codes).factor(&x);
    args.scales = Some((&mut scales).into());
    let unexpected = plan.run(&ctx.default_stream(), args);
    assert!(matches!(unexpected, Err(Error::UnexpectedOperand { operand: "factor" })), "{unexpected:?}");
    let mut short = ctx.allocate(127).expect("fits");
    let mut args = QuantizationArgs::new(&x, &mut short);
    args.scales = Some((&mut scales).into());
    let too_short = plan.run(&ctx.default_stream(), args);
    assert!(
        matches!(too_short, Err(Error::BufferTooShort { operand: "codes", expected: 128, got: 127 })),
        "{too_short:?}"
    );
}

#[test]
fn nothing_is_quantized_to_nothing() {
    let ctx = Context::open("cpu").expect("always there");
    let x = ctx.upload(&[0.0f32; 4]).expect("uploads");
    for quantization in [q8(0, 64), q8(3, 0)] {
        let plan = ctx.plan_quantization(&quantization).expect("valid");
        assert!(plan.sequence().is_none());
        ctx.quantize_x(&quantization, &x).expect("nothing to do");
    }
}

#[test]
fn the_callers_planes_are_checked() {
    let ctx = Context::open("cpu").expect("always there");
    let buffer = |bytes| ctx.allocate(bytes).expect("fits");
    let without = QuantizedX::from_parts(&q8(2, 64), QuantizedXParts::new(buffer(128)));
    assert!(matches!(without, Err(Error::MissingOperand { operand: "scales", .. })));
    let mut planes = QuantizedXParts::new(buffer(128));
    planes.scales = Some(buffer(16));
    let x = QuantizedX::from_parts(&q8(2, 64), planes).expect("as the format has them");
    assert_eq!((x.rows(), x.columns(), x.row_strides()), (2, 64, [64, 8, 0]));
    assert!(x.sums().is_none() && x.token_factors().is_none() && x.scales().is_some());
}

#[test]
fn blocks_of_ggml_are_multiplied_as_the_numbers_that_they_hold() {
    let (m, n, k) = (3, 5, 512);
    let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 16.0;
    let x: Vec<f32> = (0..m * k).map(value).collect();
    let w: Vec<f32> = (0..n * k).map(|i| value(i * 3 + 1)).collect();
    let (host, _) = quantize(&w, n, k, "q4_0".parse().expect("a format")).expect("K suits");
    let rows: Vec<Vec<f32>> = (0..n).map(|row| host.dequantize_row(row)).collect();
    let ctx = Context::open("cpu").expect("always there");
    let weight = ctx.load(&host).expect("memory");
    for format in ActivationFormat::ALL {
        let mut blocks = vec![0; m * k / format.block_len() * format.block_bytes()];
        format.quantize_blocks(&x, &mut blocks);
        let mut held = vec![0.0; m * k];
        format.dequantize_blocks(&blocks, &mut held);
        let given = QuantizedX::from_blocks(&ctx, format, m, k, &blocks).expect("whole rows");
        assert_eq!((given.format(), given.rows(), given.columns()), (format.x_format(), m, k));
        assert_eq!(given.sums().is_some(), format == ActivationFormat::Q8_1);
        let plan = ctx.plan(&Problem::new(&weight, m).x_format(given.format())).expect("served");
        let config = plan.launch().expect("it launches").config;
        assert_eq!(config.x_format, given.format(), "codes are multiplied as they are");
        let mut d = ctx.allocate(m * n * 4).expect("memory");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let args = Args::new(&given, &weight, &mut d).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("as planned");
        for (i, got) in ctx.download::<f32>(&d).expect("fits").into_iter().enumerate() {
            let products = held[i / n * k..][..k].iter().zip(&rows[i % n]);
            let terms: Vec<f64> = products.map(|(x, w)| f64::from(*x) * f64::from(*w)).collect();
            let (expected, size) = (terms.iter().sum::<f64>(), terms.iter().map(|term| term.abs()).sum::<f64>());
            assert!((f64::from(got) - expected).abs() < 1e-5 * size, "{}: {got}, expected {expected}", format.name());
        }
        let short = QuantizedX::from_blocks(&ctx, format, m, k, &blocks[1..]);
        assert!(matches!(short, Err(Error::WrongLength { got, .. }) if got + 1 == blocks.len()), "{short:?}");
    }
    // Codes after the last column are 0, whatever the blocks hold.
    let mut block = [0; 36];
    ActivationFormat::Q8_1.quantize_blocks(&[1.0; 32], &mut block);
    let ragged = QuantizedX::from_blocks(&ctx, ActivationFormat::Q8_1, 1, 20, &block).expect("one block");
    let codes = ctx.download::<u8>(ragged.codes()).expect("fits");
    assert!(codes[..20].iter().all(|&code| code == 127) && codes[20..].iter().all(|&code| code == 0), "{codes:?}");
}

#[test]
fn a_transpose_is_quantized_in_blocks_of_128_rows() {
    let (tokens, features) = (300, 5);
    let x: Vec<f32> = (0..tokens * features).map(|i| ((i * 61 % 257) as f32 - 128.0) / 7.0).collect();
    let transposed: Vec<f32> = (0..tokens * features).map(|i| x[i % tokens * features + i / tokens]).collect();
    let ctx = Context::open("cpu").expect("always there");
    let of = |quantization: &Quantization, x: &[f32]| {
        let x = ctx.upload(x).expect("memory");
        let made = ctx.quantize_x(quantization, &x).expect("valid");
        let scales = ctx.download::<f32>(made.scales().expect("has some")).expect("fits");
        (ctx.download::<u8>(made.codes()).expect("fits"), scales)
    };
    let plain = Quantization::new(features, tokens, DType::F32, XFormat::E4M3Block);
    let own = of(&plain.clone().x_transposed(), &x);
    assert_eq!(own, of(&plain, &transposed));
    assert_eq!(own.1.len(), features * tokens.div_ceil(128));
}

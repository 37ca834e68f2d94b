//! Quantizing through the API: what is refused, and planes of the caller's.

use qgemm_api::{Context, DType, Error, Quantization, QuantizationArgs, QuantizedX, QuantizedXParts, XFormat};

fn q8(rows: usize, columns: usize) -> Quantization {
    Quantization::new(rows, columns, DType::F32, XFormat::Q8 { block: 32 })
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

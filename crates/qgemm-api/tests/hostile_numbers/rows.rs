//! Row-wise operations: conversions, quantizations, norms, optimizers and gradients.

use qgemm_api::{
    ActivationFormat, Context, Conversion, ConversionArgs, DType, Error, Gradient, GradientArgs, Norm, NormArgs,
    NormFunction, Optimizer, OptimizerArgs, Quantization, QuantizationArgs, QuantizedX, XFormat,
};

use crate::{
    ALIGNMENTS, COUNTS, Refused, Room, Try, bad_alignment, bad_stride, beyond_32_bits, stride_below, try_counts, weight,
};

#[test]
fn conversions_and_quantizations() {
    fn converted(room: &mut Room, conversion: &Conversion) -> Result<(), Error> {
        let plan = room.ctx.plan_conversion(conversion)?;
        let [d, ..] = &mut room.written[..] else { unreachable!() };
        plan.run(&room.ctx.default_stream(), ConversionArgs::new(&room.read, d))
    }
    fn of(rows: usize, columns: usize) -> Conversion {
        Conversion::new(rows, columns, DType::F32, DType::F32)
    }
    let cases: [(&str, Refused, Try); 5] = [
        ("Conversion.rows", beyond_32_bits, |room, n| converted(room, &of(n, 3))),
        ("Conversion.columns", beyond_32_bits, |room, n| converted(room, &of(2, n))),
        ("Conversion.d_columns", beyond_32_bits, |room, n| converted(room, &of(2, 3).d_columns(n))),
        (
            "Conversion.x_row_stride",
            |n| stride_below(3)(n),
            |room, n| converted(room, &of(2, 3).x_row_stride(n as u64)),
        ),
        (
            "Conversion.d_row_stride",
            |n| stride_below(3)(n),
            |room, n| converted(room, &of(2, 3).d_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts("Conversion.x_alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        converted(room, &of(2, 3).x_alignment(n))
    });
    try_counts("Conversion.d_alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        converted(room, &of(2, 3).d_alignment(n))
    });

    fn quantized(room: &mut Room, quantization: &Quantization) -> Result<(), Error> {
        let plan = room.ctx.plan_quantization(quantization)?;
        let [codes, scales, sums, ..] = &mut room.written[..] else { unreachable!() };
        let mut args = QuantizationArgs::new(&room.read, codes);
        (args.scales, args.sums) = (Some(scales.into()), Some(sums.into()));
        plan.run(&room.ctx.default_stream(), args)
    }
    fn q8_1(rows: usize, columns: usize) -> Quantization {
        Quantization::new(rows, columns, DType::F32, XFormat::Q8_1)
    }
    let cases: [(&str, Refused, Try); 6] = [
        ("Quantization.rows", beyond_32_bits, |room, n| quantized(room, &q8_1(n, 3))),
        ("Quantization.columns", beyond_32_bits, |room, n| quantized(room, &q8_1(2, n))),
        (
            "Quantization.x_row_stride",
            |n| stride_below(3)(n),
            |room, n| quantized(room, &q8_1(2, 3).x_row_stride(n as u64)),
        ),
        (
            "Quantization.codes_row_stride",
            |n| n < 32 || !n.is_multiple_of(16) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).codes_row_stride(n as u64)),
        ),
        (
            "Quantization.scales_row_stride",
            |n| n < 4 || !n.is_multiple_of(4) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).scales_row_stride(n as u64)),
        ),
        (
            "Quantization.sums_row_stride",
            |n| n < 4 || !n.is_multiple_of(4) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).sums_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let spans = [0, 1, 8, 16, 32, 64, usize::MAX];
    let no_span: Refused = |n| n != 16 && n != 32;
    try_counts("Quantization.sums_of", &spans, no_span, |room, n| quantized(room, &q8_1(2, 3).sums_of(n)));
    for (format, span) in XFormat::ALL.into_iter().flat_map(|format| spans.map(|span| (format, span))) {
        let parts = format.parts(false, Some(span));
        assert_eq!(parts.is_some(), !no_span(span) && format.plain().is_none(), "{format}.parts({span})");
        for (parts, k) in parts.into_iter().flat_map(|parts| COUNTS.map(|k| (parts, k))) {
            assert!(parts.columns(k) >= k && parts.scales(k) <= parts.columns(k).max(1), "{format}.columns({k})");
            assert!(parts.sums(k) <= parts.columns(k) && parts.code_bytes(k) <= parts.columns(k), "{format} of {k}");
        }
    }
    let ctx = Context::open("cpu").expect("always there");
    for (rows, columns) in COUNTS.into_iter().flat_map(|rows| COUNTS.map(|columns| (rows, columns))) {
        let made = QuantizedX::from_blocks(&ctx, ActivationFormat::Q8_1, rows, columns, &[]);
        let is_empty = (rows == 0 || columns == 0) && !beyond_32_bits(rows) && !beyond_32_bits(columns);
        assert_eq!(made.is_ok(), is_empty, "QuantizedX::from_blocks({rows}, {columns})");
    }
}

#[test]
fn norms_optimizers_and_gradients() {
    fn normed(room: &mut Room, norm: &Norm) -> Result<(), Error> {
        let plan = room.ctx.plan_norm(norm)?;
        let [d, sum, ..] = &mut room.written[..] else { unreachable!() };
        let mut args = NormArgs::new(&room.read, d);
        if plan.op().added.is_some() {
            (args.residual, args.sum) = (Some((&room.read).into()), Some(sum.into()));
        }
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of(rows: usize, columns: usize) -> Norm {
        Norm::new(rows, columns, DType::F32, NormFunction::rms(1e-5))
    }
    let cases: [(&str, Refused, Try); 7] = [
        ("Norm.rows", beyond_32_bits, |room, n| normed(room, &of(n, 3))),
        ("Norm.columns", beyond_32_bits, |room, n| normed(room, &of(2, n))),
        ("Norm.d_columns", |n| n < 3 || beyond_32_bits(n), |room, n| normed(room, &of(2, 3).d_columns(n))),
        ("Norm.x_row_stride", |n| stride_below(3)(n), |room, n| normed(room, &of(2, 3).x_row_stride(n as u64))),
        ("Norm.d_row_stride", |n| stride_below(3)(n), |room, n| normed(room, &of(2, 3).d_row_stride(n as u64))),
        (
            "Norm.residual_row_stride",
            |n| stride_below(3)(n),
            |room, n| normed(room, &of(2, 3).residual(DType::F32).residual_row_stride(n as u64)),
        ),
        (
            "Norm.sum_row_stride",
            |n| stride_below(3)(n),
            |room, n| normed(room, &of(2, 3).residual(DType::F32).sum_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 4] = [
        ("Norm.x_alignment", |room, n| normed(room, &of(2, 3).x_alignment(n))),
        ("Norm.d_alignment", |room, n| normed(room, &of(2, 3).d_alignment(n))),
        ("Norm.residual_alignment", |room, n| normed(room, &of(2, 3).residual(DType::F32).residual_alignment(n))),
        ("Norm.sum_alignment", |room, n| normed(room, &of(2, 3).residual(DType::F32).sum_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
    try_counts(
        "Optimizer.len",
        &COUNTS,
        |n| n > isize::MAX as usize / 4,
        |room, n| {
            let plan = room.ctx.plan_optimizer(&Optimizer::sgd(n))?;
            let [weights, ..] = &mut room.written[..] else { unreachable!() };
            plan.run(&room.ctx.default_stream(), OptimizerArgs::new(weights, &room.read, &room.read))
        },
    );
    fn gradient(room: &mut Room, gradient: &Gradient) -> Result<(), Error> {
        let weight = weight(&room.ctx);
        let plan = room.ctx.plan_gradient(&weight, gradient)?;
        let [dx, ..] = &mut room.written[..] else { unreachable!() };
        let args = GradientArgs::new(&room.read, &weight, dx).workspace(&mut room.workspace);
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of_tokens(tokens: usize) -> Gradient {
        Gradient::new(tokens, DType::F32, DType::F32)
    }
    let cases: [(&str, Refused, Try); 4] = [
        ("Gradient.tokens", beyond_32_bits, |room, n| gradient(room, &of_tokens(n))),
        ("Gradient.dy_row_stride", bad_stride, |room, n| gradient(room, &of_tokens(2).dy_row_stride(n as u64))),
        ("Gradient.dx_row_stride", bad_stride, |room, n| gradient(room, &of_tokens(2).dx_row_stride(n as u64))),
        ("Gradient.max_scratch", |_| false, |room, n| gradient(room, &of_tokens(2).max_scratch(n))),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts("Gradient.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        gradient(room, &of_tokens(2).alignment(n, 4))
    });
    try_counts("Gradient.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        gradient(room, &of_tokens(2).alignment(4, n))
    });
}

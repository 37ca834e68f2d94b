//! FP8 weight gradients: dY and X are quantized transposed and multiplied with block
//! scales along the tokens.
//!
//! Compared with an f64 gradient, the loss must be that of both quantizations.

use qgemm_api::{Buffer, Context, DType, Error, FactorFormat, Matmul, MatmulArgs, Quantization, QuantizedX, XFormat};

/// Not a multiple of the tokens per scale.
const TOKENS: usize = 700;
const OUTPUTS: usize = 48;
const INPUTS: usize = 72;
/// Quantization loss of one operand. The product has that of both.
const LOSS: f64 = 6.6e-4;

/// Nearly normal numbers without a pattern.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (0..12).map(|_| next()).sum()).collect()
}

/// Quantizes `tokens × features` along the tokens.
fn quantized(ctx: &Context, values: &[f32], features: usize) -> (Quantization, QuantizedX) {
    let tokens = values.len() / features;
    let quantization = Quantization::new(features, tokens, DType::F32, XFormat::E4M3Block).x_transposed();
    let plan = ctx.plan_quantization(&quantization).expect("is served");
    let mut made = ctx.allocate_x(&plan).expect("memory");
    let x = ctx.upload(values).expect("memory");
    plan.run(&ctx.default_stream(), made.args(&x)).expect("runs");
    (quantization, made)
}

/// `dYᵀ·X` over some tokens, in f64.
fn gradient(dy: &[f32], x: &[f32], tokens: std::ops::Range<usize>) -> Vec<f64> {
    let one = |output: usize, input: usize| -> f64 {
        tokens.clone().map(|t| f64::from(dy[t * OUTPUTS + output]) * f64::from(x[t * INPUTS + input])).sum()
    };
    (0..OUTPUTS * INPUTS).map(|i| one(i / INPUTS, i % INPUTS)).collect()
}

/// Relative error by energy.
fn loss(got: &[f32], expected: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).powi(2)).sum();
    error / expected.iter().map(|v| v * v).sum::<f64>()
}

fn multiply(ctx: &Context, matmul: &Matmul, args: MatmulArgs<'_>) {
    let plan = ctx.plan_matmul(matmul).expect("is served");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    plan.run(&ctx.default_stream(), args.workspace(&mut workspace)).expect("runs");
}

#[test]
fn a_gradient_loses_what_its_factors_lose() {
    let ctx = Context::open("cpu").expect("always there");
    let (dy, x) = (numbers(TOKENS * OUTPUTS, 1), numbers(TOKENS * INPUTS, 2));
    let ((of_dy, dy8), (of_x, x8)) = (quantized(&ctx, &dy, OUTPUTS), quantized(&ctx, &x, INPUTS));
    let held = numbers(OUTPUTS * INPUTS, 3);
    let mut dw = ctx.upload(&held).expect("memory");
    let matmul = Matmul::of_quantized(&of_dy, &of_x, DType::F32).expect("one format").accumulate(1.0);
    multiply(&ctx, &matmul, MatmulArgs::of_quantized(&dy8, &x8, &mut dw).expect("one format"));
    let got: Vec<f32> =
        ctx.download::<f32>(&dw).expect("fits").iter().zip(&held).map(|(got, held)| got - held).collect();
    let loss = loss(&got, &gradient(&dy, &x, 0..TOKENS));
    assert!(loss > LOSS && loss < 2.5 * LOSS, "{loss}");
}

#[test]
fn gradients_of_experts_begin_and_end_within_blocks() {
    let ctx = Context::open("cpu").expect("always there");
    let (dy, x) = (numbers(TOKENS * OUTPUTS, 4), numbers(TOKENS * INPUTS, 5));
    let ((of_dy, dy8), (of_x, x8)) = (quantized(&ctx, &dy, OUTPUTS), quantized(&ctx, &x, INPUTS));
    // The second group is empty, the third has a few tokens of one block, and no
    // group has the last token.
    let offsets = [0u32, 190, 190, 197, 384, 699];
    let products = offsets.len() - 1;
    let matmul = Matmul::of_quantized(&of_dy, &of_x, DType::F32).expect("one format").k_grouped(products);
    let mut dw: Buffer = ctx.upload(&vec![7.0f32; products * OUTPUTS * INPUTS]).expect("memory");
    let on_device = ctx.upload(&offsets).expect("memory");
    let args = MatmulArgs::of_quantized(&dy8, &x8, &mut dw).expect("one format").offsets(&on_device);
    multiply(&ctx, &matmul, args);
    let all = ctx.download::<f32>(&dw).expect("fits");
    for (product, got) in all.chunks(OUTPUTS * INPUTS).enumerate() {
        let tokens = offsets[product] as usize..offsets[product + 1] as usize;
        if tokens.is_empty() {
            assert!(got.iter().all(|&v| v == 0.0));
            continue;
        }
        let loss = loss(got, &gradient(&dy, &x, tokens.clone()));
        assert!(loss < 3.0 * LOSS, "{tokens:?}: {loss}");
    }
}

#[test]
fn products_of_another_form_are_refused() {
    let ctx = Context::open("cpu").expect("always there");
    let (of, f32) = (FactorFormat::E4M3Block, DType::F32);
    let nt = || Matmul::new([8, 8, 256], of, of, f32).b_transposed();
    let cases = [
        ("one factor", Matmul::new([8, 8, 256], of, f32, f32).b_transposed()),
        ("codes across K", Matmul::new([8, 8, 256], of, of, f32)),
        ("a batch", nt().batch(2)),
        ("a factor of all", nt().a_scaled()),
        ("scales of plain numbers", Matmul::new([8, 8, 256], f32, f32, f32).a_scale_row_stride(2)),
    ];
    for (what, matmul) in cases {
        let error = ctx.plan_matmul(&matmul).expect_err(what);
        assert!(matches!(error, Error::BlockScaledProduct { .. }), "{what}: {error}");
    }
    let overlapping = ctx.plan_matmul(&nt().b_scale_row_stride(1)).expect_err("two scales a row");
    assert!(matches!(overlapping, Error::StrideTooSmall { operand: "B's scales", expected: 2, got: 1 }));
    let to = |columns, format| Quantization::new(8, columns, f32, format);
    for (a, b) in [
        (to(256, XFormat::E4M3Block), to(128, XFormat::E4M3Block)),
        (to(256, XFormat::E4M3Block), to(256, XFormat::E4M3Token)),
    ] {
        let error = Matmul::of_quantized(&a, &b, f32).expect_err("they do not fit");
        assert!(matches!(error, Error::BlockScaledProduct { .. }), "{error}");
    }
    // Scales are required, in full.
    let codes = ctx.upload(&[0u8; 8 * 256]).expect("memory");
    let (scales, mut d) = (ctx.upload(&[1.0f32; 16]).expect("memory"), ctx.allocate(8 * 8 * 4).expect("memory"));
    let plan = ctx.plan_matmul(&nt()).expect("is served");
    let stream = ctx.default_stream();
    let missing = plan.run(&stream, MatmulArgs::new(&codes, &codes, &mut d).a_scale(&scales));
    assert!(matches!(missing, Err(Error::MissingOperand { operand: "B's scales", .. })), "{missing:?}");
    let short = scales.slice(0..60).expect("fits");
    let short = plan.run(&stream, MatmulArgs::new(&codes, &codes, &mut d).a_scale(&scales).b_scale(short));
    assert!(matches!(short, Err(Error::BufferTooShort { operand: "B's scales", expected: 64, got: 60 })), "{short:?}");
}

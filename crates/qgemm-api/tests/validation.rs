//! Invalid problems: each kind has its own typed error, and nothing is
//! launched or written. On the no-op device.

use qgemm_api::{
    Activation, Args, Buffer, Context, DType, DeviceId, DeviceKind, Error, ExpertProblem, Feature, FormatError,
    Gradient, HalError, HostWeight, Matmul, NormFunction, Plan, Problem, Weight, WeightOrder, XFormat, XPrecision,
    devices, quantize,
};

const N: usize = 5;
const K: usize = 64;
const M: usize = 3;

fn noop() -> Context {
    Context::open("noop").expect("always there")
}

fn host_weight(n: usize, k: usize) -> HostWeight {
    let values: Vec<f32> = (0..n * k).map(|i| (i % 13) as f32 - 6.0).collect();
    quantize(&values, n, k, "q4_0".parse().expect("a format")).expect("K suits").0
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&host_weight(N, K)).expect("memory")
}

#[test]
fn problems_are_checked_when_planned() {
    type Make = fn(Problem) -> Problem;
    type Expect = fn(&Error) -> bool;
    let table: &[(&str, usize, Make, Expect)] = &[
        (
            "X rows overlap",
            M,
            |p| p.x_row_stride(K as u64 - 1),
            |e| matches!(e, Error::StrideTooSmall { operand: "X", expected: 64, got: 63 }),
        ),
        (
            "columns of a transposed X overlap",
            M,
            |p| p.x_transposed().x_row_stride(2),
            |e| matches!(e, Error::StrideTooSmall { operand: "X", expected: 3, got: 2 }),
        ),
        (
            "D rows overlap",
            M,
            |p| p.d_row_stride(4),
            |e| matches!(e, Error::StrideTooSmall { operand: "D", expected: 5, got: 4 }),
        ),
        (
            "C rows overlap",
            M,
            |p| p.c(1.0, DType::F32).c_row_stride(0),
            |e| matches!(e, Error::StrideTooSmall { operand: "C", expected: 5, got: 0 }),
        ),
        (
            "rows of the residual overlap",
            M,
            |p| p.residual(DType::F16).residual_row_stride(4),
            |e| matches!(e, Error::StrideTooSmall { operand: "residual", expected: 5, got: 4 }),
        ),
        (
            "the residual overflows",
            M,
            |p| p.residual(DType::F32).residual_row_stride(1 << 61),
            |e| matches!(e, Error::ExtentOverflow { operand: "residual", .. }),
        ),
        (
            "an alignment below the residual's element",
            M,
            |p| p.residual(DType::BF16).residual_alignment(1),
            |e| matches!(e, Error::Misaligned { operand: "residual", expected: 2, got: 1 }),
        ),
        (
            "too many tokens for 32 bits",
            1 << 32,
            |p| p,
            |e| matches!(e, Error::DimensionTooLarge { name: "M", got: 0x1_0000_0000, limit: 0xffff_ffff }),
        ),
        (
            "stride overflows 64 bits",
            M,
            |p| p.x_row_stride(u64::MAX),
            |e| matches!(e, Error::ExtentOverflow { operand: "X", rows: 3, row_stride: u64::MAX }),
        ),
        (
            "stride overflows the address space, not 64 bits",
            M,
            |p| p.d_row_stride(1 << 60),
            |e| matches!(e, Error::ExtentOverflow { operand: "D", .. }),
        ),
        (
            "C overflows",
            M,
            |p| p.c(1.0, DType::F16).c_row_stride(u64::MAX / 2),
            |e| matches!(e, Error::ExtentOverflow { operand: "C", .. }),
        ),
        (
            "alpha is NaN",
            M,
            |p| p.alpha(f32::NAN),
            |e| matches!(e, Error::NonFiniteScalar { name: "alpha", got } if got.is_nan()),
        ),
        (
            "beta is infinite",
            M,
            |p| p.c(f32::INFINITY, DType::F32),
            |e| matches!(e, Error::NonFiniteScalar { name: "beta", got: f32::INFINITY }),
        ),
        (
            "an alignment of 0",
            M,
            |p| p.x_alignment(0),
            |e| matches!(e, Error::Misaligned { operand: "X", expected: 4, got: 0 }),
        ),
        (
            "an alignment below the element's",
            M,
            |p| p.d_alignment(2),
            |e| matches!(e, Error::Misaligned { operand: "D", expected: 4, got: 2 }),
        ),
        (
            "a family that does not exist",
            M,
            |p| p.family("magic"),
            |e| matches!(e, Error::Plan(_)) && e.to_string().contains("magic"),
        ),
        (
            "0 tokens do not excuse a bad stride",
            0,
            |p| p.d_row_stride(4),
            |e| matches!(e, Error::StrideTooSmall { .. }),
        ),
    ];
    let ctx = noop();
    let w = weight(&ctx);
    for (what, m, make, expected) in table {
        match ctx.plan(&make(Problem::new(&w, *m))) {
            Ok(_) => panic!("{what}: planned"),
            Err(error) => assert!(expected(&error), "{what}: {error:?}"),
        }
    }
}

/// Operands of one run, each replaceable.
struct Operands {
    x: Buffer,
    d: Buffer,
    c: Option<Buffer>,
    bias: Option<Buffer>,
    token_scale: Option<Buffer>,
    residual: Option<Buffer>,
}

impl Operands {
    fn fitting(ctx: &Context) -> Self {
        let f32s = |count: usize| ctx.allocate(4 * count).expect("memory");
        Self {
            x: f32s(M * K),
            d: f32s(M * N),
            c: Some(f32s(M * N)),
            bias: Some(f32s(N)),
            token_scale: Some(f32s(M)),
            residual: Some(f32s(M * N)),
        }
    }

    fn run(&mut self, ctx: &Context, plan: &Plan, w: &Weight) -> Result<(), Error> {
        let mut args = Args::new(&self.x, w, &mut self.d);
        args.c = self.c.as_ref().map(Into::into);
        args.bias = self.bias.as_ref().map(Into::into);
        args.token_scale = self.token_scale.as_ref().map(Into::into);
        args.residual = self.residual.as_ref().map(Into::into);
        plan.run(&ctx.default_stream(), args)
    }
}

#[test]
fn operands_are_checked_when_run() {
    type Change = fn(&mut Operands, &Context);
    type Expect = fn(&Error) -> bool;
    let table: &[(&str, Change, Expect)] = &[
        (
            "X is a byte short",
            |o, ctx| o.x = ctx.allocate(4 * M * K - 1).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "X", expected: 768, got: 767 }),
        ),
        (
            "D is a byte short",
            |o, ctx| o.d = ctx.allocate(4 * M * N - 1).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "D", expected: 60, got: 59 }),
        ),
        (
            "C is a byte short",
            |o, ctx| o.c = Some(ctx.allocate(4 * M * N - 1).expect("memory")),
            |e| matches!(e, Error::BufferTooShort { operand: "C", expected: 60, got: 59 }),
        ),
        (
            "the bias is a byte short",
            |o, ctx| o.bias = Some(ctx.allocate(4 * N - 1).expect("memory")),
            |e| matches!(e, Error::BufferTooShort { operand: "bias", expected: 20, got: 19 }),
        ),
        (
            "the token scales are a byte short",
            |o, ctx| o.token_scale = Some(ctx.allocate(4 * M - 1).expect("memory")),
            |e| matches!(e, Error::BufferTooShort { operand: "token scales", expected: 12, got: 11 }),
        ),
        (
            "the residual is a byte short",
            |o, ctx| o.residual = Some(ctx.allocate(4 * M * N - 1).expect("memory")),
            |e| matches!(e, Error::BufferTooShort { operand: "residual", expected: 60, got: 59 }),
        ),
        (
            "no token scales",
            |o, _| o.token_scale = None,
            |e| matches!(e, Error::MissingOperand { operand: "token scales", .. }),
        ),
        ("no residual", |o, _| o.residual = None, |e| matches!(e, Error::MissingOperand { operand: "residual", .. })),
        (
            "the residual on another device",
            |o, _| o.residual = Context::open("cpu").and_then(|c| c.allocate(4 * M * N)).ok(),
            |e| matches!(e, Error::WrongDevice { operand: "residual", got: DeviceId::CPU, .. }),
        ),
        (
            "the token scales on another device",
            |o, _| o.token_scale = Context::open("cpu").and_then(|c| c.allocate(4 * M)).ok(),
            |e| matches!(e, Error::WrongDevice { operand: "token scales", got: DeviceId::CPU, .. }),
        ),
        ("no C", |o, _| o.c = None, |e| matches!(e, Error::MissingOperand { operand: "C", .. })),
        ("no bias", |o, _| o.bias = None, |e| matches!(e, Error::MissingOperand { operand: "bias", .. })),
        (
            "X on another device",
            |o, _| o.x = Context::open("cpu").and_then(|c| c.allocate(4 * M * K)).expect("memory"),
            |e| matches!(e, Error::WrongDevice { operand: "X", got: DeviceId::CPU, .. }),
        ),
        (
            "D on another device",
            |o, _| o.d = Context::open("cpu").and_then(|c| c.allocate(4 * M * N)).expect("memory"),
            |e| matches!(e, Error::WrongDevice { operand: "D", got: DeviceId::CPU, .. }),
        ),
    ];
    let ctx = noop();
    let w = weight(&ctx);
    let problem = Problem::new(&w, M).c(0.5, DType::F32).bias(DType::F32).token_scale().residual(DType::F32);
    let plan = ctx.plan(&problem).expect("valid");
    Operands::fitting(&ctx).run(&ctx, &plan, &w).expect("everything fits");
    for (what, change, expected) in table {
        let mut operands = Operands::fitting(&ctx);
        change(&mut operands, &ctx);
        let error = operands.run(&ctx, &plan, &w).expect_err(what);
        assert!(expected(&error), "{what}: {error:?}");
    }
}

#[test]
fn operands_that_the_plan_does_not_read_are_refused() {
    let ctx = noop();
    let w = weight(&ctx);
    let mut operands = Operands::fitting(&ctx);
    let all = Problem::new(&w, M).c(1.0, DType::F32).bias(DType::F32);
    let plan = ctx.plan(&all.clone().residual(DType::F32)).expect("valid");
    assert!(matches!(operands.run(&ctx, &plan, &w), Err(Error::UnexpectedOperand { operand: "token scales" })));
    let plan = ctx.plan(&all.token_scale()).expect("valid");
    assert!(matches!(operands.run(&ctx, &plan, &w), Err(Error::UnexpectedOperand { operand: "residual" })));
    (operands.token_scale, operands.residual) = (None, None);
    let plan = ctx.plan(&Problem::new(&w, M).bias(DType::F32)).expect("valid");
    assert!(matches!(operands.run(&ctx, &plan, &w), Err(Error::UnexpectedOperand { operand: "C" })));
    let plan = ctx.plan(&Problem::new(&w, M).c(1.0, DType::F32)).expect("valid");
    assert!(matches!(operands.run(&ctx, &plan, &w), Err(Error::UnexpectedOperand { operand: "bias" })));
    // With beta = 0, C is part of the problem but not read.
    // Runs may pass it or not.
    let plan = ctx.plan(&Problem::new(&w, M).c(0.0, DType::F32).bias(DType::F32)).expect("valid");
    assert!(plan.op().c.is_none());
    operands.run(&ctx, &plan, &w).expect("C may be passed");
    operands.c = None;
    operands.run(&ctx, &plan, &w).expect("C may be left out");
}

/// A gradient belongs to the product alone. Operations before and after
/// it are refused by name.
#[test]
fn what_has_no_backward_is_refused() {
    let ctx = noop();
    let weight = weight(&ctx);
    let problem = || Problem::new(&weight, 3).x_dtype(DType::F16).d_dtype(DType::BF16).alpha(2.0);
    let refused = |problem: Problem| match Gradient::of(&problem).expect_err("no backward") {
        Error::NoBackward { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(refused(problem().norm(NormFunction::rms(1e-5))), "a norm of X");
    assert_eq!(refused(problem().activation(Activation::Silu)), "an activation");
    assert_eq!(refused(problem().token_scale()), "a factor of each token");
    assert_eq!(refused(problem().x_transposed()), "a transposed X");
    let quantized = Gradient::of(&problem().x_format(XFormat::Q8_0)).expect_err("codes");
    assert!(matches!(quantized, Error::XFormatNotServed { .. }), "{quantized}");
    let gradient = Gradient::of(&problem().bias(DType::F32)).expect("linear");
    assert_eq!(format!("{gradient:?}"), format!("{:?}", Gradient::new(3, DType::BF16, DType::F16).alpha(2.0)));
}

/// Rows of experts must be sorted before they have a gradient.
#[test]
fn forms_of_experts_without_backward_are_refused() {
    let ctx = noop();
    let experts = weight(&ctx).shared_by(3).expect("some");
    let typed = |problem: ExpertProblem| problem.each(|each| each.x_dtype(DType::F16).d_dtype(DType::BF16));
    let refused = |problem: ExpertProblem| match Gradient::of_experts(&problem).expect_err("no backward") {
        Error::NoBackward { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(refused(typed(ExpertProblem::masked(&experts, 4))), "a capacity for each expert");
    assert_eq!(refused(typed(ExpertProblem::indexed(&experts, 4, 2))), "slots in the order of tokens");
    let sorted = typed(ExpertProblem::contiguous(&experts, 8));
    assert_eq!(refused(sorted.clone().each(|each| each.activation(Activation::Silu))), "an activation");
    let gradient = Gradient::of_experts(&sorted).expect("linear");
    assert_eq!(format!("{gradient:?}"), format!("{:?}", Gradient::new(8, DType::BF16, DType::F16)));
    let transposed = Matmul::new([4, 4, 4], DType::F32, DType::F32, DType::F32).a_transposed().rows_grouped(2);
    assert!(matches!(ctx.plan_matmul(&transposed), Err(Error::RowsGroupedLayout)));
}

#[test]
fn gated_pairs_are_checked() {
    let ctx = noop();
    let host = host_weight(N, K);
    let mismatch = |up: &HostWeight| match ctx.load_gated(&host, up).expect_err("unlike") {
        Error::Format(FormatError::PairMismatch { what, gate, up }) => (what, gate, up),
        other => panic!("{other:?}"),
    };
    assert_eq!(mismatch(&host_weight(N + 1, K)), ("N", "5".to_owned(), "6".to_owned()));
    assert_eq!(mismatch(&host_weight(N, 2 * K)), ("K", "64".to_owned(), "128".to_owned()));
    let f32 = HostWeight::new("f32".parse().expect("a format"), N, K, vec![0; 4 * N * K].into()).expect("valid");
    assert_eq!(mismatch(&f32), ("format", "q4_0".to_owned(), "f32".to_owned()));

    let pair = ctx.load_gated(&host, &host).expect("alike");
    assert_eq!((pair.n(), pair.k(), pair.is_gated()), (N, K, true));
    let problem = || Problem::new(&pair, M).activation(Activation::Silu);
    let error = |problem: &Problem| ctx.plan(problem).expect_err("not valid");
    assert!(matches!(error(&Problem::new(&pair, M)), Error::MissingActivation));
    assert!(matches!(error(&problem().c(2.0, DType::F32)), Error::GatedWithC { beta: 2.0 }));
    assert!(matches!(error(&problem().d_row_stride(4)), Error::StrideTooSmall { operand: "D", expected: 5, got: 4 }));
    assert!(matches!(ctx.linear(&pair, &[0.0; M * K], M, XPrecision::Auto), Err(Error::MissingActivation)));

    // A gated pair has two biases; other operands have
    // the length of one weight.
    let plan = ctx.plan(&problem().bias(DType::F32).token_scale().residual(DType::F32)).expect("valid");
    let mut operands = Operands { c: None, ..Operands::fitting(&ctx) };
    let error = operands.run(&ctx, &plan, &pair).expect_err("one bias");
    assert!(matches!(error, Error::BufferTooShort { operand: "bias", expected: 40, got: 20 }), "{error:?}");
    operands.bias = Some(ctx.allocate(2 * 4 * N).expect("memory"));
    operands.run(&ctx, &plan, &pair).expect("everything fits");
    // Neither serves the other's plans, though both have five features.
    let single = ctx.load(&host).expect("memory");
    assert!(matches!(operands.run(&ctx, &plan, &single), Err(Error::WrongWeight { .. })));
    let plan = ctx.plan(&Problem::new(&single, M).activation(Activation::Silu)).expect("valid");
    assert!(matches!(operands.run(&ctx, &plan, &pair), Err(Error::WrongWeight { .. })));
}

#[test]
fn views_must_meet_the_alignment_that_was_planned_for() {
    let ctx = noop();
    let w = weight(&ctx);
    let x = ctx.allocate(4 * M * K + 16).expect("memory");
    let mut d = ctx.allocate(4 * M * N).expect("memory");
    let mut run = |problem: Problem, offset: usize| {
        let plan = ctx.plan(&problem).expect("valid");
        let x = x.slice(offset..offset + 4 * M * K).expect("in range");
        plan.run(&ctx.default_stream(), Args::new(x, &w, &mut d))
    };
    let wide = Problem::new(&w, M);
    run(wide.clone(), 16).expect("a multiple of 16");
    assert!(matches!(run(wide.clone(), 4), Err(Error::Misaligned { operand: "X", expected: 16, got: 4 })));
    run(wide.clone().x_alignment(4), 4).expect("as planned");
    assert!(matches!(run(wide.x_alignment(4), 2), Err(Error::Misaligned { operand: "X", expected: 4, got: 2 })));
}

#[test]
fn alignment_follows_from_strides_and_addresses() {
    let ctx = noop();
    let w = weight(&ctx);
    let op = |p: Problem| ctx.plan(&p).expect("valid").op().clone();
    assert!(op(Problem::new(&w, M)).x.aligned16);
    assert!(!op(Problem::new(&w, M)).d.aligned16, "rows of 5 floats");
    assert!(op(Problem::new(&w, M).d_row_stride(8)).d.aligned16);
    assert!(!op(Problem::new(&w, M).x_row_stride(65)).x.aligned16);
    assert!(!op(Problem::new(&w, M).x_alignment(8)).x.aligned16);
    assert!(!op(Problem::new(&w, 4).x_transposed()).x.aligned16, "columns are not contiguous");
}

#[test]
fn a_workspace_is_asked_for_and_measured() {
    let ctx = noop();
    let k = 4096;
    let w = ctx.load(&host_weight(1, k)).expect("memory");
    let plan = ctx.plan(&Problem::new(&w, 1)).expect("valid");
    let expected = plan.workspace_bytes();
    assert!(expected > 0, "one tile and a long K are worth splitting: {:?}", plan.launch());
    let (x, mut d) = (ctx.allocate(4 * k).expect("memory"), ctx.allocate(4).expect("memory"));
    let mut run = |workspace| {
        let mut args = Args::new(&x, &w, &mut d);
        args.workspace = workspace;
        plan.run(&ctx.default_stream(), args)
    };
    assert!(matches!(run(None), Err(Error::MissingOperand { operand: "workspace", .. })));
    let mut short = ctx.workspace(expected - 1).expect("memory");
    let error = run(Some(&mut short)).expect_err("too short");
    assert!(
        matches!(error, Error::BufferTooShort { operand: "workspace", expected: e, got } if e == expected && got == e - 1)
    );
    let cpu = Context::open("cpu").expect("always there");
    let mut foreign = cpu.workspace(expected).expect("memory");
    let error = run(Some(&mut foreign)).expect_err("on another device");
    assert!(matches!(error, Error::WrongDevice { operand: "workspace", got: DeviceId::CPU, .. }), "{error:?}");
    let mut fitting = ctx.workspace(expected).expect("memory");
    run(Some(&mut fitting)).expect("it fits");
    let unsplit = ctx.plan(&Problem::new(&w, 1).max_workspace(expected - 1)).expect("valid");
    assert!(unsplit.workspace_bytes() < expected, "the limit is respected");
}

#[test]
fn zero_tokens_launch_nothing() {
    let ctx = noop();
    let w = weight(&ctx);
    let plan = ctx.plan(&Problem::new(&w, 0)).expect("legal");
    assert_eq!((plan.workspace_bytes(), plan.kernel_name(), plan.macs()), (0, "none", 0.0));
    assert!(plan.launch().is_none());
    let (x, mut d) = (ctx.allocate(0).expect("memory"), ctx.allocate(0).expect("memory"));
    let args = Args::new(&x, &w, &mut d);
    plan.run(&ctx.default_stream(), args).expect("nothing to do");
    assert_eq!(ctx.linear(&w, &[], 0, XPrecision::Auto).expect("legal"), Vec::<f32>::new());
}

#[test]
fn a_plan_serves_weights_like_its_own_only() {
    let ctx = noop();
    let w = weight(&ctx);
    let plan = ctx.plan(&Problem::new(&w, M)).expect("valid");
    let mut operands = Operands { c: None, bias: None, token_scale: None, residual: None, ..Operands::fitting(&ctx) };
    operands.run(&ctx, &plan, &weight(&ctx)).expect("the same shape");
    let wider = ctx.load(&host_weight(N, K + 32)).expect("memory");
    let taller = ctx.load(&host_weight(N + 1, K)).expect("memory");
    let plain = ctx.load_dense(&[0; 4 * N * K], DType::F32, N, K, WeightOrder::NK).expect("memory");
    for other in [&wider, &taller, &plain] {
        let error = operands.run(&ctx, &plan, other).expect_err("another weight");
        assert!(matches!(error, Error::WrongWeight { .. }), "{error:?}");
    }
    assert_eq!(
        operands.run(&ctx, &plan, &plain).expect_err("another weight").to_string(),
        "weight: expected q4_0 of 5 x 64, layout Canonical, on noop, got f32 of 5 x 64, layout Canonical, on noop"
    );
}

#[test]
fn a_plan_for_any_values_serves_those_of_f16_but_not_the_reverse() {
    let ctx = noop();
    let of = |value: f32| {
        let values = DType::F32.encode(&[value; N * K]);
        ctx.load_dense(&values, DType::F32, N, K, WeightOrder::NK).expect("memory")
    };
    let (fit, unfit) = (of(1.0), of(1e9));
    assert_eq!((fit.fits_f16(), unfit.fits_f16()), (true, false));
    let plans = [&fit, &unfit].map(|w| ctx.plan(&Problem::new(w, M).x_dtype(DType::F32)).expect("valid"));
    assert_eq!(plans.each_ref().map(|p| p.op().weight_fits_f16), [true, false]);
    let mut operands = Operands { c: None, bias: None, token_scale: None, residual: None, ..Operands::fitting(&ctx) };
    operands.run(&ctx, &plans[1], &fit).expect("any values");
    let error = operands.run(&ctx, &plans[0], &unfit).expect_err("beyond f16");
    assert!(error.to_string().contains("with values unfit for f16"), "{error}");
}

#[test]
fn devices_do_not_mix() {
    let (noop, cpu) = (noop(), Context::open("cpu").expect("always there"));
    let w = weight(&noop);
    let error = cpu.plan(&Problem::new(&w, M)).expect_err("a foreign weight");
    assert!(matches!(error, Error::WrongDevice { operand: "weight", expected: DeviceId::CPU, .. }), "{error:?}");
    let plan = noop.plan(&Problem::new(&w, M)).expect("valid");
    let Operands { x, mut d, .. } = Operands::fitting(&noop);
    let args = Args::new(&x, &w, &mut d);
    let error = plan.run(&cpu.default_stream(), args).expect_err("a foreign stream");
    assert!(matches!(error, Error::WrongDevice { operand: "stream", got: DeviceId::CPU, .. }), "{error:?}");
}

#[test]
fn dense_weights_are_checked() {
    let ctx = noop();
    let load = |bytes: &[u8], n, k| ctx.load_dense(bytes, DType::F16, n, k, WeightOrder::KN).expect_err("nonsense");
    let short = load(&[0; 23], 3, 4);
    assert!(matches!(short, Error::Format(FormatError::WrongLength { expected: 24, got: 23, .. })), "{short:?}");
    assert!(matches!(load(&[], 0, 4), Error::Format(FormatError::ZeroDimension { name: "N" })));
    assert!(matches!(load(&[], 4, 0), Error::Format(FormatError::ZeroDimension { name: "K" })));
    assert!(matches!(load(&[], usize::MAX, 2), Error::Format(FormatError::Overflow { .. })));
}

#[test]
fn host_slices_are_checked() {
    let ctx = noop();
    let w = weight(&ctx);
    let error = ctx.linear(&w, &[0.0; K - 1], 1, XPrecision::Auto).expect_err("too short");
    assert!(matches!(error, Error::WrongLength { operand: "X", expected: 64, got: 63 }), "{error:?}");
    let error = ctx.linear(&w, &[], usize::MAX, XPrecision::Auto).expect_err("too many");
    assert!(matches!(error, Error::ExtentOverflow { operand: "X", .. }), "{error:?}");
    let error =
        ctx.linear_with(&w, &[0.0; K], 1, DType::F16, XPrecision::Auto, Some(&[0.0; N + 1])).expect_err("too long");
    assert!(matches!(error, Error::WrongLength { operand: "bias", expected: 5, got: 6 }), "{error:?}");
}

#[test]
fn device_names_are_checked() {
    for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0:0"] {
        let error = Context::open(name).expect_err(name);
        assert!(matches!(error, Error::UnknownDevice { .. }), "{name}: {error:?}");
    }
    for name in ["cpu:7", "noop:1"] {
        let error = Context::open(name).expect_err(name);
        assert!(matches!(error, Error::Hal(HalError::NoDevice { .. })), "{name}: {error:?}");
    }
}

#[test]
fn an_unknown_device_lists_auto_and_the_devices_of_this_build() {
    let error = Context::open("gpu").expect_err("no such device");
    let text = error.to_string();
    assert!(text.contains("`gpu`") && text.contains("auto") && text.contains("cpu"), "{text}");
    assert_eq!(text.contains("cuda:0"), cfg!(feature = "cuda"), "{text}");
    assert_eq!(text.contains("wgpu:0"), cfg!(feature = "wgpu"), "{text}");
    assert!(!text.contains("noop"), "{text}");
    // `fn main() -> Result<(), Error>` prints the `Debug` text.
    assert_eq!(format!("{error:?}"), text);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_backend_that_was_not_built_is_named() {
    let error = Context::open("cuda:0").expect_err("not built");
    assert!(matches!(error, Error::BackendNotBuilt { kind: DeviceKind::Cuda, feature: "cuda" }), "{error:?}");
}

#[test]
fn every_backend_is_listed_with_a_device_or_a_reason() {
    use qgemm_api::DeviceListing::{Absent, Found};
    let listed = devices();
    for kind in [DeviceKind::Cuda, DeviceKind::Wgpu, DeviceKind::Cpu] {
        assert!(listed.iter().any(|l| match l {
            Found(info) => info.id.kind == kind,
            Absent { kind: k, why } => *k == kind && !why.is_empty(),
            _ => false,
        }));
    }
    for listing in &listed {
        if let Found(info) = listing {
            assert_eq!(Context::open(&info.id.to_string()).expect("it is listed").info().id, info.id);
            assert_eq!(Context::open(info.id).expect("it is listed").info().id, info.id);
        }
    }
}

#[test]
fn auto_opens_the_best_real_device() {
    use qgemm_api::DeviceListing::Found;
    let best = devices().into_iter().find_map(|listing| match listing {
        Found(info) if !info.features.contains(&Feature::SoftwareAdapter) => Some(info.id),
        _ => None,
    });
    assert_eq!(Some(Context::open("auto").expect("the CPU at least").info().id), best);
}

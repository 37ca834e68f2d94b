//! Norms: refusals at planning and at a run, and empty
//! operations. The conformance suite checks kernels;
//! here, the norm of a sum must equal the norm
//! of the written sum.

use qgemm_api::{Context, DType, Error, Norm, NormArgs, NormFunction};

const RMS: NormFunction = NormFunction::rms(1e-6);

fn norm() -> Norm {
    Norm::new(3, 40, DType::F16, RMS)
}

#[test]
fn norms_are_checked_when_planned() {
    type Expect = fn(&Error) -> bool;
    let with_eps = |eps| Norm::new(1, 8, DType::F32, NormFunction::layer(eps));
    let table: [(&str, Norm, Expect); 13] = [
        ("an infinite eps", with_eps(f32::INFINITY), |e| matches!(e, Error::NonFiniteScalar { name: "eps", .. })),
        ("a negative eps", with_eps(-1e-6), |e| matches!(e, Error::NegativeEps { .. })),
        ("rows of X overlap", norm().x_row_stride(39), |e| {
            matches!(e, Error::StrideTooSmall { operand: "X", expected: 40, got: 39 })
        }),
        ("D overflows the address space", norm().d_row_stride(1 << 62), |e| {
            matches!(e, Error::ExtentOverflow { operand: "D", .. })
        }),
        ("an alignment below the element's", norm().x_alignment(1), |e| {
            matches!(e, Error::Misaligned { operand: "X", expected: 2, got: 1 })
        }),
        ("fewer columns of D", norm().d_columns(39), |e| matches!(e, Error::OutOfRange { least: 40, got: 39, .. })),
        ("columns of zeros alone", Norm::new(1, 0, DType::F32, RMS).d_columns(8), |e| {
            matches!(e, Error::NoColumns { d_columns: 8 })
        }),
        ("D of another type in the place of X", norm().d_dtype(DType::F32).d_in_place(), |e| {
            matches!(e, Error::InPlace { what: "D in the place of X", .. })
        }),
        ("more columns of D in the place of X", norm().d_columns(48).d_in_place(), |e| {
            matches!(e, Error::InPlace { what: "D in the place of X", .. })
        }),
        ("a sum in the place of no residual", norm().sum_in_place(), |e| matches!(e, Error::InPlace { .. })),
        ("a sum in the place of X without a residual", norm().sum_in_place_of_x(), |e| {
            matches!(e, Error::InPlace { .. })
        }),
        ("a sum in two places", norm().residual(DType::F16).sum_in_place().sum_in_place_of_x(), |e| {
            matches!(e, Error::InPlace { what: "the sum", .. })
        }),
        ("a sum of another type in place", norm().residual(DType::F16).sum_dtype(DType::F32).sum_in_place(), |e| {
            matches!(e, Error::InPlace { what: "the sum in the place of the residual", .. })
        }),
    ];
    let ctx = Context::open("noop").expect("always there");
    for (what, norm, expected) in table {
        let error = ctx.plan_norm(&norm).expect_err(what);
        assert!(expected(&error), "{what}: {error}");
    }
}

#[test]
fn operands_are_checked_when_run() {
    let ctx = Context::open("noop").expect("always there");
    let function = RMS.gamma(DType::F32);
    let plan = ctx.plan_norm(&Norm::new(2, 8, DType::F16, function).residual(DType::F16)).expect("a plan");
    let (x, short, gamma) = (ctx.allocate(32), ctx.allocate(30), ctx.allocate(32));
    let (x, short, gamma) = (x.expect("memory"), short.expect("memory"), gamma.expect("memory"));
    let (mut d, mut sum) = (ctx.allocate(32).expect("memory"), ctx.allocate(32).expect("memory"));
    let mut run = |change: fn(&mut NormArgs<'_>)| {
        let mut args = NormArgs::new(&x, &mut d).gamma(&gamma).residual(&x).sum(&mut sum);
        change(&mut args);
        plan.run(&ctx.default_stream(), args)
    };
    assert!(run(|_| ()).is_ok());
    let missing = |error: Result<(), Error>, expected| {
        assert!(matches!(error, Err(Error::MissingOperand { operand, .. }) if operand == expected), "{error:?}");
    };
    missing(run(|args| args.x = None), "X");
    missing(run(|args| args.gamma = None), "gamma");
    missing(run(|args| args.residual = None), "residual");
    missing(run(|args| args.sum = None), "sum");
    let unexpected = run(|args| args.beta = args.gamma);
    assert!(matches!(unexpected, Err(Error::UnexpectedOperand { operand: "beta" })), "{unexpected:?}");
    let args = NormArgs::new(&short, &mut d).gamma(&gamma).residual(&x).sum(&mut sum);
    let error = plan.run(&ctx.default_stream(), args).expect_err("too short");
    assert!(matches!(error, Error::BufferTooShort { operand: "X", expected: 32, got: 30 }), "{error}");
}

#[test]
fn nothing_is_launched_where_there_is_nothing() {
    let ctx = Context::open("cpu").expect("always there");
    let mut d = ctx.allocate(16).expect("memory");
    for (rows, columns) in [(0, 8), (3, 0), (0, 0)] {
        let plan = ctx.plan_norm(&Norm::new(rows, columns, DType::F32, RMS)).expect("a plan");
        assert_eq!((plan.kernel_name(), plan.kernel_id()), ("none", None));
        let x = ctx.allocate(16).expect("memory");
        plan.run(&ctx.default_stream(), NormArgs::new(&x, &mut d)).expect("nothing to do");
    }
}

#[test]
fn a_norm_of_a_sum_is_that_of_what_was_written() {
    let ctx = Context::open("cpu").expect("always there");
    let columns = 1000;
    let values = |by: f32| -> Vec<f32> { (0..columns).map(|i| (i as f32 * by).sin()).collect() };
    let (x, residual) = (DType::BF16.encode(&values(0.7)), DType::BF16.encode(&values(0.3)));
    let (x, residual) = (ctx.upload(&x).expect("memory"), ctx.upload(&residual).expect("memory"));
    let [mut fused, mut apart] = [(); 2].map(|()| ctx.allocate(columns * 4).expect("memory"));
    let mut sum = ctx.allocate(columns * 2).expect("memory");
    let norm = Norm::new(1, columns, DType::BF16, RMS).d_dtype(DType::F32);
    let plan = ctx.plan_norm(&norm.clone().residual(DType::BF16)).expect("a plan");
    let args = NormArgs::new(&x, &mut fused).residual(&residual).sum(&mut sum);
    plan.run(&ctx.default_stream(), args).expect("a run");
    let plan = ctx.plan_norm(&norm).expect("a plan");
    plan.run(&ctx.default_stream(), NormArgs::new(&sum, &mut apart)).expect("a run");
    let [fused, apart] = [&fused, &apart].map(|d| ctx.download::<u8>(d).expect("a download"));
    assert_eq!(fused, apart);
}

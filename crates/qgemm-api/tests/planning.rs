//! Plans for callers: cached, readable, and refused
//! for unsupported problems.

use std::sync::Barrier;

use qgemm_api::tuning::TunedTable;
use qgemm_api::{
    Args, Context, Conversion, DType, Error, Plan, Problem, Quantization, Weight, XFactor, XFormat, XPrecision, XRef,
    quantize,
};

const N: usize = 48;
const K: usize = 256;

fn weight(ctx: &Context) -> Weight {
    let values: Vec<f32> = (0..N * K).map(|i| (i % 13) as f32 - 6.0).collect();
    let (host, _) = quantize(&values, N, K, "q4_k".parse().expect("a format")).expect("K suits");
    ctx.load(&host).expect("memory")
}

/// Whether two plans share their kernels.
fn same(a: &Plan, b: &Plan) -> bool {
    std::ptr::eq(a.sequence().expect("it launches"), b.sequence().expect("it launches"))
}

#[test]
fn a_problem_is_planned_once() {
    for device in ["noop", "cpu"] {
        let ctx = Context::open(device).expect("always there");
        let w = weight(&ctx);
        let problem = |m| Problem::new(&w, m).x_dtype(DType::F16);
        let plan = |ctx: &Context, problem: Problem| ctx.plan(&problem).expect("served");
        let first = plan(&ctx, problem(3));
        assert!(same(&first, &plan(&ctx, problem(3))), "the same problem");
        assert!(
            same(&first, &plan(&ctx.clone(), Problem::new(&weight(&ctx), 3).x_dtype(DType::F16))),
            "another weight"
        );
        for other in [problem(4), problem(3).bias(DType::F32), problem(3).alpha(2.0), problem(3).max_workspace(1 << 20)]
        {
            assert!(!same(&first, &plan(&ctx, other)));
        }
        let tuned = ctx.clone().with_tuned(TunedTable::new());
        assert!(!same(&first, &plan(&tuned, problem(3))), "another table may choose another kernel");
        assert!(same(&first, &plan(&ctx, problem(3))), "which is no matter of the context it came from");
    }
}

#[test]
fn conversions_are_planned_once() {
    let ctx = Context::open("noop").expect("always there");
    let plan = |rows| ctx.plan_conversion(&Conversion::new(rows, 8, DType::F32, DType::F16)).expect("served");
    let same = |a, b| std::ptr::eq(plan(a).sequence().expect("it launches"), plan(b).sequence().expect("it launches"));
    assert!(same(3, 3) && !same(3, 4));
}

#[test]
fn more_problems_than_are_kept_can_be_planned() {
    let ctx = Context::open("noop").expect("always there");
    let w = weight(&ctx);
    let plan = |m| ctx.plan(&Problem::new(&w, m)).expect("served");
    let first = plan(1);
    for m in 2..=1024 + 1 {
        plan(m);
    }
    // An evicted plan is made again. A plan in use still runs.
    assert!(!same(&first, &plan(1)));
    let x = ctx.allocate(4 * K).expect("memory");
    let mut d = ctx.allocate(4 * N).expect("memory");
    let mut workspace = ctx.workspace(first.workspace_bytes()).expect("memory");
    let args = Args::new(&x, &w, &mut d).workspace(&mut workspace);
    first.run(&ctx.default_stream(), args).expect("valid arguments");
}

#[test]
fn threads_that_plan_the_same_at_once_share_it() {
    const THREADS: usize = 4;
    let ctx = Context::open("cpu").expect("always there");
    let (w, start) = (weight(&ctx), Barrier::new(THREADS));
    let plan = || {
        start.wait();
        ctx.plan(&Problem::new(&w, 7)).expect("served")
    };
    let plans: Vec<Plan> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(plan)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(plans.iter().all(|plan| same(plan, &plans[0])));
}

#[test]
fn a_plan_says_what_it_launches() {
    for device in ["noop", "cpu"] {
        let ctx = Context::open(device).expect("always there");
        let w = weight(&ctx);
        let plan = ctx.plan(&Problem::new(&w, 2).x_dtype(DType::F16).bias(DType::F32)).expect("served");
        let (id, text) = (plan.kernel_id().expect("it launches"), plan.to_string());
        assert_eq!(id.operation(), "gemm");
        assert!(plan.sequence().is_some_and(|s| s.steps().iter().any(|step| *step.kernel_id() == id)), "{text}");
        assert!(text.starts_with(&format!("{} for 2 x 48 x 256, q4_k", plan.kernel_name())), "{text}");
        assert!(plan.kernel_name().ends_with("_nt_q4_k_f16"), "{text}");
        for part in [id.to_string().as_str(), "<<<(", "read x", "constant the weight", "read the bias", "write d"] {
            assert!(text.contains(part), "no `{part}` in {text}");
        }
        assert!(!text.contains("the residual") && !text.contains("the column order"), "{text}");
        let none = ctx.plan(&Problem::new(&w, 0)).expect("valid");
        assert!(none.sequence().is_none() && none.kernel_id().is_none() && none.source_hash().is_none());
        let text = none.to_string();
        let is_told =
            text.starts_with("none for 0 x 48 x 256, q4_k") && text.ends_with(&format!(" on {device}, nothing to do"));
        assert!(is_told, "{text}");
    }
}

#[test]
fn quantized_activations_are_planned_and_others_than_those_planned_for_are_refused() {
    let ctx = Context::open("cpu").expect("always there");
    let w = weight(&ctx);
    let made = |quantization: &Quantization| {
        let plan = ctx.plan_quantization(quantization).expect("valid");
        ctx.allocate_x(&plan).expect("memory")
    };
    for format in XFormat::ALL {
        let problem = Problem::new(&w, 2).x_format(format);
        let plan = ctx.plan(&problem).expect("every format is served");
        assert_eq!((plan.op().x.format, plan.op().d.dtype), (format, format.plain().unwrap_or(DType::F32)));
        if format.plain().is_some() {
            continue;
        }
        // The CPU multiplies these codes directly. Others are dequantized first.
        let is_as_it_is = format == XFormat::Q8_1;
        assert_eq!(plan.kernel_name().ends_with("_nt_q4_k_q8_1"), is_as_it_is, "{}", plan.kernel_name());
        let refused = ctx.plan(&problem.x_transposed());
        assert!(matches!(refused, Err(Error::NotOfXFormat { format: of, .. }) if of == format), "{refused:?}");
        let narrow = Quantization::new(2, 32, DType::F32, format);
        let refused = ctx.plan(&Problem::new(&w, 2).x_quantization(&narrow));
        assert!(matches!(refused, Err(Error::WrongLength { expected: 256, got: 32, .. })), "{refused:?}");
        let run = |x: XRef<'_>| {
            let (factor, mut d) = (ctx.upload(&[1.0f32]).expect("memory"), ctx.allocate(2 * 48 * 4).expect("memory"));
            let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
            let mut args = Args::new(x, &w, &mut d).workspace(&mut workspace);
            let takes_factor = plan.op().x.planes.is_some_and(|planes| planes.parts.factor == XFactor::Given);
            args.x_factor = takes_factor.then_some((&factor).into());
            plan.run(&ctx.default_stream(), args)
        };
        run((&made(&Quantization::new(2, 256, DType::F32, format))).into()).expect("as planned");
        run((&made(&Quantization::new(3, 256, DType::F32, format))).into()).expect("a row more");
        let plain = ctx.upload(&[0.0f32; 512]).expect("memory");
        let other = if format == XFormat::Q8_1 { XFormat::MxFp8 } else { XFormat::Q8_1 };
        for wrong in [Quantization::new(1, 256, DType::F32, format), Quantization::new(2, 256, DType::F32, other)] {
            let refused = run((&made(&wrong)).into());
            assert!(matches!(refused, Err(Error::WrongX { expected, .. }) if expected == format), "{refused:?}");
        }
        let refused = run((&plain).into()).expect_err("numbers are no codes").to_string();
        assert!(refused.contains(format.name()) && refused.contains("plain numbers"), "{refused}");
    }
}

#[test]
fn what_a_checkpoint_states_of_activations_is_permitted() {
    let ctx = Context::open("cpu").expect("always there");
    let fp8 = |stated: Option<XFormat>| {
        let (host, _) = quantize(&[1.0; 64 * 256], 64, 256, "fp8_e4m3".parse().expect("a format")).expect("K suits");
        let weight = ctx.load(&host.with_stated_x(stated)).expect("memory");
        assert_eq!(weight.stated_x(), stated);
        weight
    };
    let permitted = |weight: &Weight, precision| {
        ctx.plan(&Problem::new(weight, 2).x_precision(precision)).expect("served").op().x_precision
    };
    for (stated, expected) in [
        (None, XPrecision::Auto),
        (Some(XFormat::E4M3Token), XPrecision::E4M3),
        (Some(XFormat::E4M3Block), XPrecision::E4M3),
        // A calibrated factor is the caller's to use.
        (Some(XFormat::E4M3Tensor), XPrecision::Auto),
    ] {
        assert_eq!(permitted(&fp8(stated), XPrecision::Auto), expected, "{stated:?}");
        assert_eq!(permitted(&fp8(stated), XPrecision::F16), XPrecision::F16, "{stated:?}: the caller's word counts");
    }
    // A plan that may round runs only with weights that state it. Any other
    // plan runs with all of them.
    let (silent, dynamic) = (fp8(None), fp8(Some(XFormat::E4M3Block)));
    let run = |planned: &Weight, with: &Weight| {
        let plan = ctx.plan(&Problem::new(planned, 2)).expect("served");
        let x = ctx.allocate(2 * 256 * 4).expect("memory");
        let mut d = ctx.allocate(2 * 64 * 4).expect("memory");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        plan.run(&ctx.default_stream(), Args::new(&x, with, &mut d).workspace(&mut workspace))
    };
    run(&silent, &dynamic).expect("rounds less");
    assert!(run(&dynamic, &silent).expect_err("not stated").to_string().contains("e4m3_1x128"));
}

#[test]
fn a_precision_is_a_permission_that_the_plan_keeps() {
    let ctx = Context::open("cpu").expect("always there");
    let w = weight(&ctx);
    for precision in XPrecision::ALL {
        let plan = ctx.plan(&Problem::new(&w, 2).x_precision(precision)).expect("served");
        let x_format = plan.launch().expect("it launches").config.x_format;
        let expected = if precision.allows_q8() { XFormat::Q8_256 } else { DType::F32.into() };
        assert_eq!(x_format, expected, "{precision}");
    }
}

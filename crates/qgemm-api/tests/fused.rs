//! Fused weights: separate outputs equal those of separate products,
//! and mismatches are refused.

use qgemm_api::{
    Args, Context, DType, Error, FormatError, FusedArgs, FusedProblem, HostWeight, NormFunction, Problem, XPrecision,
    quantize,
};

const K: usize = 96;
/// Segment borders that kernels support, and others.
const ROWS: [[usize; 3]; 2] = [[48, 32, 9], [40, 24, 9]];

/// Formats of segments that are one weight.
const ALIKE: [&str; 3] = ["q8_0"; 3];

/// Values between -1 and 1.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn weights(rows: [usize; 3], formats: [&str; 3]) -> Vec<HostWeight> {
    let weight = |(i, &n): (usize, &usize)| {
        let format = formats[i].parse().expect("a format");
        quantize(&values(n * K, i as u32), n, K, format).expect("valid").0
    };
    let mut all: Vec<HostWeight> = rows.iter().enumerate().map(weight).collect();
    // One weight has row scales.
    let scales = (0..rows[1]).map(|row| 0.5 + row as f32).collect();
    all[1] = all[1].clone().with_row_scale(scales).expect("as many as rows");
    all
}

/// X·Wᵀ + bias of each weight by its own plan, with normalized X.
fn separately(
    ctx: &Context,
    weights: &[HostWeight],
    x: &[f32],
    m: usize,
    gamma: &[f32],
    bias: &[f32],
) -> Vec<Vec<f32>> {
    let mut first = 0;
    let one = |weight: &HostWeight| {
        let loaded = ctx.load(weight).expect("memory");
        let problem = Problem::new(&loaded, m).norm(NormFunction::rms(1e-5).gamma(DType::F32)).bias(DType::F32);
        let plan = ctx.plan(&problem).expect("served");
        let (x, gamma) = (ctx.upload(x).expect("memory"), ctx.upload(gamma).expect("memory"));
        let own = ctx.upload(&bias[first..first + weight.n()]).expect("memory");
        first += weight.n();
        let mut d = ctx.allocate(m * weight.n() * 4).expect("memory");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let args = Args::new(&x, &loaded, &mut d).gamma(&gamma).bias(&own).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("fits");
        ctx.download::<f32>(&d).expect("there")
    };
    weights.iter().map(one).collect()
}

#[test]
fn outputs_are_those_of_each_weight() {
    let ctx = Context::open("cpu").expect("always there");
    for rows in ROWS {
        check_outputs(&ctx, rows, ALIKE, 1);
        check_outputs(&ctx, rows, ["q8_0", "q8_0", "q5_1"], 2);
        check_outputs(&ctx, rows, ["q4_0", "q8_0", "q8_0"], 2);
        check_outputs(&ctx, rows, ["f16", "q8_0", "f16"], 3);
    }
}

/// Outputs of segments that are `products` weights.
fn check_outputs(ctx: &Context, rows: [usize; 3], formats: [&str; 3], products: usize) {
    let weights = weights(rows, formats);
    let fused = ctx.load_fused(&weights.iter().collect::<Vec<_>>()).expect("alike");
    assert_eq!((fused.weights().count(), fused.weight().is_some()), (products, products == 1));
    let (first, n) = (rows[0], rows.iter().sum::<usize>());
    assert_eq!((fused.segments(), fused.columns(1), fused.columns(3)), (3, Some(first..first + rows[1]), None));
    for m in [1, 5, 33] {
        let (x, gamma, bias) = (values(m * K, 7), values(K, 8), values(n, 9));
        let expected = separately(ctx, &weights, &x, m, &gamma, &bias);
        let stride = rows[2] + 3;
        let problem = FusedProblem::new(&fused, m, DType::F32)
            .each(|p| p.norm(NormFunction::rms(1e-5).gamma(DType::F32)).bias(DType::F32))
            .output_dtype(1, DType::BF16)
            .output_row_stride(2, stride as u64);
        let plan = ctx.plan_fused(&problem).expect("served");
        // One launch for the outputs of a weight, after the norm's, if kernels support the borders.
        if products == 1 {
            let launches = if first.is_multiple_of(16) { 2 } else { 5 };
            assert_eq!(plan.to_string().matches("<<<").count(), launches, "{plan}");
        }
        let (x, gamma, bias) = (ctx.upload(&x), ctx.upload(&gamma), ctx.upload(&bias));
        let (x, gamma, bias) = (x.expect("memory"), gamma.expect("memory"), bias.expect("memory"));
        let mut q = ctx.allocate(m * rows[0] * 4).expect("memory");
        let mut k = ctx.allocate(m * rows[1] * 2).expect("memory");
        let mut v = ctx.upload(&vec![f32::NAN; m * stride]).expect("memory");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let outputs = &mut [(&mut q).into(), (&mut k).into(), (&mut v).into()];
        let mut args = FusedArgs::new(&x, &fused, outputs, &mut workspace);
        (args.gamma, args.bias) = (Some((&gamma).into()), Some((&bias).into()));
        plan.run(&ctx.default_stream(), args).expect("fits");

        let near = |got: &[f32], expected: &[f32], limit: f32| {
            let fits = |(got, expected): (&f32, &f32)| (got - expected).abs() <= limit * expected.abs().max(1.0);
            assert!(got.iter().zip(expected).all(fits), "{m} tokens");
        };
        near(&ctx.download::<f32>(&q).expect("there"), &expected[0], 1e-5);
        near(&DType::BF16.decode(&ctx.download::<u8>(&k).expect("there")), &expected[1], 4e-3);
        let v = ctx.download::<f32>(&v).expect("there");
        for (got, expected) in v.chunks(stride).zip(expected[2].chunks(rows[2])) {
            near(&got[..rows[2]], expected, 1e-5);
            assert!(got[rows[2]..].iter().all(|gap| gap.is_nan()), "gaps stay as they are");
        }
    }
}

#[test]
fn what_is_not_alike_is_refused() {
    let ctx = Context::open("noop").expect("always there");
    let weights = weights(ROWS[1], ALIKE);
    let other = quantize(&values(8 * 64, 1), 8, 64, "q8_0".parse().expect("a format")).expect("valid").0;
    let wrong = ctx.load_fused(&[&weights[0], &other]).expect_err("another K");
    assert!(matches!(wrong, Error::Format(FormatError::PartMismatch { what: "K", .. })), "{wrong}");
    assert!(matches!(ctx.load_fused(&[]), Err(Error::Format(FormatError::NoParts))));

    let fused = ctx.load_fused(&weights.iter().collect::<Vec<_>>()).expect("alike");
    let problem = || FusedProblem::new(&fused, 2, DType::F16);
    let none = ctx.plan_fused(&problem().output_dtype(3, DType::F32)).expect_err("no such segment");
    assert!(matches!(none, Error::OutOfRange { name: "segment", most: 2, got: 3, .. }), "{none}");
    let mixed = self::weights(ROWS[0], ["q8_0", "q4_0", "q4_0"]);
    let mixed = ctx.load_fused(&mixed.iter().collect::<Vec<_>>()).expect("of one K");
    let residual = ctx.plan_fused(&FusedProblem::new(&mixed, 2, DType::F16).each(|p| p.residual(DType::F16)));
    assert!(matches!(residual, Err(Error::NotForFused { what: "C or a residual", .. })), "{residual:?}");
    let stride = ctx.plan_fused(&problem().output_row_stride(0, 39)).expect_err("rows overlap");
    assert!(matches!(stride, Error::StrideTooSmall { expected: 40, got: 39, .. }), "{stride}");
    let direct = ctx.load_fused(&self::weights(ROWS[0], ALIKE).iter().collect::<Vec<_>>()).expect("alike");
    let stride = ctx.plan_fused(&FusedProblem::new(&direct, 2, DType::F16).output_row_stride(1, 31));
    let stride = stride.expect_err("rows overlap");
    assert!(
        matches!(stride, Error::StrideTooSmall { operand: "d of segment 2", expected: 32, got: 31, .. }),
        "{stride}"
    );
    let in_d = ctx.plan_fused(&problem().each(|p| p.residual_in_d())).expect_err("there is no such D");
    assert!(matches!(in_d, Error::NotForFused { what: "a residual in D", .. }), "{in_d}");

    let plan = ctx.plan_fused(&problem()).expect("served");
    let (x, mut d) = (ctx.allocate(2 * K * 2).expect("memory"), ctx.allocate(160).expect("memory"));
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let args = FusedArgs::new(&x, &fused, std::slice::from_mut(Box::leak(Box::new((&mut d).into()))), &mut workspace);
    let few = plan.run(&ctx.default_stream(), args).expect_err("three segments");
    assert!(matches!(few, Error::OutputsMismatch { expected: 3, got: 1 }), "{few}");
}

/// Plans share a workspace: the results that a fused
/// plan keeps there must not lie in the counters
/// of split tiles.
#[test]
fn a_fused_plan_leaves_the_workspace_ready_for_a_split_product() {
    let test = "a_fused_plan_leaves_the_workspace_ready_for_a_split_product";
    const M: usize = 4;
    let dense = |n: usize, k: usize, seed| {
        quantize(&values(n * k, seed), n, k, "f32".parse().expect("a format")).expect("valid").0
    };
    for device in ["emu:sm80", "cuda:0"] {
        let Some(ctx) = qgemm_testkit::open_or_skip(test, device) else { continue };
        let fused = ctx.load_fused(&[&dense(64, 64, 1), &dense(64, 64, 2)]).expect("alike");
        let exact = |p: Problem| p.x_precision(XPrecision::Exact);
        let plan = ctx.plan_fused(&FusedProblem::new(&fused, M, DType::F32).each(exact)).expect("served");
        let split = ctx.load(&dense(64, 256, 3)).expect("memory");
        let product = ctx.plan(&exact(Problem::new(&split, M))).expect("served");
        let is_tested = product.workspace_bytes() > 0 && plan.workspace_bytes() > 0;
        if !is_tested {
            qgemm_testkit::skipped(&format!("{test} on {device}"), "one of the plans needs no workspace");
            continue;
        }
        let mut workspace = ctx.workspace(plan.workspace_bytes().max(product.workspace_bytes())).expect("memory");
        let x = ctx.upload(&values(M * 256, 4)).expect("memory");
        let [mut a, mut b] = [(); 2].map(|()| ctx.allocate(M * 64 * 4).expect("memory"));
        let run = |workspace: &mut _| {
            let mut d = ctx.allocate(M * 64 * 4).expect("memory");
            let args = Args::new(&x, &split, &mut d).workspace(workspace);
            product.run(&ctx.default_stream(), args).expect("fits");
            ctx.download::<f32>(&d).expect("there")
        };
        let expected = run(&mut workspace);
        let outputs = &mut [(&mut a).into(), (&mut b).into()];
        let args = FusedArgs::new(&x, &fused, outputs, &mut workspace);
        plan.run(&ctx.default_stream(), args).expect("fits");
        assert_eq!(run(&mut workspace), expected, "{device}");
    }
}

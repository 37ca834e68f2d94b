//! Split-K on an adapter. The few threads of a software adapter
//! gain nothing, so the cost model would not choose it there.

use qgemm_api::{Activation, Args, Context, DType, Plan, Problem, Weight, XPrecision, quantize};

const TOKENS: usize = 3;
const FEATURES: usize = 20;
/// Two parts, long enough for software adapters. With many more
/// columns llvmpipe ends the loops of an unsplit kernel early.
const COLUMNS: usize = 2 * 16384 + 64;

/// Integers up to `most`, with exact sums in any order.
fn integers(count: usize, most: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((((i * 31 + seed) * 2_654_435_761) >> 7) % (most + 1)) as f32).collect()
}

fn problem(weight: &Weight, tokens: usize, precision: XPrecision) -> Problem {
    let problem = Problem::new(weight, tokens).x_dtype(DType::F32).d_dtype(DType::F32).x_precision(precision);
    problem.alpha(0.5).bias(DType::F32).residual(DType::F16).activation(Activation::Relu)
}

/// Result of `plan`, twice, on a workspace
/// that others have used.
fn run(ctx: &Context, plan: &Plan, weight: &Weight, tokens: usize) -> Vec<f32> {
    let stream = ctx.default_stream();
    let x = ctx.upload(&integers(tokens * COLUMNS, 1, 1)).expect("small");
    let bias = ctx.upload(&integers(FEATURES, 9, 2)).expect("small");
    let residual = ctx.upload(&DType::F16.encode(&integers(tokens * FEATURES, 9, 3))).expect("small");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("small");
    let mut once = || -> Vec<f32> {
        let mut d = ctx.allocate(tokens * FEATURES * 4).expect("small");
        let args = Args::new(&x, weight, &mut d).bias(&bias).residual(&residual).workspace(&mut workspace);
        plan.run(&stream, args).expect("all given");
        ctx.download(&d).expect("readable")
    };
    let first = once();
    assert_eq!(first, once(), "the bits of every run are the same");
    first
}

#[test]
fn parts_of_k_add_up_to_the_whole() {
    let ctx = match Context::open("wgpu:0") {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped("parts_of_k_add_up_to_the_whole", &why.to_string()),
    };
    let mut values = integers(FEATURES * COLUMNS, 15, 4);
    // Scales of 1 keep the values integers.
    values.chunks_mut(32).for_each(|block| block[0] = 127.0);
    let (host, _) = quantize(&values, FEATURES, COLUMNS, "q8_0".parse().expect("a format")).expect("finite");
    let weight = ctx.load(&host).expect("small");
    let mut seen = Vec::new();
    for (tokens, precision) in
        [(1, XPrecision::Exact), (TOKENS, XPrecision::Exact), (TOKENS, XPrecision::Int8), (20, XPrecision::Int8)]
    {
        let all = ctx.candidates(&problem(&weight, tokens, precision)).expect("served");
        for family in ["gemv", "gemm", "gemv_int8", "gemm_int8"] {
            let of_family: Vec<_> = all.iter().filter(|candidate| candidate.launch().config.family == family).collect();
            let Some(whole) = of_family.iter().find(|candidate| candidate.launch().splits == 1) else { continue };
            let expected = run(&ctx, &ctx.plan_candidate(whole).expect("ready"), &weight, tokens);
            assert!(expected.iter().any(|&value| value > 100.0));
            for candidate in of_family.iter().filter(|candidate| candidate.launch().splits == 2) {
                let plan = ctx.plan_candidate(candidate).expect("ready");
                let got = run(&ctx, &plan, &weight, tokens);
                let exact = !family.ends_with("int8");
                let is_near = |(got, expected): (&f32, &f32)| (got - expected).abs() <= 1e-5 * expected.abs();
                assert!(
                    if exact { got == expected } else { got.iter().zip(&expected).all(is_near) },
                    "{:?}",
                    candidate.launch()
                );
                seen.push(family);
                assert!(plan.record().expect("planned").to_string().contains("split along K"));
            }
        }
    }
    assert!(["gemv", "gemm", "gemv_int8", "gemm_int8"].iter().all(|family| seen.contains(family)), "{seen:?}");
}

#[test]
fn k_is_whole_where_a_row_must_not_depend_on_its_batch() {
    let ctx = match Context::open("wgpu:0") {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped("k_is_whole_where_a_row_must_not_depend", &why.to_string()),
    };
    let format = "q4_0".parse().expect("a format");
    let weight = ctx.load(&quantize(&vec![0.5; 16 * COLUMNS], 16, COLUMNS, format).expect("finite").0).expect("small");
    let all = ctx.candidates(&Problem::new(&weight, 1).batch_invariant(true)).expect("served");
    assert!(all.iter().all(|candidate| candidate.launch().splits == 1));
    let all = ctx.candidates(&Problem::new(&weight, 1)).expect("served");
    assert!(all.iter().any(|candidate| candidate.launch().splits == 2));
}

//! `Plan::run` only launches: it allocates nothing, so it can run in a real-time thread and in a graph capture.

use qgemm_api::{Args, Context, DType, Problem, quantize};

/// Allocations of this thread in 100 runs of a warm plan with every optional operand.
fn allocations(device: &str, m: usize) -> u64 {
    let ctx = Context::open(device).expect("always there");
    let (n, k) = (24, 256);
    let values: Vec<f32> = (0..n * k).map(|i| (i % 17) as f32 - 8.0).collect();
    let (host, _) = quantize(&values, n, k, "q4_0".parse().expect("a format")).expect("K suits");
    let weight = ctx.load(&host).expect("memory");
    let problem = Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32).c(0.5, DType::F32).bias(DType::F32);
    let plan = ctx.plan(&problem).expect("valid");
    let x = ctx.allocate(2 * m * k).expect("memory");
    let c = ctx.allocate(4 * m * n).expect("memory");
    let bias = ctx.allocate(4 * n).expect("memory");
    let mut d = ctx.allocate(4 * m * n).expect("memory");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let stream = ctx.default_stream();
    let mut run = || {
        let args = Args {
            c: Some((&c).into()),
            bias: Some((&bias).into()),
            workspace: Some(&mut workspace),
            ..Args::new((&x).into(), &weight, (&mut d).into())
        };
        plan.run(&stream, args).expect("valid arguments");
    };
    run();
    allocation_counter::measure(|| (0..100).for_each(|_| run())).count_total
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocation_counter::measure(|| drop(vec![0u8; 8])).count_total, 1);
}

#[test]
fn the_api_allocates_nothing() {
    assert_eq!([allocations("noop", 1), allocations("noop", 64)], [0, 0]);
}

#[test]
fn the_cpu_backend_allocates_nothing() {
    assert_eq!([allocations("cpu", 1), allocations("cpu", 64)], [0, 0]);
}

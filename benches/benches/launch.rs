//! What planning and launching cost the host, on a device that computes nothing.

use criterion::{Criterion, criterion_group, criterion_main};
use qgemm_api::{Args, Context, DType, Problem};
use qgemm_benches::{SIZE, weight};

fn planning_and_launching(criterion: &mut Criterion) {
    let ctx = Context::open("noop").expect("the no-op device is always there");
    let weight = ctx.load(&weight("q4_k")).expect("enough memory");
    let problem = Problem::new(&weight, 8).x_dtype(DType::F16);
    criterion.bench_function("plan", |b| b.iter(|| ctx.plan(&problem).expect("a plan")));

    let plan = ctx.plan(&problem).expect("a plan");
    let x = ctx.allocate(8 * SIZE * DType::F16.bytes()).expect("enough memory");
    let mut d = ctx.allocate(8 * SIZE * DType::F16.bytes()).expect("enough memory");
    let stream = ctx.default_stream();
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("enough memory");
    criterion.bench_function("run", |b| {
        b.iter(|| {
            let args = Args { workspace: Some(&mut workspace), ..Args::new((&x).into(), &weight, (&mut d).into()) };
            plan.run(&stream, args).expect("a launch");
        });
    });
}

criterion_group!(benches, planning_and_launching);
criterion_main!(benches);

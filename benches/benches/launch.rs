//! Host cost of planning and launching.
//!
//! Planning runs on the CPU, on the no-op device, and on an
//! emulated GPU with CUDA's kernels. Launching runs on the no-op
//! device. A small CPU product is measured as a whole.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use qgemm_api::tuning::TunedTable;
use qgemm_api::{Args, Context, Conversion, DType, Problem, quantize};
use qgemm_benches::{SIZE, weight};

/// Planning of a new problem with ready
/// kernels, and of a known one.
fn planning(criterion: &mut Criterion) {
    for device in ["noop", "cpu", "emu:sm90"] {
        let Ok(ctx) = Context::open(device) else {
            eprintln!("skipped: {device} is not there");
            continue;
        };
        let weight = ctx.load(&weight("q4_k")).expect("enough memory");
        let problem = Problem::new(&weight, 8).x_dtype(DType::F16);
        let conversion = Conversion::new(8, SIZE, DType::F32, DType::F16);
        // A context with a new table has no cached plans.
        let unseen = || ctx.clone().with_tuned(TunedTable::new());
        criterion.bench_function(&format!("plan unseen on {device}"), |b| {
            b.iter_batched(unseen, |ctx| ctx.plan(&problem).expect("a plan"), BatchSize::SmallInput);
        });
        criterion.bench_function(&format!("plan seen on {device}"), |b| b.iter(|| ctx.plan(&problem).expect("a plan")));
        criterion.bench_function(&format!("plan conversion unseen on {device}"), |b| {
            b.iter_batched(unseen, |ctx| ctx.plan_conversion(&conversion).expect("a plan"), BatchSize::SmallInput);
        });
        criterion.bench_function(&format!("plan conversion seen on {device}"), |b| {
            b.iter(|| ctx.plan_conversion(&conversion).expect("a plan"));
        });
    }
}

fn launching(criterion: &mut Criterion) {
    let ctx = Context::open("noop").expect("the no-op device is always there");
    let weight = ctx.load(&weight("q4_k")).expect("enough memory");
    let problem = Problem::new(&weight, 8).x_dtype(DType::F16);
    let plan = ctx.plan(&problem).expect("a plan");
    let x = ctx.allocate(8 * SIZE * DType::F16.bytes()).expect("enough memory");
    let mut d = ctx.allocate(8 * SIZE * DType::F16.bytes()).expect("enough memory");
    let stream = ctx.default_stream();
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("enough memory");
    criterion.bench_function("run", |b| {
        b.iter(|| {
            let args = Args::new(&x, &weight, &mut d).workspace(&mut workspace);
            plan.run(&stream, args).expect("a launch");
        });
    });
}

/// One token and a small weight in cache, as in sentence encoders:
/// the cost of waking threads shows.
fn small_product(criterion: &mut Criterion) {
    const SMALL: usize = 384;
    let ctx = Context::open("cpu").expect("always there");
    let values: Vec<f32> = (0..SMALL * SMALL).map(|i| (i % 13) as f32 - 6.0).collect();
    for format in ["q8_0", "f16"] {
        let (host, _) = quantize(&values, SMALL, SMALL, format.parse().expect("a format")).expect("K suits");
        let weight = ctx.load(&host).expect("enough memory");
        let plan = ctx.plan(&Problem::new(&weight, 1)).expect("a plan");
        let x = ctx.upload(&[0.5f32; SMALL]).expect("enough memory");
        let mut d = ctx.allocate(SMALL * DType::F32.bytes()).expect("enough memory");
        let stream = ctx.default_stream();
        criterion.bench_function(&format!("run 1x{SMALL}x{SMALL} {format} on cpu"), |b| {
            b.iter(|| plan.run(&stream, Args::new(&x, &weight, &mut d)).expect("a launch"));
        });
    }
}

criterion_group!(benches, planning, launching, small_product);
criterion_main!(benches);

//! Cost of `Plan::run`, which only launches: without allocations,
//! it suits real-time threads and graph captures. Planning is
//! cheap, and nearly free for known problems.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use qgemm_api::cpu::open_with_pool;
use qgemm_api::cpu::rayon::{self, ThreadPoolBuilder};
use qgemm_api::tuning::TunedTable;
use qgemm_api::{
    Args, Buffer, Context, Conversion, ConversionArgs, DType, Problem, Weight, Workspace, XPrecision, quantize,
};

fn weight(ctx: &Context, n: usize, k: usize) -> Weight {
    let values: Vec<f32> = (0..n * k).map(|i| (i % 17) as f32 - 8.0).collect();
    let (host, _) = quantize(&values, n, k, "q4_0".parse().expect("a format")).expect("K suits");
    ctx.load(&host).expect("memory")
}

/// Allocations of this thread in 100 runs of a cached plan with all
/// optional operands.
fn allocations(ctx: &Context, m: usize) -> u64 {
    let (n, k) = (24, 256);
    let weight = weight(ctx, n, k);
    let problem = Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32).c(0.5, DType::F32).bias(DType::F32);
    let plan = ctx.plan(&problem).expect("valid");
    let x = ctx.allocate(2 * m * k).expect("memory");
    let c = ctx.allocate(4 * m * n).expect("memory");
    let bias = ctx.allocate(4 * n).expect("memory");
    let mut d = ctx.allocate(4 * m * n).expect("memory");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let stream = ctx.default_stream();
    let mut run = || {
        let args = Args::new(&x, &weight, &mut d).c(&c).bias(&bias).workspace(&mut workspace);
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
    let ctx = Context::open("noop").expect("always there");
    assert_eq!([1, 64].map(|m| allocations(&ctx, m)), [0, 0]);
}

/// With one thread, no product enters a pool, whose queue
/// allocates.
#[test]
fn the_cpu_backend_allocates_nothing() {
    let pool = ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    let ctx = Context::from_device(open_with_pool(Arc::new(pool)));
    assert_eq!([1, 64].map(|m| allocations(&ctx, m)), [0, 0]);
}

#[test]
fn a_layer_that_was_prepared_allocates_nothing() {
    let ctx = Context::open("cpu").expect("always there");
    let (n, k, m) = (24, 256, 3);
    let layer = ctx.layer(&weight(&ctx, n, k), |problem| problem.x_dtype(DType::F16).residual_in_d()).expect("valid");
    let mut workspace = ctx.workspace(layer.prepare(1..=4).expect("valid")).expect("memory");
    let (x, mut d) = (ctx.allocate(2 * m * k).expect("memory"), ctx.allocate(2 * m * n).expect("memory"));
    let stream = ctx.default_stream();
    let mut run = || {
        layer.run(&stream, m, layer.args(&x, &mut d).workspace(&mut workspace)).expect("valid arguments");
    };
    run();
    assert_eq!(allocation_counter::measure(|| (0..100).for_each(|_| run())).count_total, 0);
}

/// Allocations in `runs` of a cached plan for `m` tokens, with a
/// pool of two threads: of the calling thread, and of the pool.
fn allocations_of_all_threads(m: usize, runs: u64) -> [u64; 2] {
    const THREADS: usize = 2;
    let pool = ThreadPoolBuilder::new().num_threads(THREADS).build().expect("threads");
    let pool = Arc::new(pool);
    let ctx = Context::from_device(open_with_pool(pool.clone()));
    let (n, k) = (1024, 1024);
    let weight = weight(&ctx, n, k);
    let plan = ctx.plan(&Problem::new(&weight, m)).expect("valid");
    let x = ctx.allocate(4 * m * k).expect("memory");
    let stream = ctx.default_stream();
    let run = |d: &mut Buffer, workspace: &mut Workspace| {
        plan.run(&stream, Args::new(&x, &weight, d).workspace(workspace)).expect("valid arguments");
    };
    let operands =
        || (ctx.allocate(4 * m * n).expect("memory"), ctx.workspace(plan.workspace_bytes()).expect("memory"));
    let (mut d, mut workspace) = operands();
    // Every thread runs the whole problem once.
    pool.broadcast(|_| {
        let (mut d, mut workspace) = operands();
        run(&mut d, &mut workspace);
    });
    run(&mut d, &mut workspace);
    let (started, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        // The measurement covers the parts of each pool thread.
        let of_pool = scope.spawn(|| {
            let counts = pool.broadcast(|_| {
                started.fetch_add(1, Ordering::SeqCst);
                let work = || {
                    while !done.load(Ordering::SeqCst) {
                        rayon::yield_now();
                    }
                };
                allocation_counter::measure(work).count_total
            });
            counts.into_iter().sum::<u64>()
        });
        while started.load(Ordering::SeqCst) < THREADS {
            thread::yield_now();
        }
        let own = allocation_counter::measure(|| (0..runs).for_each(|_| run(&mut d, &mut workspace))).count_total;
        done.store(true, Ordering::SeqCst);
        [own, of_pool.join().expect("no panic")]
    })
}

#[test]
fn a_product_that_enters_the_pool_allocates_but_blocks_of_its_queue() {
    const RUNS: u64 = 200;
    for m in [1, 64] {
        let [own, of_pool] = allocations_of_all_threads(m, RUNS);
        // As documented at `Plan::run`: one queue block in about sixty
        // runs.
        assert!(own <= RUNS / 60 + 2, "M={m}: {own}");
        // Threads that wait within a launch may start another part,
        // which allocates.
        assert!(of_pool <= 2, "M={m}: {of_pool}");
    }
}

/// Allocations of this thread in 100 runs of a cached conversion
/// with all optional operands.
fn allocations_of_conversion(device: &str) -> u64 {
    let ctx = Context::open(device).expect("always there");
    let (rows, columns) = (9, 70);
    let conversion = Conversion::new(rows, columns, DType::F32, DType::F16).gathered(columns).row_factors();
    let plan = ctx.plan_conversion(&conversion).expect("served");
    let x = ctx.allocate(4 * rows * columns).expect("memory");
    let order = ctx.allocate(4 * columns).expect("memory");
    let mut d = ctx.allocate(2 * rows * columns).expect("memory");
    let mut row_factors = ctx.allocate(4 * rows).expect("memory");
    let stream = ctx.default_stream();
    let mut run = || {
        let args = ConversionArgs::new(&x, &mut d).order(&order).row_factors(&mut row_factors);
        plan.run(&stream, args).expect("valid arguments");
    };
    run();
    allocation_counter::measure(|| (0..100).for_each(|_| run())).count_total
}

#[test]
fn conversions_allocate_nothing() {
    assert_eq!(["noop", "cpu"].map(allocations_of_conversion), [0, 0]);
}

/// Minimum of many times, without disturbances.
fn least(mut time: impl FnMut() -> Duration) -> Duration {
    (0..300).map(|_| time()).min().unwrap_or_default()
}

/// Planning cost of a product of `m` tokens and of a conversion:
/// with ready kernels, and when cached. `None` without the
/// device.
fn planning(device: &str, m: usize, permission: XPrecision) -> Option<[Duration; 2]> {
    let ctx = Context::open(device).ok()?;
    let weight = weight(&ctx, 1024, 1024);
    let problem = Problem::new(&weight, m).x_dtype(DType::F16).x_precision(permission);
    let conversion = Conversion::new(m, 1024, DType::F32, DType::F16);
    let timed = |ctx: &Context| {
        let start = Instant::now();
        ctx.plan(&problem).expect("served");
        ctx.plan_conversion(&conversion).expect("served");
        start.elapsed()
    };
    // A context with a new table has no cached plans. Compiled
    // kernels are ready after the first plan.
    let unseen = least(|| timed(&ctx.clone().with_tuned(TunedTable::new())));
    Some([unseen, least(|| timed(&ctx))])
}

/// Emulated GPUs have the kernels of CUDA: tens of candidates per
/// product, and twice as many if X may be quantized.
#[test]
fn planning_costs_little_and_less_when_the_problem_is_known() {
    use XPrecision::{Auto, Int8};
    let cases =
        [("noop", 8, Auto), ("cpu", 8, Auto), ("emu:sm90", 8, Auto), ("emu:sm90", 512, Auto), ("emu:sm90", 512, Int8)];
    for (device, m, permission) in cases {
        let Some([unseen, seen]) = planning(device, m, permission) else {
            eprintln!("skipped: {device} is not there");
            continue;
        };
        eprintln!("{device}, M={m}, {permission:?}: unseen {unseen:?}, seen {seen:?}");
        // 80 µs and 0.7 µs on a quiet machine; the limits leave room for
        // slow and busy ones.
        assert!(unseen < Duration::from_micros(250), "{device}, M={m}, {permission:?}: {unseen:?}");
        assert!(seen < Duration::from_micros(10), "{device}, M={m}, {permission:?}: {seen:?}");
    }
}

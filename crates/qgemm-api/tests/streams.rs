//! Streams, repetitions and batches on every available backend.
//!
//! Two streams with their own workspaces do not disturb each other. Repeated calls give
//! the same bits while another stream works. With `batch_invariant` a token's bits do
//! not depend on its batch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use qgemm_api::{Args, Buffer, Context, DType, DeviceKind, Error, HalError, Plan, Problem, Stream, Weight, Workspace};

const DEVICES: [&str; 6] = ["cpu", "wgpu:0", "cuda:0", "emu:sm70", "emu:sm75", "emu:sm80"];

/// Every available device; the others are reported as skipped.
fn devices(test: &str) -> Vec<Context> {
    let mut found = Vec::new();
    for name in DEVICES {
        match Context::open(name) {
            Ok(ctx) => found.push(ctx),
            Err(why @ (Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })) => {
                qgemm_testkit::skipped(&format!("{test} on {name}"), &why.to_string());
            }
            Err(other) => panic!("{name}: {other}"),
        }
    }
    found
}

/// `count` pseudo-random values in −1..1.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0).collect()
}

fn args<'a>(x: &'a Buffer, w: &'a Weight, d: &'a mut Buffer, workspace: &'a mut Workspace) -> Args<'a> {
    Args::new(x, w, d).workspace(workspace)
}

/// Product: weight, plan, activations on the device, and expected result.
struct Job {
    ctx: Context,
    weight: Weight,
    plan: Plan,
    x: Buffer,
    expected: Vec<f64>,
}

impl Job {
    /// Product that occupies part of the device, yet is fast on emulators and software
    /// adapters. `seed` distinguishes jobs.
    fn new(ctx: &Context, seed: usize) -> Self {
        let [m, n, k] = match ctx.info().id.kind {
            DeviceKind::Cuda => [40 + seed, 4096, 4096],
            DeviceKind::Cpu => [5 + seed, 256, 1024],
            _ => [9 + seed, 80, 1024],
        };
        let (host, _) = qgemm_api::quantize(&values(seed, n * k), n, k, "q4_k".parse().unwrap()).unwrap();
        let x = DType::F16.encode(&values(seed + 1, m * k));
        let rounded = DType::F16.decode(&x);
        let row = |n: usize| host.dequantize_row(n);
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>();
        let w: Vec<Vec<f32>> = (0..n).map(row).collect();
        let expected = rounded.chunks(k).flat_map(|x| w.iter().map(move |w| dot(x, w))).collect();
        let weight = ctx.load(&host).unwrap();
        let plan = ctx.plan(&Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32)).unwrap();
        Self { x: ctx.upload(&x).unwrap(), ctx: ctx.clone(), weight, plan, expected }
    }

    fn workspace(&self) -> Workspace {
        self.ctx.workspace(self.plan.workspace_bytes()).unwrap()
    }

    /// Submits the product.
    fn submit(&self, stream: &Stream, workspace: &mut Workspace, d: &mut Buffer) {
        self.plan.run(stream, args(&self.x, &self.weight, d, workspace)).unwrap();
    }

    /// Output buffer filled with values that no result has.
    fn poisoned(&self) -> Buffer {
        self.ctx.upload(&DType::F32.encode(&vec![f32::NAN; self.expected.len()])).unwrap()
    }

    /// Result bits on `stream`.
    fn run(&self, stream: &Stream, workspace: &mut Workspace) -> Vec<u8> {
        let mut d = self.poisoned();
        self.submit(stream, workspace, &mut d);
        self.ctx.synchronize(stream).unwrap();
        self.ctx.download(&d).unwrap()
    }

    #[track_caller]
    fn assert_right(&self, bits: &[u8]) {
        let pairs = || DType::F32.decode(bits).into_iter().map(f64::from).zip(&self.expected);
        let error: f64 = pairs().map(|(got, &expected)| (got - expected).powi(2)).sum();
        let size: f64 = self.expected.iter().map(|e| e * e).sum();
        // A NaN error fails this comparison.
        assert!(error < 2e-5 * size, "{}: NMSE {:e}", self.ctx.info().id, error / size);
    }
}

#[test]
fn two_streams_with_a_workspace_each_run_at_once() {
    const LAUNCHES: usize = 10;
    for ctx in devices("two_streams_with_a_workspace_each_run_at_once") {
        let jobs = [Job::new(&ctx, 1), Job::new(&ctx, 2)];
        let run = |job: &Job| {
            let (stream, mut workspace) = (ctx.new_stream().unwrap(), job.workspace());
            let mut results: Vec<_> = (0..LAUNCHES).map(|_| job.poisoned()).collect();
            results.iter_mut().for_each(|d| job.submit(&stream, &mut workspace, d));
            ctx.synchronize(&stream).unwrap();
            results.iter().map(|d| ctx.download::<u8>(d).unwrap()).collect::<Vec<_>>()
        };
        let results = thread::scope(|scope| {
            let threads = jobs.each_ref().map(|job| scope.spawn(|| run(job)));
            threads.map(|thread| thread.join().unwrap())
        });
        for (job, results) in jobs.iter().zip(results) {
            let alone = job.run(&ctx.default_stream(), &mut job.workspace());
            job.assert_right(&alone);
            assert!(results.iter().all(|bits| *bits == alone), "{}: other bits than alone", ctx.info().id);
        }
    }
}

#[test]
fn bits_repeat_while_another_stream_is_at_work() {
    const REPEATS: usize = 100;
    for ctx in devices("bits_repeat_while_another_stream_is_at_work") {
        let (job, other) = (Job::new(&ctx, 1), Job::new(&ctx, 2));
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, mut workspace) = (ctx.new_stream().unwrap(), other.workspace());
                let mut d = other.poisoned();
                while !done.load(Ordering::Relaxed) {
                    other.submit(&stream, &mut workspace, &mut d);
                    ctx.synchronize(&stream).unwrap();
                }
                other.assert_right(&ctx.download(&d).unwrap());
            });
            let (stream, mut workspace) = (ctx.new_stream().unwrap(), job.workspace());
            let first = job.run(&stream, &mut workspace);
            let differing = (1..REPEATS).filter(|_| job.run(&stream, &mut workspace) != first).count();
            done.store(true, Ordering::Relaxed);
            job.assert_right(&first);
            assert_eq!(differing, 0, "{}: so many of {REPEATS} repeats have other bits", ctx.info().id);
        });
    }
}

#[test]
fn a_tokens_bits_do_not_depend_on_its_batch() {
    const BATCHES: [usize; 6] = [1, 2, 3, 8, 64, 500];
    for ctx in devices("a_tokens_bits_do_not_depend_on_its_batch") {
        let [n, k] = match ctx.info().id.kind {
            DeviceKind::Cuda => [4096, 4096],
            _ => [40, 512],
        };
        for format in ["q4_k", "q8_0"] {
            let (host, _) = qgemm_api::quantize(&values(3, n * k), n, k, format.parse().unwrap()).unwrap();
            let weight = ctx.load(&host).unwrap();
            let x = DType::F16.encode(&values(4, BATCHES[5] * k));
            let rows = |m: usize| {
                let problem = Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32).batch_invariant(true);
                let plan = ctx.plan(&problem).unwrap();
                let x = ctx.upload(&x[..m * k * 2]).unwrap();
                let (mut d, mut workspace) =
                    (ctx.allocate(m * n * 4).unwrap(), ctx.workspace(plan.workspace_bytes()).unwrap());
                let stream = ctx.default_stream();
                plan.run(&stream, args(&x, &weight, &mut d, &mut workspace)).unwrap();
                ctx.synchronize(&stream).unwrap();
                ctx.download(&d).unwrap()
            };
            let most = rows(BATCHES[5]);
            assert!(DType::F32.decode(&most[..n * 4]).iter().any(|v| v.abs() > 1.0), "the results are not zeros");
            for m in BATCHES {
                assert!(rows(m) == most[..m * n * 4], "{} {format}: {m} tokens of 500 have other bits", ctx.info().id);
            }
        }
    }
}

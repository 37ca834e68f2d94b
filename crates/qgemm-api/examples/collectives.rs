//! All-reduce over ranks: checks the sums, then prints the time of
//! each size.
//!
//! `cargo run --release --example collectives -- cuda:0 2` uses two
//! GPUs and NCCL; with `cpu 2`, the ranks are two threads.

#![allow(clippy::print_stdout, reason = "prints its results")]

use std::time::{Duration, Instant};

use qgemm_api::{Buffer, Collective, Context, DType, Error, Stream, half::f16};

/// Bytes that an all-reduce sums.
const SIZES: [usize; 5] = [8 << 10, 32 << 10, 128 << 10, 2 << 20, 16 << 20];
/// All-reduces of a batch: on CUDA, of a graph.
const BATCH: usize = 20;
/// Batches of a measurement.
const BATCHES: usize = 20;

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let device = args.next().unwrap_or_else(|| "cpu".into());
    let world = args.next().map_or(2, |world| world.parse().expect("a number of ranks"));
    let ranks = Context::open_ranks(&device, world, Duration::from_secs(60))?;
    for bytes in SIZES {
        let times = std::thread::scope(|scope| {
            let ranks: Vec<_> = ranks
                .iter()
                .enumerate()
                .map(|(rank, ctx)| scope.spawn(move || all_reduce_time(ctx, rank, world, bytes)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
        })?;
        let slowest = times.into_iter().max().unwrap_or_default();
        println!("all-reduce of {:>5} KiB in f16: {:.1} us", bytes >> 10, slowest.as_secs_f64() * 1e6);
    }
    Ok(())
}

/// Checks an all-reduce, and returns its time on this rank.
fn all_reduce_time(ctx: &Context, rank: usize, world: usize, bytes: usize) -> Result<Duration, Error> {
    let stream = ctx.new_stream()?;
    let count = bytes / 2;
    let all_reduce = Collective::AllReduce { dtype: DType::F16, count };
    // Small integers, so that the sum is exact.
    let value = |i: usize, rank: usize| f16::from_f32((i % 61 + rank) as f32);
    let own: Vec<f16> = (0..count).map(|i| value(i, rank)).collect();
    let mut part = ctx.upload(&own)?;
    ctx.submit(&stream, &all_reduce, None, &mut part)?;
    ctx.synchronize(&stream)?;
    let got: Vec<f16> = ctx.download(&part)?;
    let expected = |i: usize| (0..world).map(|rank| value(i, rank).to_f32()).sum::<f32>();
    assert!(got.iter().enumerate().all(|(i, got)| got.to_f32() == expected(i)), "a sum is wrong");
    timed(ctx, &stream, &all_reduce, ctx.upload(&vec![f16::ZERO; count])?)
}

/// Time of an all-reduce. On CUDA a graph has a batch of them, so that
/// launches from the host do not count.
fn timed(ctx: &Context, stream: &Stream, all_reduce: &Collective, mut part: Buffer) -> Result<Duration, Error> {
    let batch = || (0..BATCH).try_for_each(|_| ctx.submit(stream, all_reduce, None, &mut part));
    #[cfg(feature = "cuda")]
    if ctx.info().id.kind == qgemm_api::DeviceKind::Cuda {
        let graph = qgemm_api::cuda::capture(&**ctx.device(), stream, batch)?;
        return time_batches(ctx, stream, || Ok(graph.replay(stream)?));
    }
    time_batches(ctx, stream, batch)
}

/// Time of an all-reduce in batches that `run` submits, behind one to warm up.
fn time_batches(ctx: &Context, stream: &Stream, mut run: impl FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    run()?;
    ctx.synchronize(stream)?;
    let start = Instant::now();
    (0..BATCHES).try_for_each(|_| run())?;
    ctx.synchronize(stream)?;
    Ok(start.elapsed() / (BATCH * BATCHES) as u32)
}

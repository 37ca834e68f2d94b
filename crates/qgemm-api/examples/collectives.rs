//! All-reduce over ranks: checks the sums, then prints the time of
//! each size.
//!
//! `cargo run --release --example collectives -- cuda:0 2` uses two
//! GPUs, and compares all-reduces over peer memory (one-shot) with
//! NCCL's; with `cpu 2`, the ranks are two threads.

#![allow(clippy::print_stdout, reason = "prints its results")]

use std::time::{Duration, Instant};

use qgemm_api::{Buffer, Collective, Context, DType, Error, Stream, half::f16};

/// Bytes that an all-reduce sums.
const SIZES: [usize; 10] =
    [2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 2 << 20, 16 << 20];
/// All-reduces of a batch: on CUDA, of a graph.
const BATCH: usize = 20;
/// Batches of a measurement.
const BATCHES: usize = 20;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let device = args.next().unwrap_or_else(|| "cpu".into());
    let world = args.next().map_or(2, |world| world.parse().expect("a number of ranks"));
    for ranks in groups(&device, world)? {
        for bytes in SIZES {
            let times = std::thread::scope(|scope| {
                let rank = |(rank, ctx)| scope.spawn(move || all_reduce_time(ctx, rank, world, bytes));
                let ranks: Vec<_> = ranks.iter().enumerate().map(rank).collect();
                ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
            })?;
            let (slowest, kib) = (times.into_iter().max().unwrap_or_default().as_secs_f64() * 1e6, bytes >> 10);
            let communicator = ranks[0].communicator().expect("a rank");
            let algorithm = communicator.algorithm(&all_reduce(bytes));
            println!("all-reduce of {kib:>5} KiB in f16: {slowest:>6.1} us ({algorithm})");
        }
    }
    Ok(())
}

/// The ranks, and on CUDA those of a group without one-shot
/// all-reduces, too.
fn groups(device: &str, world: usize) -> Result<Vec<Vec<Context>>, Error> {
    let ranks = Context::open_ranks(device, world, LIMIT)?;
    #[cfg(feature = "cuda")]
    if ranks[0].info().id.kind == qgemm_api::DeviceKind::Cuda {
        let devices: Vec<_> = ranks.iter().map(|ctx| ctx.device().clone()).collect();
        let group = qgemm_api::cuda::nccl::of_devices(&devices, LIMIT)?.into_iter();
        let others = devices.into_iter().zip(group.map(|rank| rank.with_one_shot_bytes(0)));
        let context = |(device, rank)| Context::from_device(device).with_communicator(std::sync::Arc::new(rank));
        return Ok(vec![ranks, others.map(context).collect()]);
    }
    Ok(vec![ranks])
}

fn all_reduce(bytes: usize) -> Collective {
    Collective::AllReduce { dtype: DType::F16, count: bytes / 2 }
}

/// Checks an all-reduce, and returns its time on this rank.
fn all_reduce_time(ctx: &Context, rank: usize, world: usize, bytes: usize) -> Result<Duration, Error> {
    let stream = ctx.new_stream()?;
    let (count, all_reduce) = (bytes / 2, all_reduce(bytes));
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

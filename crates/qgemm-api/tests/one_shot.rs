//! All-reduces over peer memory. They need two GPUs that can
//! access each other's memory; otherwise each test is skipped
//! with the reason.
#![cfg(feature = "cuda")]

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use qgemm_api::cuda::{capture_with, nccl};
use qgemm_api::{BufferMut, Collective, Communicator, Context, DType, Device, Error, HalError, Rendezvous};

const LIMIT: Duration = Duration::from_secs(20);
const WORLD: usize = 2;

fn all_reduce(dtype: DType, count: usize) -> Collective {
    Collective::AllReduce { dtype, count }
}

/// Groups of one process take turns: memory is freed when all kernels of
/// a device are done, also those of other groups.
static TURN: Mutex<()> = Mutex::new(());

/// Two ranks with a one-shot all-reduce, behind their turn; otherwise the
/// test is skipped.
fn ranks(test: &str, limit: Duration) -> Option<(MutexGuard<'static, ()>, Vec<Context>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let devices: Vec<Arc<dyn Device>> = ["cuda:0", "cuda:1"]
        .into_iter()
        .map(|name| qgemm_testkit::open_or_skip(test, name).map(|ctx| Arc::clone(ctx.device())))
        .collect::<Option<_>>()?;
    let group = nccl::of_devices(&devices, limit).expect("a group");
    if group[0].one_shot_bytes() == 0 {
        qgemm_testkit::skipped(test, "the GPUs cannot access each other's memory");
        return None;
    }
    let context =
        |(device, rank): (_, nccl::NcclCommunicator)| Context::from_device(device).with_communicator(Arc::new(rank));
    Some((turn, devices.into_iter().zip(group).map(context).collect()))
}

fn communicator(ctx: &Context) -> &Arc<dyn Communicator> {
    ctx.communicator().expect("a rank")
}

/// Runs `work` on every rank, each in a thread of its own.
fn on_ranks<T: Send>(ranks: &[Context], work: impl Fn(&Context, usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            ranks.iter().enumerate().map(|(rank, ctx)| scope.spawn(move || work(ctx, rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

fn values(rank: usize, count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + rank * 101 + seed * 7919) % 4093) as f32 * 0.0173 - 31.0).collect()
}

/// Sum in the order of ranks, in f32, as the group through host memory
/// computes it.
fn expected(dtype: DType, count: usize, seed: usize) -> Vec<u8> {
    let rounded = |rank| dtype.decode(&dtype.encode(&values(rank, count, seed)));
    let mut sum: Vec<f32> = rounded(0);
    for rank in 1..WORLD {
        sum.iter_mut().zip(rounded(rank)).for_each(|(sum, value)| *sum += value);
    }
    dtype.encode(&sum)
}

/// Sums of many sizes and types, some of them unaligned or too long for
/// one shot.
fn sums(ctx: &Context, rank: usize) -> Result<(), Error> {
    let stream = ctx.default_stream();
    for (seed, count) in [1, 2, 3, 5, 64, 1000, 1023, 4096, 65_535, 131_072, 300_000, 7, 65_536].into_iter().enumerate()
    {
        for (dtype, skipped) in DType::ALL.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 1), (dtype, 3)]) {
            let (first, bytes) = (skipped * dtype.bytes(), dtype.encode(&values(rank, count, seed)));
            let mut memory = ctx.allocate(first + bytes.len())?;
            ctx.upload_into(&bytes, memory.slice_mut(first..first + bytes.len())?)?;
            let sum = all_reduce(dtype, count);
            ctx.submit(&stream, &sum, None, memory.slice_mut(first..first + bytes.len())?)?;
            communicator(ctx).wait(&**ctx.device(), &stream)?;
            let got: Vec<u8> = ctx.download(memory.slice(first..first + bytes.len())?)?;
            let algorithm = communicator(ctx).algorithm(&sum);
            // Two operands have one sum in any order.
            assert!(got == expected(dtype, count, seed), "{sum} ({algorithm}) on rank {rank}");
            let is_short = bytes.len() <= 512 << 10;
            assert_eq!(algorithm, if is_short { "one_shot" } else { "nccl" }, "{sum}");
        }
    }
    Ok(())
}

#[test]
fn sums_are_those_in_the_order_of_ranks() {
    let Some((_turn, ranks)) = ranks("sums_are_those_in_the_order_of_ranks", LIMIT) else { return };
    on_ranks(&ranks, |ctx, rank| sums(ctx, rank).expect("it runs"));
}

/// Replays of a graph with several all-reduces, short and long ones.
fn replays(ctx: &Context, rank: usize) -> Result<(), Error> {
    const COUNTS: [usize; 4] = [4096, 200_000, 1001, 4096];
    let stream = ctx.new_stream()?;
    let buffers = [ctx.allocate(4 * COUNTS[1])?];
    let work = |[memory]: [BufferMut<'_>; 1]| {
        let mut memory = memory;
        COUNTS
            .into_iter()
            .try_for_each(|count| ctx.submit(&stream, &all_reduce(DType::F32, count), None, memory.reborrow()))
    };
    // NCCL connects ranks at their first collective of a size, which a
    // capture does not permit.
    let mut first = ctx.allocate(4 * COUNTS[1])?;
    ctx.submit(&stream, &all_reduce(DType::F32, COUNTS[1]), None, &mut first)?;
    communicator(ctx).wait(&**ctx.device(), &stream)?;
    let mut graph = capture_with(&**ctx.device(), &stream, buffers, work)?;
    for replay in 0..200usize {
        let own = (rank + 1) as f32 * (replay % 17) as f32;
        let [memory] = graph.buffers_mut();
        ctx.upload_on(&stream, &vec![own; COUNTS[1]], memory)?;
        graph.replay(&stream)?;
        communicator(ctx).wait(&**ctx.device(), &stream)?;
        let got: Vec<f32> = ctx.download_on(&stream, graph.buffers()[0])?;
        // The first sum differs by rank, later ones double it.
        let sum = 3.0 * (replay % 17) as f32;
        let times = |i: usize| COUNTS[1..].iter().filter(|count| i < **count).count();
        for (i, got) in got.iter().enumerate() {
            let first = if i < COUNTS[0] { sum * (1 << times(i)) as f32 } else { sum };
            assert_eq!(*got, first, "element {i} of replay {replay} on rank {rank}");
        }
    }
    Ok(())
}

#[test]
fn graphs_are_replayed() {
    let Some((_turn, ranks)) = ranks("graphs_are_replayed", LIMIT) else { return };
    on_ranks(&ranks, |ctx, rank| replays(ctx, rank).expect("it runs"));
}

#[test]
fn a_rank_that_does_not_come_is_an_error_of_the_other() {
    let limit = Duration::from_secs(2);
    let Some((_turn, ranks)) = ranks("a_rank_that_does_not_come_is_an_error_of_the_other", limit) else { return };
    on_ranks(&ranks, |ctx, rank| sums_once(ctx, rank).expect("both are there"));
    let (ctx, start) = (&ranks[0], Instant::now());
    let error = sums_once(ctx, 0).expect_err("rank 1 does not come");
    assert!(matches!(error, Error::Hal(HalError::RankSilent { rank: 1, .. })), "{error}");
    assert!((limit..limit * 2).contains(&start.elapsed()), "{:?}", start.elapsed());
    let start = Instant::now();
    assert!(sums_once(ctx, 0).is_err(), "the group has ended");
    assert!(start.elapsed() < Duration::from_millis(100));
    // The device itself works on.
    let buffer = ctx.upload(&[1.0f32; 8]).expect("memory");
    assert_eq!(ctx.download::<f32>(&buffer).expect("readable"), [1.0; 8]);
}

fn sums_once(ctx: &Context, rank: usize) -> Result<(), Error> {
    let (stream, mut memory) = (ctx.default_stream(), ctx.upload(&vec![rank as f32; 4096])?);
    ctx.submit(&stream, &all_reduce(DType::F32, 4096), None, &mut memory)?;
    Ok(communicator(ctx).wait(&**ctx.device(), &stream)?)
}

/// A rank that leaves ends the wait of the other at once, also in a
/// replay.
#[test]
fn a_rank_that_leaves_ends_the_wait() {
    let Some((_turn, mut ranks)) = ranks("a_rank_that_leaves_ends_the_wait", Duration::from_secs(60)) else { return };
    on_ranks(&ranks, |ctx, rank| sums_once(ctx, rank).expect("both are there"));
    let leaving = ranks.remove(1);
    let start = Instant::now();
    let error = thread::scope(|scope| {
        let waiting = scope.spawn(|| sums_once(&ranks[0], 0).expect_err("rank 1 leaves"));
        thread::sleep(Duration::from_millis(300));
        drop(leaving);
        waiting.join().expect("it does not panic")
    });
    assert!(matches!(error, Error::Hal(HalError::RankGone { rank: 1, .. })), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Rank of a process that the test below starts, and where it joins.
const RANK: &str = "QGEMM_TEST_RANK";
const PLACE: &str = "QGEMM_TEST_PLACE";

#[test]
fn processes_open_each_others_memory() {
    let test = "processes_open_each_others_memory";
    if let (Ok(rank), Ok(place)) = (std::env::var(RANK), std::env::var(PLACE)) {
        let rank: usize = rank.parse().expect("a rank");
        let place: Rendezvous = place.parse().expect("a place");
        let ctx = Context::join_rank(&*format!("cuda:{rank}"), &place, [rank, WORLD], LIMIT).expect("a rank");
        sums(&ctx, rank).expect("it runs");
        return replays(&ctx, rank).expect("it runs");
    }
    let Some((_turn, group)) = ranks(test, LIMIT) else { return };
    drop(group);
    let place = std::env::temp_dir().join(format!("qgemm-one-shot-{}", std::process::id()));
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.args([test, "--exact", "--nocapture"]).env(RANK, rank.to_string());
        command.env(PLACE, &place).spawn().expect("it starts")
    };
    for (rank, mut child) in [0, 1].map(start).into_iter().enumerate() {
        assert!(child.wait().expect("it ends").success(), "rank {rank}");
    }
}

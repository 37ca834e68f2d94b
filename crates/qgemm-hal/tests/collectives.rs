//! Groups of ranks: collectives, their order of sums, and their
//! failures.

use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use qgemm_formats::DType;
use qgemm_hal::{Collective, Communicator, Device, HalError, HostCommunicator, Latency, Rendezvous, ThreadGroup, noop};

const LIMIT: Duration = Duration::from_secs(5);

fn device() -> Arc<dyn Device> {
    noop::open("noop".parse().expect("a name")).expect("always there")
}

/// Runs `work` on every rank, each in a thread that owns its
/// communicator.
fn on_ranks<T: Send>(ranks: Vec<HostCommunicator>, work: impl Fn(HostCommunicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

/// D of a collective, from the X and D of a rank.
fn run(rank: &HostCommunicator, collective: &Collective, x: Option<&[u8]>, d: &[u8]) -> Result<Vec<u8>, HalError> {
    let device = device();
    let stream = device.default_stream();
    let upload = |bytes: &[u8]| {
        let mut buffer = device.allocate(bytes.len(), "an operand")?;
        device.upload(&stream, bytes, (&mut buffer).into()).map(|()| buffer)
    };
    let x = x.map(upload).transpose()?;
    let mut d = upload(d)?;
    rank.submit(&*device, &stream, collective, x.as_ref().map(Into::into), (&mut d).into())?;
    let mut got = vec![0; d.len()];
    device.download(&stream, (&d).into(), &mut got)?;
    Ok(got)
}

fn all_reduce(rank: &HostCommunicator, dtype: DType, values: &[f32]) -> Result<Vec<f32>, HalError> {
    let collective = Collective::AllReduce { dtype, count: values.len() };
    run(rank, &collective, None, &dtype.encode(values)).map(|bytes| dtype.decode(&bytes))
}

#[test]
fn sums_are_in_the_order_of_ranks() {
    // In another order, small numbers are lost or large ones do not
    // cancel.
    let of_rank = [1e8f32, 3.0, -1e8, 0.5];
    let expected = of_rank.iter().fold(0.0, |sum, value| sum + value);
    let late: Latency = Arc::new(|rank, exchange| Duration::from_micros(((rank * 7 + exchange * 3) % 5 * 300) as u64));
    let ranks = ThreadGroup::with_latency(4, LIMIT, late).expect("ranks");
    let sums = on_ranks(ranks, |rank| {
        let value = of_rank[rank.rank()];
        (0..8).map(|_| all_reduce(&rank, DType::F32, &[value, 1.0]).expect("all are there")).collect::<Vec<_>>()
    });
    assert!(sums.iter().flatten().all(|sum| *sum == [expected, 4.0]), "{sums:?}");
    for dtype in [DType::F16, DType::BF16] {
        let ranks = ThreadGroup::create(3, LIMIT).expect("ranks");
        let sums = on_ranks(ranks, |rank| all_reduce(&rank, dtype, &[[1.0, 1.0 / 1024.0, 2.0 / 1024.0][rank.rank()]]));
        // The terms in their type, added in f32, and rounded once.
        let expected = dtype.decode(&dtype.encode(&[1.0 + 3.0 / 1024.0]));
        assert!(sums.iter().all(|sum| *sum.as_ref().expect("all are there") == expected), "{sums:?}");
    }
}

#[test]
fn parts_are_gathered_scattered_and_copied() {
    let results = on_ranks(ThreadGroup::create(3, LIMIT).expect("ranks"), |rank| {
        let own = rank.rank();
        // Uneven columns of two rows.
        let columns = vec![2, 0, 1];
        let x: Vec<f32> = (0..2 * columns[own]).map(|i| (10 * own + i) as f32).collect();
        let gather = Collective::AllGather { dtype: DType::F32, rows: 2, columns };
        let gathered = run(&rank, &gather, Some(&DType::F32.encode(&x)), &[0; 24]).expect("gathered");
        let counts = vec![1, 2, 1];
        let x: Vec<f32> = (0..4).map(|i| (i * (own + 1)) as f32).collect();
        let d = vec![0; 4 * counts[own]];
        let scatter = Collective::ReduceScatter { dtype: DType::F32, counts };
        let scattered = run(&rank, &scatter, Some(&DType::F32.encode(&x)), &d).expect("scattered");
        let copied = run(&rank, &Collective::Broadcast { bytes: 2, root: 1 }, None, &[own as u8; 2]).expect("copied");
        (DType::F32.decode(&gathered), DType::F32.decode(&scattered), copied)
    });
    let parts = [vec![0.0], vec![6.0, 12.0], vec![18.0]];
    for ((gathered, scattered, copied), part) in results.into_iter().zip(parts) {
        assert_eq!(gathered, [0.0, 1.0, 20.0, 2.0, 3.0, 21.0]);
        assert_eq!((scattered, copied), (part, vec![1, 1]));
    }
}

#[test]
fn wrong_operands_are_refused_before_an_exchange() {
    let ranks = ThreadGroup::create(2, LIMIT).expect("ranks");
    let short = Collective::AllReduce { dtype: DType::F32, count: 2 };
    assert!(matches!(run(&ranks[0], &short, None, &[0; 4]), Err(HalError::OutOfBounds { end: 8, len: 4, .. })));
    let of_three = Collective::AllGather { dtype: DType::F32, rows: 1, columns: vec![1; 3] };
    assert!(matches!(run(&ranks[0], &of_three, Some(&[0; 4]), &[0; 12]), Err(HalError::BadGroup { .. })));
    let huge = Collective::AllReduce { dtype: DType::F32, count: usize::MAX };
    assert!(matches!(run(&ranks[0], &huge, None, &[0; 4]), Err(HalError::BadGroup { .. })));
    assert!(ThreadGroup::create(0, LIMIT).is_err());
}

#[test]
fn another_shape_is_seen_by_every_rank() {
    let errors = on_ranks(ThreadGroup::create(3, LIMIT).expect("ranks"), |rank| {
        let count = if rank.rank() == 2 { 5 } else { 4 };
        let first = all_reduce(&rank, DType::F32, &vec![1.0; count]).expect_err("they differ");
        (first, all_reduce(&rank, DType::F32, &[1.0]).expect_err("the group has ended"))
    });
    for (own, (error, later)) in errors.iter().enumerate() {
        let other = if own == 2 { 0 } else { 2 };
        assert!(matches!(error, HalError::CollectiveMismatch { rank, .. } if *rank == other), "{error}");
        assert!(error.to_string().contains("of 5 f32") && error.to_string().contains("of 4 f32"), "{error}");
        assert!(matches!(later, HalError::RankGone { .. }), "{later}");
    }
}

#[test]
fn a_silent_rank_is_an_error_of_all_behind_the_time_limit() {
    let limit = Duration::from_millis(50);
    let errors = on_ranks(ThreadGroup::create(3, limit).expect("ranks"), |rank| {
        if rank.rank() == 1 {
            thread::sleep(6 * limit);
        }
        all_reduce(&rank, DType::F32, &[1.0]).expect_err("rank 1 is late")
    });
    for error in errors {
        assert!(matches!(&error, HalError::RankSilent { rank: 1, what, .. } if what.contains("all_reduce")), "{error}");
    }
}

/// How a rank fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Returns,
    Panics,
    Aborts,
    IsSilent,
    Differs,
}

/// Five exchanges of a rank, unless it is the one that fails.
fn play(
    rank: &HostCommunicator,
    (failing, at): (usize, usize),
    failure: Failure,
    limit: Duration,
) -> Result<(), HalError> {
    for exchange in 0..5 {
        let mut count = 3;
        if (rank.rank(), exchange) == (failing, at) {
            match failure {
                Failure::Returns => return Ok(()),
                Failure::Panics => resume_unwind(Box::new("a failure of the test")),
                Failure::Aborts => rank.abort("out of memory"),
                Failure::IsSilent => thread::sleep(2 * limit),
                Failure::Differs => count = 4,
            }
        }
        let sum = all_reduce(rank, DType::F32, &vec![1.0; count])?;
        assert_eq!(sum, vec![rank.world() as f32; count]);
    }
    Ok(())
}

/// Random ranks fail at random exchanges in every way. Nobody
/// hangs, and everybody else has an error that names the rank.
#[test]
fn a_thousand_failures_of_ranks_are_seen_by_all_others() {
    let limit = Duration::from_millis(100);
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let begun = Instant::now();
    for round in 0..1000 {
        let (world, at) = (2 + random(3), random(4));
        let failing = random(world);
        let failure = match random(80) {
            0 => Failure::IsSilent,
            n if n < 24 => Failure::Returns,
            n if n < 44 => Failure::Panics,
            n if n < 64 => Failure::Aborts,
            _ => Failure::Differs,
        };
        let seed = random(1000);
        let late: Latency =
            Arc::new(move |rank, exchange| Duration::from_micros(((seed + rank * 31 + exchange * 17) % 90) as u64));
        let ranks = ThreadGroup::with_latency(world, limit, late).expect("ranks");
        let ends: Vec<_> = thread::scope(|scope| {
            let play = |rank| scope.spawn(move || play(&rank, (failing, at), failure, limit));
            let threads: Vec<_> = ranks.into_iter().map(play).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        for (rank, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != failing) {
            let error = end.expect("others do not panic").expect_err("a rank failed");
            let (HalError::RankGone { rank: named, .. }
            | HalError::RankSilent { rank: named, .. }
            | HalError::CollectiveMismatch { rank: named, .. }) = error
            else {
                panic!("round {round}: {error}")
            };
            assert_eq!(named, failing, "round {round}, {failure:?} at {at}, seen by {rank} of {world}: {error}");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
}

/// Sums of a few exchanges.
fn sums(rank: &HostCommunicator) -> Result<Vec<f32>, HalError> {
    rank.agree("the test")?;
    (0..3).map(|i| Ok(all_reduce(rank, DType::F32, &[(rank.rank() + i) as f32; 1000])?[999])).collect()
}

#[test]
fn a_rendezvous_joins_ranks_by_address_and_by_file() {
    let folder = std::env::temp_dir().join(format!("qgemm-rendezvous-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a writable folder");
    let path = folder.join("group");
    // Below the ports that systems give away.
    let address = SocketAddr::from(([127, 0, 0, 1], 20_000 + (std::process::id() % 10_000) as u16));
    let places: [Rendezvous; 2] =
        [address.to_string().parse(), path.to_str().expect("text").parse()].map(|place| place.expect("a place"));
    assert_eq!(places, [Rendezvous::Tcp(address), Rendezvous::File(path.clone())]);
    for place in &places {
        let all: Vec<Vec<f32>> = thread::scope(|scope| {
            let join = |rank| {
                let joined = move || place.join(rank, 3, LIMIT).expect("all come");
                scope.spawn(move || sums(&joined()).expect("all are there"))
            };
            let threads: Vec<_> = (0..3).map(join).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        assert!(all.iter().all(|sums| *sums == [3.0, 6.0, 9.0]), "{all:?}");
    }
    assert!(!path.exists(), "it is removed when all have come");
    std::fs::write(&path, "127.0.0.1:1").expect("writable");
    let limit = Duration::from_millis(30);
    assert!(matches!(places[1].join(0, 2, limit), Err(HalError::File { .. })), "the file of another group");
    assert!(matches!(places[0].join(1, 2, limit), Err(HalError::RankSilent { rank: 0, .. })));
    assert!(matches!(places[0].join(0, 2, limit), Err(HalError::RankSilent { rank: 1, .. })));
    assert!(matches!(places[0].join(2, 2, limit), Err(HalError::BadGroup { .. })));
    let outside = Rendezvous::Tcp("192.0.2.1:80".parse().expect("an address"));
    assert!(outside.join(0, 2, limit).expect_err("not on loopback").to_string().contains("loopback"));
    std::fs::remove_dir_all(&folder).expect("removable");
}

#[test]
fn a_rank_of_another_world_is_refused() {
    let place = Rendezvous::File(std::env::temp_dir().join(format!("qgemm-stranger-{}", std::process::id())));
    thread::scope(|scope| {
        let stranger = scope.spawn(|| place.join(1, 3, LIMIT).expect_err("of three"));
        let error = place.join(0, 2, LIMIT).expect_err("of two");
        assert!(matches!(&error, HalError::CollectiveMismatch { rank: 1, got, .. } if got == "rank 1 of 3"), "{error}");
        assert!(matches!(stranger.join().expect("no panic"), HalError::RankGone { rank: 0, .. }));
    });
}

/// Variables of a child process: where the group meets, and its
/// rank.
const PLACE: &str = "QGEMM_TEST_GROUP";
const RANK: &str = "QGEMM_TEST_RANK";

/// The process of a rank, which the test below starts.
#[test]
fn child() {
    let (Ok(place), Ok(rank)) = (std::env::var(PLACE), std::env::var(RANK)) else { return };
    let place: Rendezvous = place.parse().expect("a place");
    let rank = place.join(rank.parse().expect("a number"), 3, LIMIT).expect("all come");
    assert_eq!(sums(&rank).expect("all are there"), [3.0, 6.0, 9.0]);
    if rank.rank() == 2 {
        std::process::abort();
    }
    all_reduce(&rank, DType::F32, &[1.0]).expect_err("rank 0 sees that rank 2 is gone");
}

#[test]
fn a_process_that_dies_is_seen_by_the_others_at_once() {
    let path = std::env::temp_dir().join(format!("qgemm-processes-{}", std::process::id()));
    let children = [1, 2].map(|rank| {
        let mut child = Command::new(std::env::current_exe().expect("a path"));
        child.args(["child", "--exact"]).env(PLACE, &path).env(RANK, rank.to_string());
        child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
    });
    let rank = Rendezvous::File(path).join(0, 3, LIMIT).expect("all come");
    assert_eq!(sums(&rank).expect("all are there"), [3.0, 6.0, 9.0]);
    let begun = Instant::now();
    let error = all_reduce(&rank, DType::F32, &[1.0]).expect_err("rank 2 died");
    assert!(matches!(error, HalError::RankGone { rank: 2, .. }), "{error}");
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    let ends = children.map(|mut child| child.wait().expect("it ends").success());
    assert_eq!(ends, [true, false]);
}

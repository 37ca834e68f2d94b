//! [`ThreadGroup`]: ranks that are threads of this process.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::exchange::{Exchange, Message};
use super::host::HostCommunicator;
use crate::error::HalError;

/// Most threads of a group.
const MOST_RANKS: usize = 1024;

/// Delay of a rank before its message arrives in an exchange,
/// numbered from 0; for tests.
pub type Latency = Arc<dyn Fn(usize, usize) -> Duration + Send + Sync>;

/// Ranks that are threads of one process.
///
/// A communicator that is dropped, by a return or a panic, is
/// gone for the others at once.
///
/// ```
/// use std::time::Duration;
/// use qgemm_hal::{Communicator, ThreadGroup};
///
/// let ranks = ThreadGroup::create(2, Duration::from_secs(1))?;
/// std::thread::scope(|scope| {
///     for rank in &ranks {
///         scope.spawn(move || rank.agree("the same plan").expect("both are there"));
///     }
/// });
/// # Ok::<(), qgemm_hal::HalError>(())
/// ```
pub struct ThreadGroup {
    world: usize,
    /// How long a rank waits for the others.
    limit: Duration,
    latency: Option<Latency>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Completed exchanges.
    exchanges: usize,
    /// Messages of the exchange under way.
    arrived: Vec<Option<Arc<Message>>>,
    /// Messages of the last completed exchange. No other completes
    /// before all ranks have taken them.
    complete: Vec<Arc<Message>>,
    /// Ranks that take part no longer, and why, in the order in which
    /// they left.
    gone: Vec<(usize, String)>,
    /// The error that ended the group.
    failed: Option<HalError>,
}

impl ThreadGroup {
    /// A communicator for each rank, in order. A rank waits up to
    /// `limit` for the others.
    ///
    /// # Errors
    /// [`HalError::BadGroup`] for no ranks, or too many.
    pub fn create(world: usize, limit: Duration) -> Result<Vec<HostCommunicator>, HalError> {
        Self::with_latency(world, limit, None)
    }

    /// [`ThreadGroup::create`] with delays.
    ///
    /// # Errors
    /// As [`ThreadGroup::create`].
    pub fn with_latency(
        world: usize,
        limit: Duration,
        latency: impl Into<Option<Latency>>,
    ) -> Result<Vec<HostCommunicator>, HalError> {
        if !(1..=MOST_RANKS).contains(&world) {
            return Err(HalError::BadGroup { expected: format!("1 to {MOST_RANKS} ranks"), got: world.to_string() });
        }
        let state = Mutex::new(State { arrived: vec![None; world], ..State::default() });
        let group = Arc::new(Self { world, limit, latency: latency.into(), state, changed: Condvar::new() });
        let rank = |rank| HostCommunicator::new(ThreadRank { group: Arc::clone(&group), rank });
        Ok((0..world).map(rank).collect())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panics holds no half-made state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, rank: usize, why: &str) {
        let mut state = self.lock();
        if state.gone.iter().all(|(other, _)| *other != rank) {
            state.gone.push((rank, why.to_owned()));
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl State {
    /// The error that ended the group, or a rank without which the
    /// exchange under way cannot end.
    fn check(&self) -> Result<(), HalError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        // Who left first is why the others did.
        match self.gone.iter().find(|(rank, _)| self.arrived[*rank].is_none()) {
            Some((rank, why)) => Err(HalError::RankGone { rank: *rank, why: why.clone() }),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadGroup").field("world", &self.world).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A rank of a group.
#[derive(Debug)]
struct ThreadRank {
    group: Arc<ThreadGroup>,
    rank: usize,
}

impl Exchange for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.group.world
    }

    fn exchange(&self, message: Message) -> Result<Vec<Arc<Message>>, HalError> {
        let Self { group, rank } = self;
        let (rank, deadline) = (*rank, Instant::now() + group.limit);
        let mut state = group.lock();
        if let Some(latency) = &group.latency {
            let exchange = state.exchanges;
            drop(state);
            thread::sleep(latency(rank, exchange));
            state = group.lock();
        }
        state.check()?;
        let number = state.exchanges;
        let what = message.about.clone();
        state.arrived[rank] = Some(Arc::new(message));
        if state.arrived.iter().all(Option::is_some) {
            let arrived = std::mem::replace(&mut state.arrived, vec![None; group.world]);
            state.complete = arrived.into_iter().flatten().collect();
            state.exchanges += 1;
            group.changed.notify_all();
            return Ok(state.complete.clone());
        }
        loop {
            if state.exchanges != number {
                return Ok(state.complete.clone());
            }
            state.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let silent = state.arrived.iter().position(Option::is_none).unwrap_or(rank);
                let error = HalError::RankSilent { rank: silent, limit: group.limit, what };
                state.failed = Some(error.clone());
                group.changed.notify_all();
                return Err(error);
            }
            let woken = group.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn check(&self) -> Result<(), HalError> {
        let state = self.group.lock();
        state.check()?;
        match state.gone.first() {
            Some((rank, why)) => Err(HalError::RankGone { rank: *rank, why: why.clone() }),
            None => Ok(()),
        }
    }

    fn abort(&self, why: &str) {
        self.group.leave(self.rank, why);
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        self.group.leave(self.rank, if thread::panicking() { "its thread panicked" } else { "its thread returned" });
    }
}

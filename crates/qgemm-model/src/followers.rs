//! [`Followers`]: the other ranks of a model, which run each job
//! of the first one with it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};

use qgemm_api::{Communicator, HalError};

use crate::error::Error;
use crate::language_model::LanguageModel;

/// Threads of the other ranks, each with a model of its own.
/// There are none for a model on one device.
pub struct Followers<J> {
    model: LanguageModel,
    ranks: Vec<Follower<J>>,
}

struct Follower<J> {
    rank: usize,
    /// Dropped first, which ends the thread.
    jobs: Option<Sender<Arc<J>>>,
    results: Receiver<Result<(), Error>>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + Sync + 'static> Followers<J> {
    /// Starts the ranks besides that of `model`. `make` makes in each
    /// thread what runs the rank's jobs.
    ///
    /// # Errors
    /// When the system starts no more threads.
    pub fn start<R>(
        model: &LanguageModel,
        make: impl Fn(&LanguageModel) -> Result<R, Error> + Clone + Send + 'static,
    ) -> Result<Self, Error>
    where
        R: FnMut(&J) -> Result<(), Error>,
    {
        let mut followers = Self { model: model.clone(), ranks: Vec::new() };
        for (place, other) in model.others().iter().enumerate() {
            let (jobs, to_do) = channel::<Arc<J>>();
            let (done, results) = channel();
            let (other, make, rank) = (other.clone(), make.clone(), place + 1);
            let work = move || {
                let _leaving = other.context().communicator().cloned().map(Leaving);
                let follow = |result: Result<(), Error>| {
                    if let (Err(error), Some(group)) = (&result, other.context().communicator()) {
                        group.abort(&error.to_string());
                    }
                    done.send(result).is_ok()
                };
                let mut run = match make(&other) {
                    Ok(run) => run,
                    Err(error) => {
                        follow(Err(error));
                        return;
                    }
                };
                if follow(Ok(())) {
                    to_do.iter().take_while(|job| follow(run(job))).for_each(drop);
                }
            };
            let started = thread::Builder::new().name(format!("qgemm-rank-{rank}")).spawn(work);
            let thread = started.map_err(|error| HalError::RankGone { rank, why: error.to_string() })?;
            followers.ranks.push(Follower { rank, jobs: Some(jobs), results, thread: Some(thread) });
        }
        Ok(followers)
    }

    /// Waits until the other ranks are ready. `own` is what this one
    /// has.
    ///
    /// # Errors
    /// The error of the rank that failed first, as far as that is
    /// known.
    pub fn ready<T>(&self, own: Result<T, Error>) -> Result<T, Error> {
        if self.ranks.is_empty() {
            return own;
        }
        if let (Err(error), Some(group)) = (&own, self.model.context().communicator()) {
            group.abort(&error.to_string());
        }
        let result = |follower: &Follower<J>| {
            let ended = |_| Err(HalError::RankGone { rank: follower.rank, why: "its thread ended".into() }.into());
            follower.results.recv().unwrap_or_else(ended).err()
        };
        let mut errors: Vec<Error> = self.ranks.iter().filter_map(result).collect();
        let own = match own {
            Ok(own) => Some(own),
            Err(error) => {
                errors.insert(0, error);
                None
            }
        };
        // Ranks that lose another one say only that.
        let cause = errors.iter().position(|error| !is_of_others(error)).unwrap_or(0);
        match own {
            Some(own) if errors.is_empty() => Ok(own),
            _ => Err(errors.swap_remove(cause)),
        }
    }

    /// Runs a job on all ranks, as `own` on this one.
    ///
    /// # Errors
    /// As [`Followers::ready`]. The group has ended then.
    pub fn run<T>(&self, job: impl FnOnce() -> J, own: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        if self.ranks.is_empty() {
            return own();
        }
        // Engines of one model take turns.
        let _turn = self.model.turn().lock().unwrap_or_else(PoisonError::into_inner);
        let job = Arc::new(job());
        for follower in &self.ranks {
            // Who has ended has no result, either.
            follower.jobs.iter().for_each(|jobs| drop(jobs.send(Arc::clone(&job))));
        }
        self.ready(own())
    }
}

impl<J> Drop for Followers<J> {
    fn drop(&mut self) {
        self.ranks.iter_mut().for_each(|follower| follower.jobs = None);
        for thread in self.ranks.iter_mut().filter_map(|follower| follower.thread.take()) {
            if thread.join().is_err() {
                tracing::warn!("the thread of a rank panicked");
            }
        }
    }
}

/// Leaves the group of a thread that panics.
struct Leaving(Arc<dyn Communicator>);

impl Drop for Leaving {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort("its thread panicked");
        }
    }
}

/// Whether an error says that another rank failed.
fn is_of_others(error: &Error) -> bool {
    let Error::Api(qgemm_api::Error::Hal(error)) = error else { return false };
    matches!(error, HalError::RankGone { .. } | HalError::RankSilent { .. } | HalError::GroupSilent { .. })
}

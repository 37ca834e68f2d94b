//! A communicator's watch: it ends a communicator whose peers are
//! gone, or whose calls take too long.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qgemm_hal::{Communicator as _, HalError, HostCommunicator};

use super::api::{Api, Handle};
use super::one_shot::OneShot;
use crate::driver::DeviceContext;

/// Time between looks at the other ranks.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long a call may take that began before the communicator
/// failed.
const GRACE: Duration = Duration::from_secs(1);

/// A communicator's handle, and why it ended.
pub struct Watched {
    pub api: &'static Api,
    pub context: Arc<DeviceContext>,
    /// Tells at once when a rank is gone.
    pub control: Option<HostCommunicator>,
    pub one_shot: Option<OneShot>,
    pub limit: Duration,
    handle: Handle,
    state: Mutex<State>,
    changed: Condvar,
}

// SAFETY: the handle is used by one call at a time, which
// `state` admits, and by the watch; NCCL's communicators may be
// used from every thread.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

#[derive(Default)]
struct State {
    /// The error that ended the communicator.
    failed: Option<HalError>,
    /// Call under way, and when it has taken too long.
    call: Option<(Instant, String)>,
    /// Whether nobody needs the communicator.
    is_over: bool,
}

impl Watched {
    /// A communicator that was just made. [`Watched::watch`] ends it.
    pub fn new(
        api: &'static Api,
        context: Arc<DeviceContext>,
        handle: Handle,
        control: Option<HostCommunicator>,
        one_shot: Option<OneShot>,
        limit: Duration,
    ) -> Self {
        Self { api, context, control, one_shot, limit, handle, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call that may wait for the other ranks. The watch ends
    /// the communicator when it takes longer than the limit.
    ///
    /// # Errors
    /// The error that ended the communicator; a driver error with
    /// what NCCL says.
    pub fn call(&self, what: &str, call: impl FnOnce(Handle) -> Result<(), HalError>) -> Result<(), HalError> {
        let mut state = self.lock();
        while state.call.is_some() && state.failed.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        // Kernels that wait end before that, and name the rank.
        state.call = Some((Instant::now() + self.limit + INTERVAL, what.to_owned()));
        drop(state);
        let called = call(self.handle).and_then(|()| self.one_shot_failure().map_or(Ok(()), Err));
        let mut state = self.lock();
        state.call = None;
        if let Err(error) = called {
            state.failed.get_or_insert(error);
        }
        self.changed.notify_all();
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Error of an all-reduce over peer memory.
    fn one_shot_failure(&self) -> Option<HalError> {
        self.one_shot.as_ref().and_then(OneShot::failure)
    }

    /// Error of NCCL.
    pub fn error(&self, message: String) -> HalError {
        HalError::Driver { device: self.context.id(), call: "NCCL", message }
    }

    /// Fails the communicator; the watch ends it.
    pub fn fail(&self, error: HalError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Lets the watch end the communicator, which nobody needs.
    pub fn stop(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Looks at the other ranks until the communicator fails or is
    /// not needed, and ends it.
    pub fn watch(&self) {
        let mut state = self.lock();
        while !state.is_over && state.failed.is_none() {
            let late = state.call.as_ref().filter(|(deadline, _)| *deadline <= Instant::now());
            let late = late.map(|(_, what)| HalError::GroupSilent { limit: self.limit, what: what.clone() });
            drop(state);
            let gone = self.control.as_ref().and_then(|control| control.exchange().check().err());
            // SAFETY: the handle is alive: only this thread ends it, behind
            // this loop.
            let failed = || unsafe { self.api.asynchronous_error(self.handle) }.err().map(|why| self.error(why));
            let error = gone.or_else(|| self.one_shot_failure()).or(late).or_else(failed);
            state = self.lock();
            match error {
                Some(error) => drop(state.failed.get_or_insert(error)),
                None => state = self.changed.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner).0,
            }
        }
        if let (Some(control), Some(error)) = (&self.control, &state.failed) {
            control.abort(&error.to_string());
        }
        self.one_shot.iter().for_each(OneShot::stop);
        // No call begins any more. One that is under way soon returns,
        // or waits within NCCL.
        let is_called = |state: &mut State| state.call.is_some();
        let waited = self.changed.wait_timeout_while(state, GRACE, is_called);
        drop(waited.unwrap_or_else(PoisonError::into_inner).0);
        let ended = self.context.bind().map_err(|error| error.to_string()).and_then(|()| {
            // SAFETY: only this thread ends the handle, here. `failed` or
            // `is_over` is set, so that no call begins with it; NCCL lets a
            // call that waits within it return.
            unsafe { self.api.abort(self.handle) }
        });
        if let Err(why) = ended {
            tracing::warn!(why, "a communicator could not be ended");
        }
    }
}

//! `mbarrier`: phases that complete when all arrivals and
//! all expected bytes have come.

use std::collections::HashMap;

use super::block::{Block, Wait};
use super::clock::{Knowledge, Stamp};
use super::shared::Refused;
use crate::fault::{FaultKind, Site};

const BYTES: usize = 8;

/// An mbarrier.
#[derive(Debug)]
struct Barrier {
    count: u32,
    /// Missing arrivals of the phase.
    missing: u32,
    /// Expected bytes that have not arrived; negative if bytes
    /// arrived before they were announced.
    bytes: i64,
    phase: u32,
    /// Knowledge released by the arrivals of this phase.
    arriving: Knowledge,
    /// Knowledge released by all completed phases.
    complete: Knowledge,
    /// Event of the initialization; and whether it
    /// was made visible to TMA.
    made: Stamp,
    told: bool,
    waiting: Vec<(usize, u32)>,
}

/// mbarriers of a CTA, by offset in shared memory.
#[derive(Debug, Default)]
pub(super) struct Barriers(HashMap<usize, Barrier>);

impl Block<'_> {
    /// `mbarrier.init`.
    pub(super) fn make_barrier(&mut self, address: usize, count: u32) -> Result<(), Refused> {
        let thread = self.current;
        self.clocks.need_details();
        let offset = self.grid.shared.offset(address, BYTES, "mbarrier.init of")?;
        self.grid.shared.write(offset, BYTES, thread, &self.clocks)?;
        if count == 0 {
            return Err((FaultKind::BadOperand, "mbarrier.init for no threads".into()));
        }
        let barrier = Barrier {
            count,
            missing: count,
            bytes: 0,
            phase: 0,
            arriving: Knowledge::default(),
            complete: Knowledge::default(),
            made: self.clocks.stamp(thread),
            told: false,
            waiting: Vec::new(),
        };
        self.barriers_in_memory.0.insert(offset, barrier);
        Ok(())
    }

    /// `fence.mbarrier_init` of the running thread.
    pub(super) fn tell_of_barriers(&mut self) {
        let thread = self.current as u16;
        self.barriers_in_memory.0.values_mut().filter(|b| b.made.thread == thread).for_each(|b| b.told = true);
    }

    /// The mbarrier at an address, whose initialization the
    /// running thread must know.
    pub(super) fn barrier_at(&mut self, address: usize) -> Result<usize, Refused> {
        let offset = self.grid.shared.offset(address, BYTES, "an mbarrier of")?;
        let Some(barrier) = self.barriers_in_memory.0.get(&offset) else {
            return Err((FaultKind::Unwritten, format!("there is no mbarrier at offset {offset} of shared memory")));
        };
        if self.clocks.sees(self.current, barrier.made) {
            return Ok(offset);
        }
        let by = barrier.made.thread;
        Err((
            FaultKind::Race,
            format!("the mbarrier at offset {offset} was set up by thread {by} with no barrier between"),
        ))
    }

    /// `mbarrier.arrive`, after announcing `bytes`.
    pub(super) fn arrive_at(&mut self, address: usize, bytes: u32) -> Result<(), Refused> {
        let offset = self.barrier_at(address)?;
        let released = self.clocks.release(self.current);
        self.arrival_of(offset, bytes, &released)
    }

    /// One arrival, with the knowledge that it releases.
    pub(super) fn arrival_of(&mut self, offset: usize, bytes: u32, released: &Knowledge) -> Result<(), Refused> {
        let Some(barrier) = self.barriers_in_memory.0.get_mut(&offset) else { return Ok(()) };
        if barrier.missing == 0 {
            let detail = format!("more than {} threads arrive in a phase of the mbarrier at {offset}", barrier.count);
            return Err((FaultKind::BadOperand, detail));
        }
        barrier.bytes += i64::from(bytes);
        barrier.missing -= 1;
        barrier.arriving.join(released);
        self.advance(offset);
        Ok(())
    }

    /// Offset of the mbarrier, if a copy may complete on it.
    pub(super) fn barrier_for_copy(&mut self, address: usize) -> Result<usize, Refused> {
        let offset = self.barrier_at(address)?;
        if self.barriers_in_memory.0.get(&offset).is_some_and(|b| b.told) {
            return Ok(offset);
        }
        Err((FaultKind::Race, format!("the mbarrier at offset {offset} was set up without fence.mbarrier_init")))
    }

    /// A copy has delivered `bytes`; waiting threads learn `what`.
    pub(super) fn bytes_came(&mut self, offset: usize, bytes: usize, what: &Knowledge) {
        if let Some(barrier) = self.barriers_in_memory.0.get_mut(&offset) {
            barrier.bytes -= bytes as i64;
            barrier.arriving.join(what);
            self.advance(offset);
        }
    }

    /// Completes the phase if nothing is missing.
    fn advance(&mut self, offset: usize) {
        let Some(barrier) = self.barriers_in_memory.0.get_mut(&offset) else { return };
        if barrier.missing > 0 || barrier.bytes != 0 {
            return;
        }
        barrier.phase += 1;
        barrier.missing = barrier.count;
        let arrived = std::mem::take(&mut barrier.arriving);
        barrier.complete.join(&arrived);
        let phase = barrier.phase;
        let (done, waiting) = barrier.waiting.drain(..).partition(|&(_, parity)| phase % 2 != parity);
        barrier.waiting = waiting;
        for (thread, _) in done {
            self.wake(thread);
        }
    }

    /// `mbarrier.try_wait.parity` until it succeeds. Returns whether
    /// the running thread must wait.
    pub(super) fn wait_at(&mut self, address: usize, parity: u32, site: Site) -> Result<bool, Refused> {
        let offset = self.barrier_at(address)?;
        let thread = self.current;
        let Some(barrier) = self.barriers_in_memory.0.get_mut(&offset) else { return Ok(false) };
        if barrier.phase % 2 != parity % 2 {
            self.clocks.acquire(thread, &barrier.complete);
            return Ok(false);
        }
        barrier.waiting.push((thread, parity % 2));
        self.threads[thread].wait = Wait::Phase { offset, parity: parity % 2 };
        self.threads[thread].site = site;
        Ok(true)
    }

    /// Pending arrivals and bytes of an mbarrier, for messages.
    pub(super) fn wants_of(&self, offset: usize) -> String {
        self.barriers_in_memory
            .0
            .get(&offset)
            .map_or_else(String::new, |b| format!("{} of {} threads and {} bytes", b.missing, b.count, b.bytes))
    }
}

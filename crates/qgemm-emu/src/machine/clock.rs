//! Vector clocks: what each thread knows of other threads' past.
//!
//! Every thread has a clock that advances when it releases. CTA-wide
//! barriers are by far the most common synchronization; what they make
//! known is a single number, the `floor`: every event of the
//! CTA with a clock up to it is known to all
//! threads. Knowledge from other sources (named barriers, mbarriers)
//! is in the thread's row of `known`. Knowledge of other CTAs,
//! through atomics, is in `foreign`.

use std::collections::BTreeMap;
use std::rc::Rc;

/// Pseudo thread number of TMA. Its writes are known only to
/// threads that waited for them.
pub(super) const ENGINE: u16 = u16::MAX - 1;

/// An event: a thread and its clock at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub clock: u32,
    pub thread: u16,
}

/// Known past of one CTA.
#[derive(Clone, Debug, Default)]
struct Known {
    floor: u32,
    /// Known clock of TMA.
    engine: u32,
    /// Known clock of each thread where it may exceed the floor.
    /// Threads beyond the end have no entry.
    threads: Vec<u32>,
}

impl Known {
    fn join(&mut self, other: &Known) {
        self.floor = self.floor.max(other.floor);
        self.engine = self.engine.max(other.engine);
        if self.threads.len() < other.threads.len() {
            self.threads.resize(other.threads.len(), 0);
        }
        advance(&mut self.threads, &other.threads);
    }

    fn covers(&self, stamp: Stamp) -> bool {
        match stamp.thread {
            ENGINE => stamp.clock <= self.engine,
            thread => {
                stamp.clock <= self.floor || self.threads.get(usize::from(thread)).is_some_and(|&c| stamp.clock <= c)
            }
        }
    }
}

/// Advances each clock to the maximum of both.
fn advance(clocks: &mut [u32], others: &[u32]) {
    clocks.iter_mut().zip(others).for_each(|(clock, &other)| *clock = other.max(*clock));
}

/// Known past of other CTAs, by CTA.
#[derive(Clone, Debug, Default)]
pub(super) struct Knowledge(BTreeMap<u32, Known>);

impl Knowledge {
    pub(super) fn join(&mut self, other: &Knowledge) {
        for (&block, known) in &other.0 {
            self.0.entry(block).or_default().join(known);
        }
    }

    fn knows_others_than(&self, block: u32) -> bool {
        self.0.keys().any(|&other| other != block)
    }

    /// Whether an event of another CTA is known.
    fn covers(&self, block: u32, stamp: Stamp) -> bool {
        self.0.get(&block).is_some_and(|known| known.covers(stamp))
    }
}

/// Union of what several threads know of other CTAs.
/// It is mostly identical.
fn joined<'a>(all: impl Iterator<Item = &'a Option<Rc<Knowledge>>>) -> Option<Rc<Knowledge>> {
    all.flatten().fold(None, |all: Option<Rc<Knowledge>>, known| match all {
        Some(all) if Rc::ptr_eq(&all, known) => Some(all),
        Some(mut all) => {
            Rc::make_mut(&mut all).join(known);
            Some(all)
        }
        None => Some(Rc::clone(known)),
    })
}

/// Clocks of a CTA's threads.
#[derive(Debug)]
pub(super) struct Clocks {
    block: u32,
    /// First clock of this CTA. Smaller clocks belong to other CTAs.
    start: u32,
    floor: u32,
    highest: u32,
    own: Vec<u32>,
    /// Row t: the clocks that thread t knows of each thread
    /// beyond the floor. Empty until needed.
    known: Vec<u32>,
    foreign: Vec<Option<Rc<Knowledge>>>,
    /// Knowledge that a relaxed atomic of the thread releases:
    /// everything before its last fence.
    fenced: Vec<Option<Rc<Knowledge>>>,
    /// The thread's clock at its last `fence.proxy.async`.
    proxied: Vec<u32>,
    engine: u32,
    /// TMA clock known to each thread.
    engine_known: Vec<u32>,
    /// Knowledge that the thread's next fence acquires: everything
    /// that its relaxed atomics have read.
    pending: Vec<Option<Rc<Knowledge>>>,
}

impl Clocks {
    /// Clocks of CTA number `block`, above every clock used before.
    pub(super) fn new(block: u32, threads: usize, above: u32) -> Self {
        let start = above + 1;
        Self {
            block,
            start,
            floor: above,
            highest: start,
            own: vec![start; threads],
            known: Vec::new(),
            foreign: vec![None; threads],
            fenced: vec![None; threads],
            pending: vec![None; threads],
            proxied: vec![0; threads],
            engine: start,
            engine_known: vec![0; threads],
        }
    }

    pub(super) fn threads(&self) -> usize {
        self.own.len()
    }

    pub(super) fn block(&self) -> u32 {
        self.block
    }

    pub(super) fn start(&self) -> u32 {
        self.start
    }

    pub(super) fn floor(&self) -> u32 {
        self.floor
    }

    pub(super) fn highest(&self) -> u32 {
        self.highest
    }

    /// An event of `thread` at its current clock.
    pub(super) fn stamp(&self, thread: usize) -> Stamp {
        Stamp { clock: self.own[thread], thread: thread as u16 }
    }

    /// Whether `thread` knows an event of its own CTA.
    #[inline]
    pub(super) fn sees(&self, thread: usize, stamp: Stamp) -> bool {
        if stamp.thread == ENGINE {
            return stamp.clock < self.start || stamp.clock <= self.engine_known[thread];
        }
        stamp.clock <= self.floor || usize::from(stamp.thread) == thread || self.knows(thread, stamp)
    }

    fn knows(&self, thread: usize, stamp: Stamp) -> bool {
        let row = thread * self.own.len() + usize::from(stamp.thread);
        self.known.get(row).is_some_and(|&clock| stamp.clock <= clock)
    }

    /// Whether `thread` knows an event of any CTA.
    pub(super) fn sees_block(&self, thread: usize, block: u32, stamp: Stamp) -> bool {
        if block == self.block {
            return self.sees(thread, stamp);
        }
        self.foreign[thread].as_ref().is_some_and(|foreign| foreign.covers(block, stamp))
    }

    /// Whether threads have synchronized other than by CTA-wide barriers.
    pub(super) fn is_detailed(&self) -> bool {
        !self.known.is_empty()
    }

    /// Starts tracking individual threads.
    pub(super) fn need_details(&mut self) {
        if self.known.is_empty() {
            self.known = vec![0; self.own.len() * self.own.len()];
        }
    }

    /// CTA-wide barrier: everything is known to all threads.
    pub(super) fn meet_all(&mut self) {
        self.floor = self.highest;
        self.highest += 1;
        self.own.fill(self.highest);
        let engine = self.engine_known.iter().copied().max().unwrap_or(0);
        self.engine_known.fill(engine);
        let foreign = joined(self.foreign.iter());
        self.foreign.fill(foreign);
    }

    /// Barrier of some threads: each learns what all of them know,
    /// and what others have `released` to them. Equivalent to a
    /// release and acquire by each thread, but in one step,
    /// because warps converge very often.
    pub(super) fn meet(&mut self, threads: &[usize], released: &Knowledge) {
        self.need_details();
        let count = self.own.len();
        let mut all = released.0.get(&self.block).cloned().unwrap_or_default();
        all.threads.resize(count, 0);
        for &thread in threads {
            advance(&mut all.threads, &self.known[thread * count..][..count]);
            all.threads[thread] = self.own[thread];
            all.engine = all.engine.max(self.engine_known[thread]);
            self.tick(thread);
        }
        let mut foreign = joined(threads.iter().map(|&thread| &self.foreign[thread]));
        if released.knows_others_than(self.block) {
            let foreign = Rc::make_mut(foreign.get_or_insert_default());
            foreign.join(released);
            foreign.0.remove(&self.block);
        }
        for &thread in threads {
            self.known[thread * count..][..count].copy_from_slice(&all.threads);
            self.engine_known[thread] = all.engine;
            self.foreign[thread].clone_from(&foreign);
        }
    }

    /// Releases what `thread` knows, itself included. Its clock advances.
    pub(super) fn release(&mut self, thread: usize) -> Rc<Knowledge> {
        let mut all = self.foreign[thread].as_deref().cloned().unwrap_or_default();
        let count = self.own.len();
        let mut threads = match self.is_detailed() {
            true => self.known[thread * count..][..count].to_vec(),
            false => vec![0; thread + 1],
        };
        threads[thread] = self.own[thread];
        all.0.insert(self.block, Known { floor: self.floor, engine: self.engine_known[thread], threads });
        self.tick(thread);
        Rc::new(all)
    }

    fn tick(&mut self, thread: usize) {
        self.highest += 1;
        self.own[thread] = self.highest;
    }

    /// `thread` acquires what another thread released.
    pub(super) fn acquire(&mut self, thread: usize, what: &Knowledge) {
        if let Some(known) = what.0.get(&self.block) {
            self.need_details();
            let count = self.own.len();
            advance(&mut self.known[thread * count..][..count], &known.threads);
            self.engine_known[thread] = self.engine_known[thread].max(known.engine);
        }
        if what.knows_others_than(self.block) {
            let foreign = Rc::make_mut(self.foreign[thread].get_or_insert_default());
            foreign.join(what);
            foreign.0.remove(&self.block);
        }
    }

    /// An event of TMA at its current clock.
    pub(super) fn engine_event(&self) -> Stamp {
        Stamp { clock: self.engine, thread: ENGINE }
    }

    /// Releases everything that TMA has done, for
    /// threads that wait for it.
    pub(super) fn engine_release(&mut self) -> Knowledge {
        let known = Known { engine: self.engine, ..Known::default() };
        self.engine += 1;
        // Later CTAs start above this clock, too.
        self.highest = self.highest.max(self.engine);
        Knowledge(BTreeMap::from([(self.block, known)]))
    }

    /// `fence.proxy.async`: covers the thread's own events and
    /// those it knows of other threads.
    pub(super) fn fence_proxy(&mut self, thread: usize) {
        let threads = self.own.len();
        for (other, proxied) in self.proxied.iter_mut().enumerate() {
            let known = self.known.get(thread * threads + other).copied().unwrap_or(0).max(self.floor);
            let seen = if other == thread { self.own[thread] } else { known };
            *proxied = (*proxied).max(seen);
        }
        self.tick(thread);
    }

    /// Whether TMA and matrix units see an event: events of
    /// TMA always; events of a thread after a proxy fence by
    /// some thread that knows them.
    pub(super) fn is_proxied(&self, stamp: Stamp) -> bool {
        stamp.thread == ENGINE || stamp.clock <= self.proxied[usize::from(stamp.thread)]
    }

    /// `fence.acq_rel`: earlier relaxed atomics have acquired,
    /// and later ones will release.
    pub(super) fn fence(&mut self, thread: usize) {
        if let Some(read) = self.pending[thread].take() {
            self.acquire(thread, &read);
        }
        self.fenced[thread] = Some(self.release(thread));
    }

    /// Knowledge that a relaxed atomic write of `thread` releases.
    pub(super) fn fenced(&self, thread: usize) -> Option<&Knowledge> {
        self.fenced[thread].as_deref()
    }

    /// A relaxed atomic of `thread` has read released data,
    /// which its next fence acquires.
    pub(super) fn read_relaxed(&mut self, thread: usize, what: &Knowledge) {
        Rc::make_mut(self.pending[thread].get_or_insert_default()).join(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meeting_makes_everything_known() {
        let mut clocks = Clocks::new(0, 4, 7);
        let write = clocks.stamp(1);
        assert!(clocks.sees(1, write) && !clocks.sees(2, write));
        clocks.meet_all();
        assert!((0..4).all(|t| clocks.sees(t, write)));
        assert!(!clocks.sees(0, clocks.stamp(1)), "what comes after is not known");
    }

    #[test]
    fn release_and_acquire_order_two_threads_only() {
        let mut clocks = Clocks::new(0, 4, 0);
        let before = clocks.stamp(1);
        let released = clocks.release(1);
        let after = clocks.stamp(1);
        clocks.acquire(2, &released);
        assert!(clocks.sees(2, before) && !clocks.sees(2, after) && !clocks.sees(3, before));
        let passed_on = clocks.release(2);
        clocks.acquire(3, &passed_on);
        assert!(clocks.sees(3, before), "knowledge is passed on");
    }

    #[test]
    fn blocks_learn_through_what_was_released() {
        let mut first = Clocks::new(0, 2, 0);
        let write = first.stamp(1);
        first.meet_all();
        let released = first.release(0);
        let late = first.stamp(1);
        let mut second = Clocks::new(1, 2, first.highest());
        assert!(!second.sees_block(0, 0, write));
        second.acquire(0, &released);
        assert!(second.sees_block(0, 0, write) && !second.sees_block(0, 0, late) && !second.sees_block(1, 0, write));
        second.meet_all();
        assert!(second.sees_block(1, 0, write));
    }

    #[test]
    fn fences_turn_relaxed_atomics_into_releases_and_acquires() {
        let mut clocks = Clocks::new(0, 2, 0);
        let write = clocks.stamp(0);
        assert!(clocks.fenced(0).is_none());
        clocks.fence(0);
        let released = clocks.fenced(0).cloned().unwrap();
        clocks.read_relaxed(1, &released);
        assert!(!clocks.sees(1, write));
        clocks.fence(1);
        assert!(clocks.sees(1, write));
    }
}

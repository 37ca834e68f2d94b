//! Scheduler for the threads of a CTA: running, waiting, and
//! diagnosis when no thread can run.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::c_void;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};

use super::async_copy::AsyncCopies;
use super::clock::{Clocks, Knowledge};
use super::collective::Warp;
use super::delivery::PendingDeliveries;
use super::launch::Grid;
use super::mbarrier::Barriers;
use super::registers::Registers;
use super::shared::Refused;
use super::stacks;
use super::warpgroup::WarpInstructions;
use crate::counters::{Doing, Space, WarpTrace};
use crate::fault::{Fault, FaultKind, Site};

/// Barriers of a CTA (PTX ISA, "bar").
const BARRIERS: usize = 16;
/// Maximum memory accesses of a thread between waits, and maximum waits.
/// An infinite spin loop exceeds them.
const PATIENCE: u64 = 4_000_000;
const PATIENCE_WAITING: u64 = 1_000_000;

pub(super) type Fibre = Coroutine<(), (), (), DefaultStack>;

/// Wait state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing: it is running or ready.
    Nothing,
    /// The other lanes of its warp.
    Lanes,
    /// A barrier.
    Barrier(usize),
    /// The end of an mbarrier phase.
    Phase {
        /// Offset of the mbarrier.
        offset: usize,
        /// Parity of the phase.
        parity: u32,
    },
    /// This many registers, which other threads must release.
    Registers(u32),
    /// The thread has exited.
    Ended,
}

/// State of a thread.
pub(super) struct Thread {
    pub wait: Wait,
    pub site: Site,
    /// Whether it is past `griddepcontrol.wait`.
    pub waited: bool,
    pub copies: AsyncCopies,
    /// Number of waits so far.
    waits: u64,
    yielder: *const Yielder<(), ()>,
}

/// A barrier that some threads have reached.
#[derive(Clone, Debug, Default)]
struct Barrier {
    /// Expected threads; 0 before the first arrival.
    wants: usize,
    arrived: Vec<usize>,
    waiting: Vec<usize>,
    /// Knowledge released by threads that arrived without waiting.
    released: Knowledge,
}

/// A running CTA.
pub(super) struct Block<'a> {
    pub grid: &'a mut Grid,
    pub index: [u32; 3],
    pub clocks: Clocks,
    pub threads: Vec<Thread>,
    pub warps: Vec<Warp>,
    pub traces: Vec<WarpTrace>,
    pub barriers_in_memory: Barriers,
    pub pending_deliveries: PendingDeliveries,
    pub registers: Registers,
    /// Instructions of each warp.
    pub instructions: Vec<WarpInstructions>,
    pub fault: Option<Fault>,
    /// The running thread.
    pub current: usize,
    barriers: [Barrier; BARRIERS],
    ready: VecDeque<usize>,
    accesses: u64,
}

/// Kernel function and parameter.
#[derive(Clone, Copy)]
pub(super) struct Start {
    pub run: unsafe extern "C" fn(*const c_void),
    pub params: *const c_void,
}

impl<'a> Block<'a> {
    /// CTA number `number` of the launch, at grid position `index`.
    pub(super) fn new(grid: &'a mut Grid, number: u32, index: [u32; 3]) -> Self {
        let threads = grid.threads as usize;
        let thread = || Thread {
            wait: Wait::Nothing,
            site: Site::NONE,
            waited: false,
            copies: AsyncCopies::default(),
            waits: 0,
            yielder: std::ptr::null(),
        };
        let warp = |w: usize| Warp::new((threads - w * 32).min(32));
        let clocks = Clocks::new(number, threads, grid.last_clock);
        Self {
            index,
            clocks,
            threads: (0..threads).map(|_| thread()).collect(),
            warps: (0..threads.div_ceil(32)).map(warp).collect(),
            traces: (0..threads.div_ceil(32)).map(|_| WarpTrace::default()).collect(),
            barriers_in_memory: Barriers::default(),
            pending_deliveries: PendingDeliveries::default(),
            registers: Registers::new(threads),
            instructions: (0..threads.div_ceil(32)).map(|_| WarpInstructions::default()).collect(),
            fault: None,
            current: 0,
            barriers: Default::default(),
            ready: (0..threads).collect(),
            accesses: 0,
            grid,
        }
    }

    /// Records a fault of the running thread. The CTA stops when
    /// control returns to the scheduler.
    pub(super) fn fail(&mut self, (kind, detail): Refused, site: Site) {
        let thread = Some(self.current as u32);
        self.fault.get_or_insert(Fault { kind, detail, site: site.text(), block: self.index, thread });
    }

    /// Counts an access of the running thread. Returns whether
    /// there are suspiciously many.
    #[inline]
    pub(super) fn note_access(&mut self, site: Site) -> bool {
        self.accesses += 1;
        if self.accesses == PATIENCE {
            self.lose_patience(site);
        }
        self.accesses < PATIENCE
    }

    #[cold]
    fn lose_patience(&mut self, site: Site) {
        let detail = format!("{PATIENCE} accesses to memory without waiting for another thread");
        self.fail((FaultKind::Endless, detail), site);
    }

    /// Counts an access to shared memory.
    pub(super) fn note_shared(&mut self, doing: Doing, site: Site, thread: usize, offset: usize, bytes: usize) {
        if self.grid.counting {
            self.traces[thread / 32].note(Space::Shared, doing, site, thread % 32, offset, bytes);
        }
    }

    /// Counts an access to global memory.
    pub(super) fn note_global(&mut self, doing: Doing, site: Site, thread: usize, address: usize, bytes: usize) {
        if self.grid.counting {
            self.traces[thread / 32].note(Space::Global, doing, site, thread % 32, address, bytes);
        }
    }

    /// Makes a thread ready.
    pub(super) fn wake(&mut self, thread: usize) {
        self.threads[thread].wait = Wait::Nothing;
        self.ready.push_back(thread);
    }

    /// Arrival of the running thread at a barrier for `wants` threads
    /// (0: all). Returns whether it must wait.
    pub(super) fn arrive(&mut self, id: usize, wants: usize, waits: bool, site: Site) -> Result<bool, Refused> {
        let all = self.threads.len();
        let wants = if wants == 0 { all } else { wants };
        if id >= BARRIERS || wants > all || !wants.is_multiple_of(32.min(all)) {
            let detail = format!("barrier {id} for {wants} threads of {all}: 16 barriers, whole warps");
            return Err((FaultKind::BadOperand, detail));
        }
        let thread = self.current;
        let barrier = &mut self.barriers[id];
        if barrier.wants != 0 && barrier.wants != wants {
            let detail = format!("barrier {id} for {wants} threads, while others wait there for {}", barrier.wants);
            return Err((FaultKind::Divergence, detail));
        }
        barrier.wants = wants;
        barrier.arrived.push(thread);
        if waits {
            barrier.waiting.push(thread);
        } else {
            self.clocks.need_details();
            barrier.released.join(&self.clocks.release(thread));
        }
        self.threads[thread].site = site;
        if barrier.arrived.len() < wants {
            return Ok(waits);
        }
        let filled = std::mem::take(barrier);
        self.meet(&filled);
        self.grid.counters.barriers += 1;
        for other in filled.waiting.into_iter().filter(|&other| other != thread) {
            self.wake(other);
        }
        Ok(false)
    }

    /// The waiting threads learn what the arrived threads did.
    fn meet(&mut self, filled: &Barrier) {
        if filled.waiting.len() == self.threads.len() {
            self.clocks.meet_all();
        } else {
            self.clocks.meet(&filled.waiting, &filled.released);
        }
        for warp in filled.arrived.iter().map(|t| t / 32).collect::<BTreeSet<_>>() {
            self.settle(warp);
        }
    }

    /// The lanes of a warp have converged: counts
    /// their accesses since then.
    pub(super) fn settle(&mut self, warp: usize) {
        if self.grid.counting {
            self.traces[warp].settle(&mut self.grid.traffic);
        }
    }

    /// Location of a thread that waits for registers, if any.
    fn lacks_registers(&self) -> Option<Site> {
        self.threads.iter().find(|t| matches!(t.wait, Wait::Registers(_))).map(|t| t.site)
    }

    /// Diagnoses a state in which no thread can run
    /// and not all have exited.
    fn explain_standstill(&mut self) {
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for (t, thread) in self.threads.iter().enumerate() {
            let what = match thread.wait {
                Wait::Ended => "have ended".to_owned(),
                Wait::Nothing => continue,
                Wait::Lanes => format!("wait for their warp ({})", thread.site.text()),
                Wait::Barrier(id) => {
                    let wants = self.barriers[id].wants;
                    format!("wait at barrier {id} for {wants} threads ({})", thread.site.text())
                }
                Wait::Registers(wants) => format!("wait for {} ({})", self.registers.lack(wants), thread.site.text()),
                Wait::Phase { offset, parity } => {
                    let wants = self.wants_of(offset);
                    let site = thread.site.text();
                    format!("wait for phase {parity} of the mbarrier at offset {offset}, which wants {wants} ({site})")
                }
            };
            match groups.iter_mut().find(|(known, _)| *known == what) {
                Some((_, threads)) => threads.push(t),
                None => groups.push((what, vec![t])),
            }
        }
        // Lanes that lack registers explain why the other
        // lanes of their warps wait.
        let lacking = self.lacks_registers();
        let split_warp = (0..self.warps.len()).find_map(|w| self.warps[w].partial_site()).filter(|_| lacking.is_none());
        let kind = if split_warp.is_some() { FaultKind::Divergence } else { FaultKind::Deadlock };
        let first_waiting = self.threads.iter().find(|t| !matches!(t.wait, Wait::Ended | Wait::Nothing));
        let site = lacking.or(split_warp).or(first_waiting.map(|t| t.site)).unwrap_or(Site::NONE);
        let describe = |(what, threads): &(String, Vec<usize>)| format!("{} {what}", ranges(threads));
        let detail = groups.iter().map(describe).collect::<Vec<_>>().join("; ");
        self.fault = Some(Fault { kind, detail, site: site.text(), block: self.index, thread: None });
    }
}

/// `threads 0-31, 64`.
fn ranges(threads: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &t in threads {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == t => *last = t,
            _ => parts.push((t, t)),
        }
    }
    let part = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    format!("threads {}", parts.iter().map(part).collect::<Vec<_>>().join(", "))
}

/// Runs a CTA to its end or its first fault.
///
/// # Safety
/// `block` must be valid and nothing else may use it meanwhile.
/// `start` must be a kernel with the parameter that it expects.
pub(super) unsafe fn run(block: *mut Block<'_>, start: Start) -> std::io::Result<()> {
    // SAFETY: valid, by the contract. References to the CTA are short,
    // because its threads use it while they run.
    let count = unsafe { (*block).threads.len() };
    let mut fibres: Vec<Fibre> = Vec::with_capacity(count);
    for thread in 0..count {
        let block = block.cast::<Block<'static>>();
        let body = move |yielder: &Yielder<(), ()>, ()| {
            // SAFETY: the CTA outlives its fibres. The yielder lives as long
            // as this fibre, which alone uses it.
            unsafe { (&mut (*block).threads)[thread].yielder = yielder };
            // SAFETY: by the contract of `run`.
            unsafe { (start.run)(start.params) };
        };
        fibres.push(Coroutine::with_stack(stacks::take()?, body));
    }
    loop {
        // SAFETY: no thread is running.
        let state = unsafe { &mut *block };
        let Some(thread) = state.ready.pop_front() else {
            if state.fault.is_none() && state.let_something_arrive() {
                continue;
            }
            if state.fault.is_none()
                && state.lacks_registers().is_none()
                && let Err((refused, thread)) = state.check_warpgroups()
            {
                state.current = thread;
                state.fail(refused, Site::NONE);
            }
            if state.fault.is_none() && state.threads.iter().any(|t| t.wait != Wait::Ended) {
                state.explain_standstill();
            }
            break;
        };
        state.current = thread;
        state.accesses = 0;
        state.threads[thread].waits += 1;
        if state.threads[thread].waits > PATIENCE_WAITING {
            let detail = format!("has waited for other threads {PATIENCE_WAITING} times");
            state.fail((FaultKind::Endless, detail), state.threads[thread].site);
            break;
        }
        state.grid.place.thread = thread as u32;
        let ended = fibres[thread].resume(()).as_return().is_some();
        // SAFETY: the thread has switched back.
        let state = unsafe { &mut *block };
        if state.fault.is_some() {
            break;
        }
        if ended {
            state.threads[thread].wait = Wait::Ended;
        }
    }
    for mut fibre in fibres {
        if !fibre.done() {
            // SAFETY: the frames on the stack are C++ without destructors and
            // Rust callbacks that own nothing.
            unsafe { fibre.force_reset() };
        }
        stacks::give_back(fibre.into_stack());
    }
    Ok(())
}

/// Switches from the running thread to the scheduler
/// until the thread is woken.
///
/// # Safety
/// `block` must be the CTA of the calling thread, with
/// no reference to it alive.
pub(super) unsafe fn suspend(block: *mut Block<'_>) {
    // SAFETY: the yielder of the running fibre,
    // stored when the fibre began.
    unsafe {
        let yielder = (&(*block).threads)[(*block).current].yielder;
        (*yielder).suspend(());
    }
}

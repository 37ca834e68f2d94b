//! Registers that threads of a CTA exchange (`setmaxnreg`).

use std::collections::VecDeque;

use super::block::{Block, Wait};
use crate::fault::Site;

/// Registers of an SM, and the maximum of a thread.
const ALL: u32 = 65536;
const MOST: u32 = 256;
/// Allocation granularity of a thread's registers.
const UNIT: u32 = 8;

/// Register ownership.
#[derive(Debug)]
pub(super) struct Registers {
    /// Registers of each thread at launch. `__launch_bounds__` decides how many
    /// CTAs share an SM, which is unknown here; this assumes one
    /// CTA per SM, the maximum that any kernel is launched with.
    launched: u32,
    /// Registers of each thread.
    owned: Vec<u32>,
    free: u64,
    /// Threads that wait for registers, with the
    /// number they want, in order.
    waiting: VecDeque<(usize, u32)>,
}

impl Registers {
    pub(super) fn new(threads: usize) -> Self {
        let launched = (ALL / (threads as u32).max(1) / UNIT * UNIT).min(MOST);
        Self { launched, owned: vec![launched; threads], free: 0, waiting: VecDeque::new() }
    }

    /// Registers missing for threads that wait for `wants`
    /// registers, for messages.
    pub(super) fn lack(&self, wants: u32) -> String {
        let Self { launched, free, owned, .. } = self;
        let threads = owned.len();
        format!(
            "{wants} registers each: {free} are free of {launched} for each of {threads} that the block is launched with at most"
        )
    }
}

impl Block<'_> {
    /// Sets the running thread's registers to `count`. Returns
    /// whether it must wait for them.
    pub(super) fn set_registers(&mut self, count: u32, site: Site) -> bool {
        let thread = self.current;
        let registers = &mut self.registers;
        let owned = registers.owned[thread];
        if count > owned && u64::from(count - owned) > registers.free {
            registers.waiting.push_back((thread, count));
            self.threads[thread].wait = Wait::Registers(count);
            self.threads[thread].site = site;
            return true;
        }
        registers.free = registers.free + u64::from(owned) - u64::from(count);
        registers.owned[thread] = count;
        while let Some(&(other, wants)) = self.registers.waiting.front() {
            let registers = &mut self.registers;
            let lacks = u64::from(wants - registers.owned[other]);
            if lacks > registers.free {
                break;
            }
            registers.free -= lacks;
            registers.owned[other] = wants;
            registers.waiting.pop_front();
            self.wake(other);
        }
        false
    }
}

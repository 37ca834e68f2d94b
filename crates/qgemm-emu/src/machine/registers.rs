//! Registers that pass between the threads of a block (`setmaxnreg`).

use std::collections::VecDeque;

use super::block::{Block, Wait};
use crate::fault::Site;

/// Registers of a multiprocessor, and the most of a thread.
const ALL: u32 = 65536;
const MOST: u32 = 256;
/// A thread's registers come in as many at a time.
const UNIT: u32 = 8;

/// Who has how many.
#[derive(Debug)]
pub(super) struct Registers {
    /// Each thread's at the start. A kernel says by `__launch_bounds__` how many blocks a multiprocessor has at once, which is not known
    /// here: these are what it gets where that is one, the most that any kernel is launched with.
    launched: u32,
    /// By thread.
    owned: Vec<u32>,
    free: u64,
    /// Threads that wait for more, with how many they want, in their order.
    waiting: VecDeque<(usize, u32)>,
}

impl Registers {
    pub(super) fn new(threads: usize) -> Self {
        let launched = (ALL / (threads as u32).max(1) / UNIT * UNIT).min(MOST);
        Self { launched, owned: vec![launched; threads], free: 0, waiting: VecDeque::new() }
    }

    /// What threads that wait for `wants` registers lack, for messages.
    pub(super) fn lack(&self, wants: u32) -> String {
        let Self { launched, free, owned, .. } = self;
        let threads = owned.len();
        format!(
            "{wants} registers each: {free} are free of {launched} for each of {threads} that the block is launched with at most"
        )
    }
}

impl Block<'_> {
    /// The running thread has `count` registers from here on. Whether it must wait for them.
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

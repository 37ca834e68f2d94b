//! Ordering of atomics on global memory (PTX ISA,
//! "Memory Consistency Model").

use super::block::Block;
use super::shared::Refused;

const BYTES: usize = 4;

impl Block<'_> {
    /// `atom.add` of the running thread. A relaxed one releases everything
    /// before the thread's last fence; its next fence acquires.
    pub(super) fn order_atomic_add(&mut self, address: usize, relaxed: bool) -> Result<(), Refused> {
        let (thread, waited) = (self.current, self.threads[self.current].waited);
        let (memory, clocks) = (&mut self.grid.memory, &mut self.clocks);
        let place = memory.place(address, BYTES, "atom.add on")?;
        memory.access_atomically(place, thread, clocks, waited)?;
        match memory.released(address) {
            Some(before) if relaxed => clocks.read_relaxed(thread, before),
            Some(before) => clocks.acquire(thread, before),
            None => {}
        }
        if !relaxed {
            memory.release(address, &clocks.release(thread));
        } else if let Some(fenced) = clocks.fenced(thread) {
            memory.release(address, fenced);
        }
        Ok(())
    }

    /// `st.relaxed` of the running thread. It ends the release
    /// sequence at this address.
    pub(super) fn order_relaxed_store(&mut self, address: usize) -> Result<(), Refused> {
        let (thread, waited) = (self.current, self.threads[self.current].waited);
        let (memory, clocks) = (&mut self.grid.memory, &self.clocks);
        let place = memory.place(address, BYTES, "st.relaxed on")?;
        memory.access_atomically(place, thread, clocks, waited)?;
        memory.replace(address, clocks.fenced(thread));
        Ok(())
    }
}

//! `cp.async`: copies that arrive only when they are waited for. Until
//! then nobody may access the destination.

use std::collections::VecDeque;

use super::block::Block;
use super::shared::Refused;
use crate::counters::Doing;
use crate::fault::{FaultKind, Site};

/// Maximum bytes of one copy.
const MOST_BYTES: usize = 16;

/// A copy in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// Offset in shared memory.
    pub to: usize,
    from: usize,
    pub bytes: usize,
    /// Bytes that are read; the rest is zero-filled.
    source_bytes: usize,
}

/// Copies of a thread.
#[derive(Debug, Default)]
pub(super) struct AsyncCopies {
    /// Copies that are not yet in a group.
    open: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

impl AsyncCopies {
    /// `cp.async.commit_group`.
    pub(super) fn commit(&mut self) {
        let group = std::mem::take(&mut self.open);
        self.groups.push_back(group);
    }

    /// Takes all copies in flight.
    pub(super) fn take_all(&mut self) -> Vec<Copy> {
        let mut all: Vec<Copy> = self.groups.drain(..).flatten().collect();
        all.append(&mut self.open);
        all
    }
}

impl Block<'_> {
    /// `cp.async` of the running thread.
    pub(super) fn copy_async(
        &mut self,
        to: usize,
        from: usize,
        bytes: usize,
        source_bytes: usize,
        site: Site,
    ) -> Result<(), Refused> {
        if source_bytes > bytes || bytes > MOST_BYTES {
            return Err((FaultKind::BadOperand, format!("cp.async of {bytes} bytes from {source_bytes}")));
        }
        let thread = self.current;
        let offset = self.grid.shared.offset(to, bytes, "cp.async writes")?;
        self.grid.shared.write(offset, bytes, thread, &self.clocks)?;
        self.grid.shared.take_off(offset, bytes);
        if !from.is_multiple_of(bytes) {
            let detail = format!("cp.async of {bytes} bytes from an address that is no multiple of it");
            return Err((FaultKind::Misaligned, detail));
        }
        // The copy may happen now or at the wait, so it
        // must be allowed at both times.
        self.read_source(from, source_bytes)?;
        self.note_shared(Doing::Stores, site, thread, offset, bytes);
        if source_bytes > 0 {
            self.note_global(Doing::Loads, site, thread, from, source_bytes);
        }
        self.threads[thread].copies.open.push(Copy { to: offset, from, bytes, source_bytes });
        Ok(())
    }

    /// `cp.async.wait_group`: leaves at most `pending` of the
    /// running thread's groups in flight.
    pub(super) fn wait_copies(&mut self, pending: usize) -> Result<(), Refused> {
        let thread = self.current;
        while self.threads[thread].copies.groups.len() > pending {
            let Some(group) = self.threads[thread].copies.groups.pop_front() else { break };
            for copy in group {
                self.land(copy)?;
            }
        }
        Ok(())
    }

    fn land(&mut self, copy: Copy) -> Result<(), Refused> {
        self.fetch(&copy)?;
        self.grid.shared.write(copy.to, copy.bytes, self.current, &self.clocks)
    }

    /// Writes the copied bytes to shared memory.
    pub(super) fn fetch(&mut self, copy: &Copy) -> Result<(), Refused> {
        let data = self.read_source(copy.from, copy.source_bytes)?;
        self.grid.shared.land(copy.to, copy.bytes);
        self.grid.shared.set(copy.to, &data[..copy.bytes]);
        Ok(())
    }

    /// Bytes at `from` in global memory, zero-filled.
    fn read_source(&mut self, from: usize, bytes: usize) -> Result<[u8; MOST_BYTES], Refused> {
        let mut data = [0u8; MOST_BYTES];
        for (i, byte) in data[..bytes].iter_mut().enumerate() {
            let place = self.grid.memory.place(from + i, 1, "cp.async reads")?;
            self.grid.memory.read(place, self.current, &self.clocks, false, self.threads[self.current].waited)?;
            // SAFETY: the byte is in an operand of the launch
            // (`place`), which the launch may read.
            *byte = unsafe { std::ptr::with_exposed_provenance::<u8>(from + i).read() };
        }
        Ok(data)
    }
}

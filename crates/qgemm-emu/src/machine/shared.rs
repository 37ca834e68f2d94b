//! The shared memory of a block: who wrote and who read each byte.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use super::clock::{Clocks, Stamp};
use crate::fault::FaultKind;

/// Most shared memory that any chip gives a block, and the alignment that swizzled TMA tiles want.
const BYTES: usize = 228 * 1024;
const ALIGNMENT: usize = 1024;

/// More than one thread has read a byte.
const MANY: u16 = u16::MAX;

/// What happened to a byte. Clocks below the block's first are another block's, and mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Byte {
    write_clock: u32,
    write_thread: u16,
    /// The thread that read it, or [`MANY`].
    read_thread: u16,
    /// The latest clock of a read.
    read_clock: u32,
    /// Asynchronous copies that have not been waited for and write (or, as the source of `wgmma`, read) it.
    in_flight: u32,
}

/// An access that must not be, and why.
pub(super) type Refused = (FaultKind, String);

/// Memory of the size of the largest chip's, with its history.
#[derive(Debug)]
pub(super) struct SharedMemory {
    base: NonNull<u8>,
    /// Bytes that the launch asked for.
    len: usize,
    bytes: Vec<Byte>,
    /// Clock of each thread's latest read of each word, kept when [`Clocks::is_detailed`]; `thread * words + word`.
    reads: Vec<u32>,
}

impl SharedMemory {
    pub(super) fn new() -> Self {
        let layout = Self::layout();
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, len: 0, bytes: Vec::new(), reads: Vec::new() }
    }

    fn layout() -> Layout {
        // The size is a constant multiple of the alignment.
        Layout::from_size_align(BYTES, ALIGNMENT).unwrap_or(Layout::new::<u8>())
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Forgets everything, for a launch with `len` bytes a block.
    pub(super) fn reset(&mut self, len: usize) {
        self.len = len.min(BYTES);
        self.bytes.clear();
        self.bytes.resize(self.len, Byte::default());
        self.reads.clear();
    }

    /// The offset of an access that lies inside and is aligned.
    pub(super) fn offset(&self, address: usize, bytes: usize, what: &str) -> Result<usize, Refused> {
        self.offset_of(address, bytes, bytes, what)
    }

    /// The same, for an access that wants another alignment than its size.
    pub(super) fn offset_of(
        &self,
        address: usize,
        bytes: usize,
        alignment: usize,
        what: &str,
    ) -> Result<usize, Refused> {
        let offset = address.wrapping_sub(self.base.as_ptr().addr());
        if offset > self.len || bytes > self.len - offset {
            let at = offset.cast_signed();
            let detail = format!("{what} {bytes} bytes at offset {at} of {} bytes of shared memory", self.len);
            return Err((FaultKind::OutOfBounds, detail));
        }
        if !address.is_multiple_of(alignment) {
            return Err((FaultKind::Misaligned, format!("{what} {bytes} bytes at offset {offset} of shared memory")));
        }
        Ok(offset)
    }

    /// Checks and records a read of `len` bytes by a thread.
    #[inline]
    pub(super) fn read(&mut self, offset: usize, len: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        let now = clocks.stamp(thread);
        let start = clocks.start();
        for (i, byte) in self.bytes[offset..offset + len].iter_mut().enumerate() {
            if byte.write_clock < start {
                return Err(unwritten(offset + i));
            }
            if byte.in_flight != 0 {
                return Err(in_flight("reads", offset + i));
            }
            let write = Stamp { clock: byte.write_clock, thread: byte.write_thread };
            if !clocks.sees(thread, write) {
                return Err(race("reads", "wrote", offset + i, write.thread));
            }
            byte.note_read(now, clocks);
        }
        if clocks.is_detailed() {
            self.note_reads(offset, len, now, clocks);
        }
        Ok(())
    }

    /// Checks and records a write.
    #[inline]
    pub(super) fn write(&mut self, offset: usize, len: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        let now = clocks.stamp(thread);
        for i in offset..offset + len {
            let byte = self.bytes[i];
            if byte.in_flight != 0 {
                return Err(in_flight("writes", i));
            }
            let write = Stamp { clock: byte.write_clock, thread: byte.write_thread };
            if !clocks.sees(thread, write) {
                return Err(race("writes", "wrote", i, write.thread));
            }
            if byte.read_clock > clocks.floor()
                && let Some(reader) = self.unseen_reader(i, byte, thread, clocks)
            {
                return Err(race("writes", "read", i, reader));
            }
            self.bytes[i] = Byte { write_clock: now.clock, write_thread: now.thread, ..Byte::default() };
        }
        Ok(())
    }

    /// A thread that read byte `i` after the floor, which `thread` does not know of.
    fn unseen_reader(&self, i: usize, byte: Byte, thread: usize, clocks: &Clocks) -> Option<u16> {
        if byte.read_thread != MANY {
            let read = Stamp { clock: byte.read_clock, thread: byte.read_thread };
            return (!clocks.sees(thread, read)).then_some(read.thread);
        }
        if self.reads.is_empty() {
            // Only meetings of the whole block order anything here, and there was none since several threads read.
            return Some(MANY);
        }
        let words = self.len.div_ceil(4);
        let latest = |t: usize| Stamp { clock: self.reads[t * words + i / 4], thread: t as u16 };
        (0..self.reads.len() / words).map(latest).find(|&read| !clocks.sees(thread, read)).map(|read| read.thread)
    }

    fn note_reads(&mut self, offset: usize, len: usize, now: Stamp, clocks: &Clocks) {
        let words = self.len.div_ceil(4);
        if self.reads.is_empty() {
            self.reads.resize(words * clocks.threads(), 0);
        }
        let row = usize::from(now.thread) * words;
        self.reads[row + offset / 4..=row + (offset + len - 1) / 4].fill(now.clock);
    }

    /// Marks bytes as used by an asynchronous copy until [`SharedMemory::land`].
    pub(super) fn take_off(&mut self, offset: usize, len: usize) {
        self.bytes[offset..offset + len].iter_mut().for_each(|b| b.in_flight += 1);
    }

    /// The copy is done.
    pub(super) fn land(&mut self, offset: usize, len: usize) {
        self.bytes[offset..offset + len].iter_mut().for_each(|b| b.in_flight -= 1);
    }

    /// The copy engine has written bytes.
    pub(super) fn written_by_engine(&mut self, offset: usize, len: usize, stamp: Stamp) {
        let written = Byte { write_clock: stamp.clock, write_thread: stamp.thread, ..Byte::default() };
        self.bytes[offset..offset + len].fill(written);
    }

    /// Whether the matrix units see what was written: see [`Clocks::is_proxied`].
    pub(super) fn check_proxy(&self, offset: usize, len: usize, clocks: &Clocks) -> Result<(), Refused> {
        for (i, byte) in self.bytes[offset..offset + len].iter().enumerate() {
            let write = Stamp { clock: byte.write_clock, thread: byte.write_thread };
            if !clocks.is_proxied(write) {
                let (at, thread) = (offset + i, write.thread);
                let detail = format!(
                    "wgmma reads shared memory at offset {at}, which thread {thread} wrote with no fence.proxy.async since"
                );
                return Err((FaultKind::Race, detail));
            }
        }
        Ok(())
    }

    /// The bytes themselves.
    pub(super) fn get(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= self.len, "checked by `offset`");
        // SAFETY: the range lies in the allocation, which is initialised; kernels write it only through `set`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    /// Stores bytes.
    pub(super) fn set(&mut self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len, "checked by `offset`");
        // SAFETY: the range lies in the allocation, and `data`, which a reference guards, does not overlap it.
        unsafe { self.base.as_ptr().add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) }
    }
}

impl Byte {
    #[inline]
    fn note_read(&mut self, now: Stamp, clocks: &Clocks) {
        let first = self.read_clock <= clocks.floor();
        self.read_thread = if first || self.read_thread == now.thread { now.thread } else { MANY };
        self.read_clock = now.clock.max(self.read_clock);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout()) }
    }
}

fn unwritten(offset: usize) -> Refused {
    (FaultKind::Unwritten, format!("shared memory at offset {offset} was not written in this block"))
}

fn in_flight(what: &str, offset: usize) -> Refused {
    (FaultKind::InFlight, format!("{what} shared memory at offset {offset} before the copy was waited for"))
}

fn race(what: &str, other_did: &str, offset: usize, other: u16) -> Refused {
    let who = if other == MANY { "several threads".to_owned() } else { format!("thread {other}") };
    let detail = format!("{what} shared memory at offset {offset}, which {who} {other_did} with no barrier between");
    (FaultKind::Race, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> (SharedMemory, Clocks) {
        let mut memory = SharedMemory::new();
        memory.reset(64);
        (memory, Clocks::new(0, 4, 9))
    }

    fn kind(result: Result<(), Refused>) -> Option<FaultKind> {
        result.err().map(|(kind, _)| kind)
    }

    #[test]
    fn bounds_and_alignment_are_checked() {
        let (memory, _) = memory();
        let base = memory.base().as_ptr().addr();
        assert_eq!(memory.offset(base + 48, 16, "reads"), Ok(48));
        assert_eq!(memory.offset(base + 56, 16, "reads").unwrap_err().0, FaultKind::OutOfBounds);
        assert_eq!(memory.offset(base - 4, 4, "reads").unwrap_err().0, FaultKind::OutOfBounds);
        assert_eq!(memory.offset(base + 8, 16, "reads").unwrap_err().0, FaultKind::Misaligned);
    }

    #[test]
    fn reads_need_a_write_and_other_threads_a_barrier() {
        let (mut memory, mut clocks) = memory();
        assert_eq!(kind(memory.read(0, 4, 0, &clocks)), Some(FaultKind::Unwritten));
        memory.write(0, 4, 0, &clocks).unwrap();
        memory.read(0, 4, 0, &clocks).unwrap();
        assert_eq!(kind(memory.read(0, 4, 1, &clocks)), Some(FaultKind::Race));
        clocks.meet_all();
        memory.read(0, 4, 1, &clocks).unwrap();
        memory.write(4, 4, 2, &clocks).unwrap();
        assert_eq!(kind(memory.read(2, 4, 1, &clocks)), Some(FaultKind::Race), "half of it is another thread's");
    }

    #[test]
    fn a_write_waits_for_readers() {
        let (mut memory, mut clocks) = memory();
        memory.write(0, 4, 0, &clocks).unwrap();
        clocks.meet_all();
        memory.read(0, 4, 0, &clocks).unwrap();
        memory.write(0, 4, 0, &clocks).unwrap();
        clocks.meet_all();
        memory.read(0, 4, 1, &clocks).unwrap();
        memory.read(0, 4, 0, &clocks).unwrap();
        assert_eq!(kind(memory.write(0, 4, 0, &clocks)), Some(FaultKind::Race));
        clocks.meet_all();
        memory.write(0, 4, 3, &clocks).unwrap();
    }

    #[test]
    fn one_release_and_acquire_orders_readers_before_a_writer() {
        let (mut memory, mut clocks) = memory();
        clocks.need_details();
        memory.write(0, 4, 0, &clocks).unwrap();
        clocks.meet_all();
        memory.read(0, 4, 1, &clocks).unwrap();
        memory.read(0, 4, 2, &clocks).unwrap();
        let released = clocks.release(1);
        clocks.acquire(3, &released);
        assert_eq!(kind(memory.write(0, 4, 3, &clocks)), Some(FaultKind::Race), "thread 2 has not released");
        let released = clocks.release(2);
        clocks.acquire(3, &released);
        memory.write(0, 4, 3, &clocks).unwrap();
    }

    #[test]
    fn a_new_block_starts_unwritten() {
        let (mut memory, clocks) = memory();
        memory.write(0, 4, 0, &clocks).unwrap();
        let next = Clocks::new(1, 4, clocks.highest());
        assert_eq!(kind(memory.read(0, 4, 0, &next)), Some(FaultKind::Unwritten));
    }

    #[test]
    fn bytes_in_flight_may_not_be_touched() {
        let (mut memory, clocks) = memory();
        memory.write(0, 16, 0, &clocks).unwrap();
        memory.take_off(0, 16);
        assert_eq!(kind(memory.read(4, 4, 0, &clocks)), Some(FaultKind::InFlight));
        assert_eq!(kind(memory.write(4, 4, 0, &clocks)), Some(FaultKind::InFlight));
        memory.land(0, 16);
        memory.read(4, 4, 0, &clocks).unwrap();
    }
}

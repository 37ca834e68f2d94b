//! Shared memory of a CTA, with the writer and readers of
//! each word, or of each byte when threads share a word.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ptr::NonNull;

use super::clock::{Clocks, Stamp};
use crate::fault::FaultKind;

/// Maximum shared memory of any chip, and the
/// alignment of swizzled TMA tiles.
const BYTES: usize = 228 * 1024;
const ALIGNMENT: usize = 1024;

const WORD: usize = 4;

/// Value that matrix instructions read from unwritten memory:
/// a NaN in both f16 and bf16.
pub(super) const NO_NUMBER: u16 = 0x7fff;

/// More than one thread has read a cell.
const MANY: u16 = u16::MAX;

/// Access history of a word or byte. Clocks below the CTA's
/// first belong to another CTA and are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cell {
    write_clock: u32,
    write_thread: u16,
    /// The reading thread, or [`MANY`].
    read_thread: u16,
    /// Clock of the latest read.
    read_clock: u32,
    /// Unwaited asynchronous copies that write it, or read
    /// it as a source of `wgmma`.
    in_flight: u16,
    /// Whether the bytes were accessed individually and have separate cells.
    split: bool,
    /// Whether the latest write was an atomic, which other
    /// atomics need not wait for.
    is_atomic: bool,
}

/// A forbidden access, with the reason.
pub(super) type Refused = (FaultKind, String);

/// Memory of the largest chip's size, with its history.
#[derive(Debug)]
pub(super) struct SharedMemory {
    base: NonNull<u8>,
    /// Bytes that the launch requested.
    len: usize,
    words: Vec<Cell>,
    /// Cells of split words.
    bytes: HashMap<usize, [Cell; WORD]>,
    /// Clock of each thread's latest read of each word, kept when
    /// [`Clocks::is_detailed`]; index `thread * words + word`.
    reads: Vec<u32>,
}

impl SharedMemory {
    pub(super) fn new() -> Self {
        let layout = Self::layout();
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, len: 0, words: Vec::new(), bytes: HashMap::new(), reads: Vec::new() }
    }

    fn layout() -> Layout {
        // The size is a constant multiple of the alignment.
        Layout::from_size_align(BYTES, ALIGNMENT).unwrap_or(Layout::new::<u8>())
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Clears the history for a launch with `len` bytes per CTA.
    pub(super) fn reset(&mut self, len: usize) {
        self.len = len.min(BYTES);
        self.words.clear();
        self.words.resize(self.len.div_ceil(WORD), Cell::default());
        self.bytes.clear();
        self.reads.clear();
    }

    /// Offset of an access that is in bounds and aligned.
    #[inline]
    pub(super) fn offset(&self, address: usize, bytes: usize, what: &str) -> Result<usize, Refused> {
        let offset = address.wrapping_sub(self.base.as_ptr().addr());
        // The common case, faster than a division.
        let is_aligned = bytes.is_power_of_two() && address & (bytes - 1) == 0;
        if is_aligned && offset <= self.len && bytes <= self.len - offset {
            return Ok(offset);
        }
        self.offset_of(address, bytes, bytes, what)
    }

    /// As [`SharedMemory::offset`], with an alignment other than the size.
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
        let whole = len.is_multiple_of(WORD);
        if !whole || !self.words[offset / WORD..][..len / WORD].iter_mut().all(|cell| cell.read(now, clocks)) {
            self.read_bytes(offset, len, thread, clocks)?;
        }
        if clocks.is_detailed() || !self.reads.is_empty() {
            self.note_reads(offset, len, now, clocks);
        }
        Ok(())
    }

    /// Byte by byte: for split words, and to find the fault.
    #[cold]
    fn read_bytes(&mut self, offset: usize, len: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        self.check_landed("reads", offset, len)?;
        for i in offset..offset + len {
            let cell = self.byte(i);
            if cell.read(clocks.stamp(thread), clocks) {
                continue;
            }
            return Err(if cell.write_clock < clocks.start() {
                unwritten(i)
            } else {
                race("reads", "wrote", i, cell.write_thread)
            });
        }
        Ok(())
    }

    /// Checks and records a write.
    #[inline]
    pub(super) fn write(&mut self, offset: usize, len: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        let now = clocks.stamp(thread);
        let whole = len.is_multiple_of(WORD);
        if whole && self.words[offset / WORD..][..len / WORD].iter_mut().all(|cell| cell.write(now, clocks)) {
            return Ok(());
        }
        self.write_bytes(offset, len, thread, clocks)
    }

    /// Checks and records `atom.shared.add` on a word. It only
    /// races with non-atomic accesses.
    pub(super) fn add_atomically(&mut self, offset: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        let cell = self.words[offset / WORD];
        if cell.write_clock < clocks.start() {
            return Err(unwritten(offset));
        }
        if !cell.is_atomic || cell.in_flight != 0 || cell.split {
            self.write(offset, WORD, thread, clocks)?;
        } else if let Some(reader) = self.unseen_reader(offset, cell, thread, clocks) {
            return Err(race("adds to", "read", offset, reader));
        }
        self.words[offset / WORD] = Cell { is_atomic: true, ..Cell::written(clocks.stamp(thread)) };
        Ok(())
    }

    #[cold]
    fn write_bytes(&mut self, offset: usize, len: usize, thread: usize, clocks: &Clocks) -> Result<(), Refused> {
        self.check_landed("writes", offset, len)?;
        let now = clocks.stamp(thread);
        for i in offset..offset + len {
            let cell = *self.byte(i);
            if !clocks.sees(thread, cell.last_write()) {
                return Err(race("writes", "wrote", i, cell.write_thread));
            }
            if let Some(reader) = self.unseen_reader(i, cell, thread, clocks) {
                return Err(race("writes", "read", i, reader));
            }
            *self.byte(i) = Cell::written(now);
        }
        if len.is_multiple_of(WORD) {
            for word in offset / WORD..(offset + len) / WORD {
                self.bytes.remove(&word);
                self.words[word] = Cell::written(now);
            }
        }
        Ok(())
    }

    /// Only whole words are ever in flight.
    fn check_landed(&self, what: &str, offset: usize, len: usize) -> Result<(), Refused> {
        let mut words = offset / WORD..=(offset + len - 1) / WORD;
        words.find(|&word| self.words[word].in_flight != 0).map_or(Ok(()), |word| Err(in_flight(what, word * WORD)))
    }

    /// Cell of one byte; splits its word.
    fn byte(&mut self, offset: usize) -> &mut Cell {
        let word = &mut self.words[offset / WORD];
        let bytes = self.bytes.entry(offset / WORD).or_insert([*word; WORD]);
        word.split = true;
        &mut bytes[offset % WORD]
    }

    /// A thread that has read byte `i` without `thread` knowing.
    fn unseen_reader(&self, i: usize, cell: Cell, thread: usize, clocks: &Clocks) -> Option<u16> {
        if cell.read_clock <= clocks.floor() {
            return None;
        }
        if cell.read_thread != MANY {
            return (!clocks.sees(thread, cell.last_read())).then_some(cell.read_thread);
        }
        if self.reads.is_empty() {
            // While only CTA-wide barriers order accesses, none has
            // occurred since several threads read. Once others do, the
            // readers are no longer known.
            return (!clocks.is_detailed()).then_some(MANY);
        }
        let words = self.words.len();
        let latest = |t: usize| Stamp { clock: self.reads[t * words + i / WORD], thread: t as u16 };
        (0..self.reads.len() / words).map(latest).find(|&read| !clocks.sees(thread, read)).map(|read| read.thread)
    }

    fn note_reads(&mut self, offset: usize, len: usize, now: Stamp, clocks: &Clocks) {
        let words = self.words.len();
        if self.reads.is_empty() {
            self.reads.resize(words * clocks.threads(), 0);
        }
        let row = usize::from(now.thread) * words;
        self.reads[row + offset / WORD..=row + (offset + len - 1) / WORD].fill(now.clock);
    }

    /// Marks words, which the caller has just written, as in flight
    /// until [`SharedMemory::land`].
    pub(super) fn take_off(&mut self, offset: usize, len: usize) {
        self.words[offset / WORD..][..len / WORD].iter_mut().for_each(|cell| cell.in_flight += 1);
    }

    /// The copy is done.
    pub(super) fn land(&mut self, offset: usize, len: usize) {
        self.words[offset / WORD..][..len / WORD].iter_mut().for_each(|cell| cell.in_flight -= 1);
    }

    /// TMA has written words that were in flight.
    pub(super) fn written_by_engine(&mut self, offset: usize, len: usize, stamp: Stamp) {
        self.words[offset / WORD..][..len / WORD].fill(Cell::written(stamp));
    }

    /// Whether the matrix units see the writes: see [`Clocks::is_proxied`].
    pub(super) fn check_proxy(&mut self, offset: usize, len: usize, clocks: &Clocks) -> Result<(), Refused> {
        let words = &self.words[offset / WORD..][..len / WORD];
        if words.iter().all(|cell| !cell.split && clocks.is_proxied(cell.last_write())) {
            return Ok(());
        }
        for at in offset..offset + len {
            let write = self.byte(at).last_write();
            if !clocks.is_proxied(write) {
                let thread = write.thread;
                let detail = format!(
                    "wgmma reads shared memory at offset {at}, which thread {thread} wrote with no fence.proxy.async since"
                );
                return Err((FaultKind::Race, detail));
            }
        }
        Ok(())
    }

    /// Reads the bytes.
    pub(super) fn get(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= self.len, "checked by `offset`");
        // SAFETY: the range is in the allocation, which is initialised.
        // Kernels write it only through `set`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    /// Writes the bytes.
    pub(super) fn set(&mut self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len, "checked by `offset`");
        // SAFETY: the range is in the allocation. `data` is guarded by
        // a reference and does not overlap it.
        unsafe { self.base.as_ptr().add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) }
    }
}

impl Cell {
    fn written(stamp: Stamp) -> Self {
        Self { write_clock: stamp.clock, write_thread: stamp.thread, ..Self::default() }
    }

    fn last_write(&self) -> Stamp {
        Stamp { clock: self.write_clock, thread: self.write_thread }
    }

    fn last_read(&self) -> Stamp {
        Stamp { clock: self.read_clock, thread: self.read_thread }
    }

    /// Records a read, if it is allowed and the
    /// word is not split.
    #[inline]
    fn read(&mut self, now: Stamp, clocks: &Clocks) -> bool {
        let thread = usize::from(now.thread);
        let is_ready = self.write_clock >= clocks.start() && self.in_flight == 0 && !self.split;
        if !is_ready || !clocks.sees(thread, self.last_write()) {
            return false;
        }
        let first = self.read_clock <= clocks.floor();
        self.read_thread = if first || self.read_thread == now.thread { now.thread } else { MANY };
        self.read_clock = now.clock.max(self.read_clock);
        true
    }

    /// Records a write, if it is allowed, the word is not
    /// split, and no list of readers is needed.
    #[inline]
    fn write(&mut self, now: Stamp, clocks: &Clocks) -> bool {
        let thread = usize::from(now.thread);
        let is_free = self.in_flight == 0 && !self.split && clocks.sees(thread, self.last_write());
        let is_read = || self.read_thread == MANY || !clocks.sees(thread, self.last_read());
        if !is_free || (self.read_clock > clocks.floor() && is_read()) {
            return false;
        }
        *self = Self::written(now);
        true
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
    fn atomics_race_with_what_is_not_atomic() {
        let (mut memory, mut clocks) = memory();
        assert_eq!(kind(memory.add_atomically(0, 0, &clocks)), Some(FaultKind::Unwritten));
        memory.write(0, 4, 0, &clocks).unwrap();
        assert_eq!(kind(memory.add_atomically(0, 1, &clocks)), Some(FaultKind::Race));
        clocks.meet_all();
        memory.add_atomically(0, 1, &clocks).unwrap();
        memory.add_atomically(0, 2, &clocks).unwrap();
        assert_eq!(kind(memory.read(0, 4, 1, &clocks)), Some(FaultKind::Race));
        assert_eq!(kind(memory.write(0, 4, 3, &clocks)), Some(FaultKind::Race));
        clocks.meet_all();
        memory.read(0, 4, 3, &clocks).unwrap();
        assert_eq!(kind(memory.add_atomically(0, 1, &clocks)), Some(FaultKind::Race));
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
    fn threads_may_share_a_word() {
        let (mut memory, mut clocks) = memory();
        memory.write(0, 2, 0, &clocks).unwrap();
        memory.write(2, 2, 1, &clocks).unwrap();
        memory.read(0, 2, 0, &clocks).unwrap();
        assert_eq!(kind(memory.read(0, 4, 0, &clocks)), Some(FaultKind::Race));
        assert_eq!(kind(memory.write(0, 4, 0, &clocks)), Some(FaultKind::Race));
        clocks.meet_all();
        memory.read(0, 4, 2, &clocks).unwrap();
        assert_eq!(kind(memory.write(3, 1, 0, &clocks)), Some(FaultKind::Race), "thread 2 reads all of it");
        clocks.meet_all();
        memory.write(0, 4, 0, &clocks).unwrap();
        assert_eq!(kind(memory.write(3, 1, 1, &clocks)), Some(FaultKind::Race), "thread 0 writes all of it");
        assert_eq!(kind(memory.read(4, 1, 0, &clocks)), Some(FaultKind::Unwritten));
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

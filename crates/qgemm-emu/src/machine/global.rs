//! Global memory: the operands of a launch. No other
//! memory may be accessed.

use std::collections::HashMap;

use super::clock::{Clocks, Knowledge, Stamp};
use super::shared::Refused;
use crate::fault::FaultKind;

/// Access of a launch to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads at any time, even before earlier launches are done: weights.
    Weight,
    /// Reads.
    Read,
    /// Writes, and reads of its own writes.
    Write,
    /// Reads and writes of initialized data.
    ReadWrite,
}

/// An operand: an address range that the launch may access.
#[derive(Clone, Debug)]
pub struct Region {
    /// Name for messages: `x`, `the partial sums`.
    pub name: &'static str,
    /// Address of its first byte.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
    /// Allowed access.
    pub access: Access,
}

/// Access history of a byte during the launch. CTA numbers are
/// stored plus one, so that 0 means none.
#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    write_block: u32,
    write_clock: u32,
    read_block: u32,
    read_clock: u32,
    write_thread: u16,
    read_thread: u16,
    /// Other threads have read it, too: [`GlobalMemory::readers`].
    has_readers: bool,
    /// Atomics have accessed it since the last plain write:
    /// [`GlobalMemory::atomics`].
    has_atomics: bool,
}

#[derive(Debug)]
struct Tracked {
    region: Region,
    /// Empty for read-only operands.
    bytes: Vec<Byte>,
}

/// The operands of one launch.
#[derive(Debug)]
pub(super) struct GlobalMemory {
    regions: Vec<Tracked>,
    /// Knowledge released through atomics, by address.
    released: HashMap<usize, Knowledge>,
    /// Last atomic on each address: CTA and event.
    atomics: HashMap<usize, (u32, Stamp)>,
    /// Readers of a byte (region, offset) that the latest
    /// reader did not know of.
    readers: HashMap<(usize, usize), Vec<(u32, Stamp)>>,
    /// Whether the kernel starts early: see [`FaultKind::TooEarly`].
    starts_early: bool,
}

/// A byte range of a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    region: usize,
    offset: usize,
    len: usize,
}

impl GlobalMemory {
    pub(super) fn new(regions: &[Region], starts_early: bool) -> Self {
        let tracked = |region: &Region| {
            let bytes = match region.access {
                Access::Weight | Access::Read => Vec::new(),
                Access::Write | Access::ReadWrite => vec![Byte::default(); region.len],
            };
            Tracked { region: region.clone(), bytes }
        };
        Self {
            regions: regions.iter().map(tracked).collect(),
            released: HashMap::new(),
            atomics: HashMap::new(),
            readers: HashMap::new(),
            starts_early,
        }
    }

    /// Location of an access that is aligned and inside one operand.
    pub(super) fn place(&self, address: usize, len: usize, what: &str) -> Result<Place, Refused> {
        for (index, tracked) in self.regions.iter().enumerate() {
            let offset = address.wrapping_sub(tracked.region.start);
            if offset < tracked.region.len {
                if len > tracked.region.len - offset {
                    break;
                }
                if !address.is_multiple_of(len) {
                    let detail = format!("{what} {len} bytes at offset {offset} of {}", tracked.region.name);
                    return Err((FaultKind::Misaligned, detail));
                }
                return Ok(Place { region: index, offset, len });
            }
        }
        Err((FaultKind::OutOfBounds, format!("{what} {len} bytes {}", self.describe(address))))
    }

    /// Describes an address relative to the nearest operand.
    fn describe(&self, address: usize) -> String {
        let distance = |t: &&Tracked| {
            let (start, end) = (t.region.start, t.region.start + t.region.len);
            start.saturating_sub(address).max(address.saturating_sub(end))
        };
        match self.regions.iter().min_by_key(distance) {
            None => format!("at {address:#x}; the launch has no operands"),
            Some(Tracked { region, .. }) => {
                let offset = address.wrapping_sub(region.start).cast_signed();
                format!("at offset {offset} of {}, which is {} bytes long", region.name, region.len)
            }
        }
    }

    /// Checks and records a read. `read_only`: through the non-coherent path;
    /// `waited`: after `griddepcontrol.wait`.
    pub(super) fn read(
        &mut self,
        place: Place,
        thread: usize,
        clocks: &Clocks,
        read_only: bool,
        waited: bool,
    ) -> Result<(), Refused> {
        let Tracked { region, bytes } = &mut self.regions[place.region];
        if self.starts_early && !waited && region.access != Access::Weight {
            return Err((FaultKind::TooEarly, format!("reads {}", region.name)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        if read_only {
            let detail = format!("reads {} by ld.global.nc, while this launch writes it", region.name);
            return Err((FaultKind::BadOperand, detail));
        }
        let now = clocks.stamp(thread);
        for (i, byte) in bytes[place.offset..place.offset + place.len].iter_mut().enumerate() {
            let at = place.offset + i;
            let order = Order { region, at, thread, clocks };
            if byte.has_atomics {
                order.check("reads", "changed atomically", self.atomics.get(&order.word()).copied())?;
            } else if byte.write_block == 0 && region.access == Access::Write {
                let detail = format!("offset {at} of {} was not written by this launch", region.name);
                return Err((FaultKind::Unwritten, detail));
            }
            order.check("reads", "wrote", byte.last_write())?;
            if let Some(reader) = byte.last_read().filter(|&(block, read)| !clocks.sees_block(thread, block, read)) {
                let readers = self.readers.entry((place.region, at)).or_default();
                readers.retain(|&(block, read)| !clocks.sees_block(thread, block, read));
                readers.push(reader);
                byte.has_readers = true;
            }
            byte.read_block = clocks.block() + 1;
            byte.read_clock = now.clock;
            byte.read_thread = now.thread;
        }
        Ok(())
    }

    /// Checks and records a write.
    pub(super) fn write(&mut self, place: Place, thread: usize, clocks: &Clocks, waited: bool) -> Result<(), Refused> {
        let Tracked { region, bytes } = &mut self.regions[place.region];
        if bytes.is_empty() {
            return Err((FaultKind::ReadOnly, format!("writes offset {} of {}", place.offset, region.name)));
        }
        if self.starts_early && !waited {
            return Err((FaultKind::TooEarly, format!("writes {}", region.name)));
        }
        let now = clocks.stamp(thread);
        for (i, byte) in bytes[place.offset..place.offset + place.len].iter_mut().enumerate() {
            let order = Order { region, at: place.offset + i, thread, clocks };
            if byte.has_atomics {
                order.check("writes", "changed atomically", self.atomics.get(&order.word()).copied())?;
            }
            order.check_plain("writes", byte)?;
            if byte.has_readers {
                for reader in self.readers.remove(&(place.region, order.at)).unwrap_or_default() {
                    order.check("writes", "read", Some(reader))?;
                }
            }
            let block = clocks.block() + 1;
            *byte = Byte { write_block: block, write_clock: now.clock, write_thread: now.thread, ..Byte::default() };
        }
        Ok(())
    }

    /// Checks and records an atomic access. Atomics are ordered among
    /// themselves, but not with plain accesses.
    pub(super) fn access_atomically(
        &mut self,
        place: Place,
        thread: usize,
        clocks: &Clocks,
        waited: bool,
    ) -> Result<(), Refused> {
        let Tracked { region, bytes } = &mut self.regions[place.region];
        if bytes.is_empty() {
            return Err((FaultKind::ReadOnly, format!("an atomic on offset {} of {}", place.offset, region.name)));
        }
        if self.starts_early && !waited {
            return Err((FaultKind::TooEarly, format!("an atomic on {}", region.name)));
        }
        let bytes = &mut bytes[place.offset..place.offset + place.len];
        let is_new = |byte: &Byte| byte.write_block == 0 && !byte.has_atomics;
        if region.access == Access::Write && bytes.iter().any(is_new) {
            let detail = format!("an atomic on offset {} of {}, which holds nothing yet", place.offset, region.name);
            return Err((FaultKind::Unwritten, detail));
        }
        for (i, byte) in bytes.iter_mut().enumerate() {
            let order = Order { region, at: place.offset + i, thread, clocks };
            order.check_plain("changes atomically", byte)?;
            byte.has_atomics = true;
        }
        self.atomics.insert(region.start + place.offset, (clocks.block(), clocks.stamp(thread)));
        Ok(())
    }

    /// Knowledge released by atomics on `address`.
    pub(super) fn released(&self, address: usize) -> Option<&Knowledge> {
        self.released.get(&address)
    }

    /// A read-modify-write on `address` releases `what` and
    /// continues the release sequence.
    pub(super) fn release(&mut self, address: usize, what: &Knowledge) {
        self.released.entry(address).or_default().join(what);
    }

    /// An atomic store: ends the earlier release sequence.
    pub(super) fn replace(&mut self, address: usize, what: Option<&Knowledge>) {
        match what {
            Some(what) => self.released.insert(address, what.clone()),
            None => self.released.remove(&address),
        };
    }
}

impl Byte {
    fn last_write(&self) -> Option<(u32, Stamp)> {
        let stamp = Stamp { clock: self.write_clock, thread: self.write_thread };
        (self.write_block != 0).then(|| (self.write_block - 1, stamp))
    }

    fn last_read(&self) -> Option<(u32, Stamp)> {
        let stamp = Stamp { clock: self.read_clock, thread: self.read_thread };
        (self.read_block != 0).then(|| (self.read_block - 1, stamp))
    }
}

/// An access to one byte that must be ordered
/// after earlier accesses.
struct Order<'a> {
    region: &'a Region,
    at: usize,
    thread: usize,
    clocks: &'a Clocks,
}

impl Order<'_> {
    /// Address of the byte's word, the unit of atomics.
    fn word(&self) -> usize {
        (self.region.start + self.at) / 4 * 4
    }

    /// Checks against the last plain write and read.
    fn check_plain(&self, does: &str, byte: &Byte) -> Result<(), Refused> {
        self.check(does, "wrote", byte.last_write())?;
        self.check(does, "read", byte.last_read())
    }

    /// `event` is a CTA and its event, if any.
    fn check(&self, does: &str, did: &str, event: Option<(u32, Stamp)>) -> Result<(), Refused> {
        match event {
            Some((block, stamp)) if !self.clocks.sees_block(self.thread, block, stamp) => {
                Err(self.unordered(does, did, block, stamp.thread))
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn unordered(&self, does: &str, did: &str, block: u32, other: u16) -> Refused {
        let what = format!("{does} offset {} of {}", self.at, self.region.name);
        if block == self.clocks.block() {
            return (FaultKind::Race, format!("{what}, which thread {other} {did} with no barrier between"));
        }
        let who = format!("thread {other} of block number {block}");
        (FaultKind::UnorderedBlocks, format!("{what}, which {who} {did}: no release there is acquired here"))
    }
}

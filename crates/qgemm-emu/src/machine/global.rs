//! Global memory: the operands of a launch. Nothing else may be touched.

use std::collections::HashMap;

use super::clock::{Clocks, Knowledge, Stamp};
use super::shared::Refused;
use crate::fault::FaultKind;

/// What a launch may do with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it at any time, even before earlier launches are done: weights.
    Weight,
    /// Read it.
    Read,
    /// Write it, and read what it has written itself.
    Write,
    /// Read and write it; it holds something already.
    ReadWrite,
}

/// An operand: addresses that the launch may touch.
#[derive(Clone, Debug)]
pub struct Region {
    /// What it is, for messages: `x`, `the partial sums`.
    pub name: &'static str,
    /// Address of its first byte.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
    /// What the launch may do with it.
    pub access: Access,
}

/// What happened to a byte during the launch. Block numbers are one more than the block's, so that 0 is nobody.
#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    write_block: u32,
    write_clock: u32,
    read_block: u32,
    read_clock: u32,
    write_thread: u16,
    read_thread: u16,
}

#[derive(Debug)]
struct Tracked {
    region: Region,
    /// Empty for operands that are only read.
    bytes: Vec<Byte>,
}

/// The operands of one launch.
#[derive(Debug)]
pub(super) struct GlobalMemory {
    regions: Vec<Tracked>,
    /// What was released through atomics, by address.
    released: HashMap<usize, Knowledge>,
    /// The kernel starts early: see [`FaultKind::TooEarly`].
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
        Self { regions: regions.iter().map(tracked).collect(), released: HashMap::new(), starts_early }
    }

    /// Where an access lies, when it is inside one operand and aligned.
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

    /// Where an address lies in terms of the nearest operand.
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

    /// Checks and records a read. `read_only`: through the path that does not see writes; `waited`: after
    /// `griddepcontrol.wait`.
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
            if byte.write_block == 0 {
                if region.access == Access::Write {
                    let detail = format!("offset {at} of {} was not written by this launch", region.name);
                    return Err((FaultKind::Unwritten, detail));
                }
            } else {
                let write = Stamp { clock: byte.write_clock, thread: byte.write_thread };
                check_order(region, at, "reads", "wrote", byte.write_block - 1, write, thread, clocks)?;
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
            let at = place.offset + i;
            let write = Stamp { clock: byte.write_clock, thread: byte.write_thread };
            let read = Stamp { clock: byte.read_clock, thread: byte.read_thread };
            if byte.write_block != 0 {
                check_order(region, at, "writes", "wrote", byte.write_block - 1, write, thread, clocks)?;
            }
            if byte.read_block != 0 {
                check_order(region, at, "writes", "read", byte.read_block - 1, read, thread, clocks)?;
            }
            let block = clocks.block() + 1;
            *byte = Byte { write_block: block, write_clock: now.clock, write_thread: now.thread, ..Byte::default() };
        }
        Ok(())
    }

    /// Checks an atomic access, which is ordered with other atomics by itself.
    pub(super) fn check_atomic(&self, place: Place, waited: bool) -> Result<(), Refused> {
        let Tracked { region, bytes } = &self.regions[place.region];
        if bytes.is_empty() {
            return Err((FaultKind::ReadOnly, format!("an atomic on offset {} of {}", place.offset, region.name)));
        }
        if self.starts_early && !waited {
            return Err((FaultKind::TooEarly, format!("an atomic on {}", region.name)));
        }
        if region.access == Access::Write {
            let detail = format!("an atomic on offset {} of {}, which holds nothing yet", place.offset, region.name);
            return Err((FaultKind::Unwritten, detail));
        }
        Ok(())
    }

    /// What atomics on `address` have released.
    pub(super) fn released(&self, address: usize) -> Option<&Knowledge> {
        self.released.get(&address)
    }

    /// A read-modify-write on `address` releases `what`, and continues what was released before.
    pub(super) fn release(&mut self, address: usize, what: &Knowledge) {
        self.released.entry(address).or_default().join(what);
    }

    /// A plain atomic store: what was released before it is not to be had from it.
    pub(super) fn replace(&mut self, address: usize, what: Option<&Knowledge>) {
        match what {
            Some(what) => self.released.insert(address, what.clone()),
            None => self.released.remove(&address),
        };
    }
}

#[expect(clippy::too_many_arguments, reason = "two accesses and their place")]
fn check_order(
    region: &Region,
    at: usize,
    does: &str,
    did: &str,
    block: u32,
    stamp: Stamp,
    thread: usize,
    clocks: &Clocks,
) -> Result<(), Refused> {
    if clocks.sees_block(thread, block, stamp) {
        return Ok(());
    }
    let name = region.name;
    Err(if block == clocks.block() {
        let detail =
            format!("{does} offset {at} of {name}, which thread {} {did} with no barrier between", stamp.thread);
        (FaultKind::Race, detail)
    } else {
        let detail = format!(
            "{does} offset {at} of {name}, which thread {} of block number {block} {did}: no release there is acquired here",
            stamp.thread
        );
        (FaultKind::UnorderedBlocks, detail)
    })
}

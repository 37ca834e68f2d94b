//! Asynchronous deliveries to shared memory that complete on an mbarrier:
//! TMA tiles, bulk copies, and `cp.async` copies tied to an mbarrier.
//! They arrive as late as possible, when no thread can run.

use std::collections::VecDeque;

use super::async_copy::Copy;
use super::block::Block;
use super::shared::Refused;
use super::tensor_copy::TensorCopy;
use crate::fault::{FaultKind, Site};

/// Alignment of addresses and sizes of `cp.async.bulk`.
const BULK_ALIGNMENT: usize = 16;

/// A copy in flight.
#[derive(Debug)]
pub(super) enum Delivery {
    /// `cp.async.bulk.tensor`.
    Tensor(TensorCopy),
    /// `cp.async.bulk`.
    Bulk(BulkCopy),
    /// `cp.async.mbarrier.arrive.noinc`: a thread's copies, and the offset of
    /// the mbarrier on which they arrive.
    Copies(Vec<Copy>, usize),
}

/// A contiguous copy.
#[derive(Debug)]
pub(super) struct BulkCopy {
    /// Offset in shared memory.
    to: usize,
    from: usize,
    bytes: usize,
    /// Offset of the mbarrier.
    barrier: usize,
    /// Whether the thread was past `griddepcontrol.wait`
    /// when it issued the copy.
    waited: bool,
}

/// Deliveries in issue order, with thread and source location.
#[derive(Debug, Default)]
pub(super) struct PendingDeliveries(VecDeque<(usize, Site, Delivery)>);

impl PendingDeliveries {
    pub(super) fn push(&mut self, thread: usize, site: Site, delivery: Delivery) {
        self.0.push_back((thread, site, delivery));
    }
}

impl Block<'_> {
    /// Completes the oldest delivery, if any.
    pub(super) fn let_something_arrive(&mut self) -> bool {
        let Some((thread, site, delivery)) = self.pending_deliveries.0.pop_front() else { return false };
        self.current = thread;
        let arrived = match &delivery {
            Delivery::Tensor(copy) => self.deliver_tile(copy),
            Delivery::Bulk(copy) => self.deliver_bytes(copy),
            Delivery::Copies(copies, barrier) => self.deliver_copies(copies, *barrier),
        };
        if let Err(refused) = arrived {
            self.fail(refused, site);
        }
        true
    }

    /// `cp.async.bulk` of the running thread.
    pub(super) fn copy_bulk(
        &mut self,
        to: usize,
        from: usize,
        bytes: usize,
        barrier: usize,
        site: Site,
    ) -> Result<(), Refused> {
        let barrier = self.barrier_for_copy(barrier)?;
        if !bytes.is_multiple_of(BULK_ALIGNMENT) || !from.is_multiple_of(BULK_ALIGNMENT) {
            let detail = format!("cp.async.bulk of {bytes} bytes from {from:#x}: both must be multiples of 16");
            return Err((FaultKind::Misaligned, detail));
        }
        let offset = self.grid.shared.offset_of(to, bytes, BULK_ALIGNMENT, "cp.async.bulk writes")?;
        self.grid.shared.write(offset, bytes, self.current, &self.clocks)?;
        self.grid.shared.take_off(offset, bytes);
        let waited = self.threads[self.current].waited;
        let copy = BulkCopy { to: offset, from, bytes, barrier, waited };
        self.pending_deliveries.push(self.current, site, Delivery::Bulk(copy));
        Ok(())
    }

    fn deliver_bytes(&mut self, copy: &BulkCopy) -> Result<(), Refused> {
        self.grid.shared.land(copy.to, copy.bytes);
        for unit in (0..copy.bytes).step_by(BULK_ALIGNMENT) {
            let from = copy.from + unit;
            let place = self.grid.memory.place(from, BULK_ALIGNMENT, "cp.async.bulk reads")?;
            self.grid.memory.read(place, self.current, &self.clocks, false, copy.waited)?;
            let mut data = [0u8; BULK_ALIGNMENT];
            // SAFETY: the bytes are in an operand of the launch
            // (`place`), which the launch may read.
            unsafe {
                let source = std::ptr::with_exposed_provenance::<u8>(from);
                data.as_mut_ptr().copy_from_nonoverlapping(source, BULK_ALIGNMENT);
            }
            self.grid.shared.set(copy.to + unit, &data);
        }
        let stamp = self.clocks.engine_event();
        self.grid.shared.written_by_engine(copy.to, copy.bytes, stamp);
        let known = self.clocks.engine_release();
        self.bytes_came(copy.barrier, copy.bytes, &known);
        Ok(())
    }

    /// `cp.async.mbarrier.arrive.noinc` of the running thread.
    pub(super) fn arrive_with_copies(&mut self, barrier: usize, site: Site) -> Result<(), Refused> {
        let barrier = self.barrier_at(barrier)?;
        let copies = self.threads[self.current].copies.take_all();
        self.pending_deliveries.push(self.current, site, Delivery::Copies(copies, barrier));
        Ok(())
    }

    fn deliver_copies(&mut self, copies: &[Copy], barrier: usize) -> Result<(), Refused> {
        for copy in copies {
            self.fetch(copy)?;
            let stamp = self.clocks.engine_event();
            self.grid.shared.written_by_engine(copy.to, copy.bytes, stamp);
        }
        let known = self.clocks.engine_release();
        self.arrival_of(barrier, 0, &known)
    }
}

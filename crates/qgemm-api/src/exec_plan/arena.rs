//! [`PlanArena`]: working memory of a plan, with canaries that debug runs check.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{Buffer, BufferMut, BufferRef, Device, Stream};

use super::file::{MemoryPlan, Region, RegionKind};
use super::mismatch::expect;
use super::recurrent::PlannedState;
use crate::context::Context;
use crate::error::Error;

/// Region name of the workspace.
pub(super) const WORKSPACE: &str = "workspace";

/// Memory of all mutable regions of a plan: activations, temporaries and the workspace.
///
/// Weights have their own memory ([`Context::load`](crate::Context::load)).
/// [`LoadedPlan::arena`](super::LoadedPlan::arena) creates it.
///
/// A canary follows each region. Checks are on in debug builds, or by
/// [`PlanArena::check_canaries`]. Each operation then writes the canaries of
/// regions whose lifetime begins. Afterwards it checks those of all live regions,
/// which waits for the stream.
#[derive(Debug)]
pub struct PlanArena {
    buffer: Buffer,
    regions: Arc<Regions>,
    /// Whether the canary of each region is written.
    armed: Vec<bool>,
    checks: bool,
}

/// Mutable regions of a plan, by name.
#[derive(Debug)]
pub(super) struct Regions {
    all: Vec<Region>,
    by_name: HashMap<String, usize>,
    /// Start of the memory within the plan's arena.
    start: usize,
    /// Bytes of the memory.
    bytes: usize,
    canary: u8,
}

/// Memory of a run.
pub(super) struct RunMemory<'a> {
    pub memory: BufferMut<'a>,
    pub regions: &'a Regions,
}

impl PlanArena {
    /// An arena of at least `bytes`.
    pub(super) fn new(device: &dyn Device, regions: &Arc<Regions>, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            buffer: device.allocate(regions.bytes.max(bytes), "a plan's arena")?,
            armed: vec![false; regions.all.len()],
            regions: Arc::clone(regions),
            checks: cfg!(debug_assertions),
        })
    }

    /// Enables or disables canary checks after operations. Default: on in debug builds.
    pub fn check_canaries(mut self, on: bool) -> Self {
        self.checks = on;
        self
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Whole memory, for the caller's own work. A region is at its offset minus
    /// [`MemoryPlan::weights_end`].
    pub fn memory(&mut self) -> &mut Buffer {
        &mut self.buffer
    }

    /// The memory alone, for [`LoadedPlan::step_in`](super::LoadedPlan::step_in). Nothing checks
    /// canaries in it.
    pub fn into_memory(self) -> Buffer {
        self.buffer
    }

    /// Read view of a region.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region(&self, name: &str) -> Result<BufferRef<'_>, Error> {
        Ok(self.buffer.slice(self.regions.range(name)?)?)
    }

    /// Write view of a region, for the caller's own steps.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region_mut(&mut self, name: &str) -> Result<BufferMut<'_>, Error> {
        let range = self.regions.range(name)?;
        Ok(self.buffer.slice_mut(range)?)
    }

    /// Takes other regions in the same memory. Fails where the caches differ or the memory is
    /// too short, and changes nothing then.
    pub(super) fn take_regions(
        &mut self,
        device: &dyn Device,
        stream: &Stream,
        regions: &Arc<Regions>,
    ) -> Result<(), Error> {
        if Arc::ptr_eq(&self.regions, regions) {
            return Ok(());
        }
        expect("memory.regions of kv_cache and recurrent_state", self.regions.caches(), regions.caches())?;
        let (expected, got) = (regions.bytes(), self.buffer.len());
        if got < expected {
            return Err(Error::BufferTooShort { operand: "memory of a plan", expected, got });
        }
        self.armed = vec![false; regions.all.len()];
        self.regions = Arc::clone(regions);
        // The counters of split products begin at zero.
        if let Ok(workspace) = self.regions.range(WORKSPACE) {
            device.fill(stream, self.buffer.slice_mut(workspace)?, 0)?;
        }
        Ok(())
    }

    /// The memory, in the form of the plan of these regions.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] when it has that of another plan.
    pub(super) fn memory_of(&mut self, regions: &Arc<Regions>) -> Result<BufferMut<'_>, Error> {
        match Arc::ptr_eq(&self.regions, regions) {
            true => Ok(self.buffer.view_mut()),
            false => {
                let (at, expected, got) = ("arena", "that of the captured plan", "that of another");
                Err(Error::PlanMismatch { at: at.into(), expected: expected.into(), got: got.into() })
            }
        }
    }

    /// Copies the contents of another arena's KV caches and recurrent states, through the host: for an arena that
    /// replaces one which is too short.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] when the caches differ, or a device error.
    pub fn copy_caches(&mut self, ctx: &Context, from: &Self) -> Result<(), Error> {
        expect("memory.regions of kv_cache and recurrent_state", self.regions.caches(), from.regions.caches())?;
        for region in from.regions.all.iter().filter(|region| region.kind.is_persistent()) {
            let bytes: Vec<u8> = ctx.download(from.region(&region.name)?)?;
            ctx.upload_into(&bytes, self.region_mut(&region.name)?)?;
        }
        Ok(())
    }

    /// Fills one of the equal slots of a region with zeros.
    pub(super) fn clear_slot(
        &mut self,
        device: &dyn Device,
        stream: &Stream,
        state: &PlannedState,
        slot: usize,
    ) -> Result<(), Error> {
        let most = state.slots.saturating_sub(1);
        if slot > most {
            return Err(Error::OutOfRange { name: "slot", least: 0, most, got: slot });
        }
        let range = self.regions.range(&state.region)?;
        let bytes = range.len() / state.slots.max(1);
        let first = range.start + slot * bytes;
        Ok(device.fill(stream, self.buffer.slice_mut(first..first + bytes)?, 0)?)
    }

    /// The memory for a run.
    pub(super) fn run_memory(&mut self) -> RunMemory<'_> {
        RunMemory { memory: self.buffer.view_mut(), regions: &self.regions }
    }

    /// Writes the canaries of regions that are live at operation `op` and not armed yet.
    pub(super) fn arm(&mut self, device: &dyn Device, stream: &Stream, op: usize) -> Result<(), Error> {
        if !self.checks {
            return Ok(());
        }
        let regions = &*self.regions;
        for (region, armed) in regions.all.iter().zip(&mut self.armed) {
            let lives = (region.first_op..=region.last_op).contains(&op);
            if lives && !*armed {
                device.fill(stream, self.buffer.slice_mut(regions.canary_of(region))?, regions.canary)?;
            }
            // Other regions may reuse the bytes of a dead one.
            *armed = lives;
        }
        Ok(())
    }

    /// Waits for `stream` and checks the canaries of all live regions.
    pub(super) fn check(&self, device: &dyn Device, stream: &Stream, op: &str) -> Result<(), Error> {
        if !self.checks {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for (region, _) in self.regions.all.iter().zip(&self.armed).filter(|(_, armed)| **armed) {
            let canary = self.regions.canary_of(region);
            bytes.resize(canary.len(), 0);
            device.download(stream, self.buffer.slice(canary)?, &mut bytes)?;
            if let Some(byte) = bytes.iter().position(|&byte| byte != self.regions.canary) {
                let (op, region, len) = (op.to_owned(), region.name.clone(), region.bytes);
                return Err(Error::CanaryOverwritten { op, region, len, byte });
            }
        }
        Ok(())
    }
}

impl Regions {
    pub fn new(plan: &MemoryPlan) -> Self {
        let all: Vec<Region> = plan.regions.iter().filter(|r| r.kind != RegionKind::Weight).cloned().collect();
        let by_name = all.iter().enumerate().map(|(place, region)| (region.name.clone(), place)).collect();
        let (start, bytes) = (plan.weights_end, plan.arena_bytes - plan.weights_end);
        Self { all, by_name, start, bytes, canary: plan.canary_value }
    }

    /// Names, offsets and sizes of KV caches and recurrent states, as text.
    fn caches(&self) -> String {
        let caches = self.all.iter().filter(|region| region.kind.is_persistent());
        let places = caches.map(|region| format!("{} {}+{}", region.name, region.offset - self.start, region.bytes));
        places.collect::<Vec<_>>().join(", ")
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Byte range of a region in the memory.
    pub fn range(&self, name: &str) -> Result<Range<usize>, Error> {
        let place = self.by_name.get(name);
        let place = place.ok_or_else(|| Error::NotInPlan { what: "region", name: name.to_owned() })?;
        let region = &self.all[*place];
        let first = region.offset - self.start;
        Ok(first..first + region.bytes)
    }

    /// Byte range of an optional region. Empty without one.
    pub fn optional(&self, name: Option<&str>) -> Result<Range<usize>, Error> {
        name.map_or(Ok(0..0), |name| self.range(name))
    }

    /// Byte range of an operation's workspace. Empty if it needs none.
    pub fn workspace(&self, bytes: usize) -> Result<Range<usize>, Error> {
        if bytes == 0 { Ok(0..0) } else { self.range(WORKSPACE) }
    }

    /// Byte range of a region's canary.
    fn canary_of(&self, region: &Region) -> Range<usize> {
        let first = region.offset - self.start;
        first + region.bytes..first + region.reserved
    }
}

impl RunMemory<'_> {
    /// Views of ranges of the memory.
    pub fn parts<const R: usize, const W: usize>(
        &mut self,
        read: [Range<usize>; R],
        write: [Range<usize>; W],
    ) -> Result<([BufferRef<'_>; R], [BufferMut<'_>; W]), Error> {
        Ok(self.memory.reborrow().parts(read, write)?)
    }
}

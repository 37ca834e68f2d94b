//! [`PlanArena`]: working memory of a plan, with canaries that debug runs check.

use std::ops::Range;

use qgemm_hal::{Buffer, BufferMut, BufferRef, Device, Stream};

use super::file::{MemoryPlan, Region, RegionKind};
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
    /// Regions in this memory.
    regions: Vec<Region>,
    /// Start of this memory within the plan's arena.
    start: usize,
    canary: u8,
    /// Whether the canary of each region is written.
    armed: Vec<bool>,
    checks: bool,
}

impl PlanArena {
    pub(super) fn new(device: &dyn Device, plan: &MemoryPlan) -> Result<Self, Error> {
        let regions: Vec<Region> = plan.regions.iter().filter(|r| r.kind != RegionKind::Weight).cloned().collect();
        Ok(Self {
            buffer: device.allocate(plan.arena_bytes - plan.weights_end, "a plan's arena")?,
            armed: vec![false; regions.len()],
            regions,
            start: plan.weights_end,
            canary: plan.canary_value,
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

    /// Read view of a region.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region(&self, name: &str) -> Result<BufferRef<'_>, Error> {
        Ok(self.buffer.slice(self.range(name)?)?)
    }

    /// Write view of a region, for the caller's own steps.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region_mut(&mut self, name: &str) -> Result<BufferMut<'_>, Error> {
        let range = self.range(name)?;
        Ok(self.buffer.slice_mut(range)?)
    }

    /// Byte range of a region in this memory.
    pub(super) fn range(&self, name: &str) -> Result<Range<usize>, Error> {
        let region = self.regions.iter().find(|region| region.name == name);
        let region = region.ok_or_else(|| Error::NotInPlan { what: "region", name: name.to_owned() })?;
        Ok(self.bytes_of(region))
    }

    /// Byte range of an optional region. Empty without one.
    pub(super) fn given(&self, name: &Option<String>) -> Result<Range<usize>, Error> {
        name.as_deref().map_or(Ok(0..0), |name| self.range(name))
    }

    /// Byte range of an operation's workspace. Empty if it needs none.
    pub(super) fn workspace(&self, bytes: usize) -> Result<Range<usize>, Error> {
        if bytes == 0 { Ok(0..0) } else { self.range(WORKSPACE) }
    }

    fn bytes_of(&self, region: &Region) -> Range<usize> {
        let first = region.offset - self.start;
        first..first + region.bytes
    }

    /// Byte range of a region's canary.
    fn canary_of(&self, region: &Region) -> Range<usize> {
        let first = region.offset - self.start;
        first + region.bytes..first + region.reserved
    }

    pub(super) fn parts<const R: usize, const W: usize>(
        &mut self,
        read: [Range<usize>; R],
        write: [Range<usize>; W],
    ) -> Result<([BufferRef<'_>; R], [BufferMut<'_>; W]), Error> {
        Ok(self.buffer.parts(read, write)?)
    }

    /// Writes the canaries of regions that are live at operation `op` and not armed yet.
    pub(super) fn arm(&mut self, device: &dyn Device, stream: &Stream, op: usize) -> Result<(), Error> {
        if !self.checks {
            return Ok(());
        }
        for place in 0..self.regions.len() {
            let region = &self.regions[place];
            let lives = (region.first_op..=region.last_op).contains(&op);
            if lives && !self.armed[place] {
                let canary = self.canary_of(region);
                device.fill(stream, self.buffer.slice_mut(canary)?, self.canary)?;
            }
            // Other regions may reuse the bytes of a dead one.
            self.armed[place] = lives;
        }
        Ok(())
    }

    /// Waits for `stream` and checks the canaries of all live regions.
    pub(super) fn check(&self, device: &dyn Device, stream: &Stream, op: &str) -> Result<(), Error> {
        if !self.checks {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for (region, _) in self.regions.iter().zip(&self.armed).filter(|(_, armed)| **armed) {
            let canary = self.canary_of(region);
            bytes.resize(canary.len(), 0);
            device.download(stream, self.buffer.slice(canary)?, &mut bytes)?;
            if let Some(byte) = bytes.iter().position(|&byte| byte != self.canary) {
                let (op, region, len) = (op.to_owned(), region.name.clone(), region.bytes);
                return Err(Error::CanaryOverwritten { op, region, len, byte });
            }
        }
        Ok(())
    }
}

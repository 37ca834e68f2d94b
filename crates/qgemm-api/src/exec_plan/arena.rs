//! [`PlanArena`]: the memory that a plan's operations work in, with canaries that a debug run checks.

use std::ops::Range;

use qgemm_hal::{Buffer, BufferMut, BufferRef, Device, Stream};

use super::file::{MemoryPlan, Region, RegionKind};
use crate::error::Error;

/// Name of the workspace's region.
pub(super) const WORKSPACE: &str = "workspace";

/// Memory for everything in a plan that changes: activations, temporaries and the workspace. Weights are in memory of their own
/// ([`Context::load`](crate::Context::load)). Made by [`LoadedPlan::arena`](super::LoadedPlan::arena).
///
/// Behind each region lies a canary. Where canaries are checked (in debug builds, or as [`PlanArena::check_canaries`] says), every
/// operation that a plan runs here puts them behind the regions whose lives begin, and looks at those of all that live when it is
/// done, which waits for the stream.
#[derive(Debug)]
pub struct PlanArena {
    buffer: Buffer,
    /// Those that lie here.
    regions: Vec<Region>,
    /// Where in the plan's arena this memory begins.
    start: usize,
    canary: u8,
    /// Whether the canary of each region is there.
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

    /// Whether operations look at the canaries when they are done. They do in debug builds unless told otherwise.
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

    /// All of the memory, for work of the caller's own: regions lie at their offsets less [`MemoryPlan::weights_end`].
    pub fn memory(&mut self) -> &mut Buffer {
        &mut self.buffer
    }

    /// A region, to be read.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region(&self, name: &str) -> Result<BufferRef<'_>, Error> {
        Ok(self.buffer.slice(self.range(name)?)?)
    }

    /// A region, to be written: by the caller's own steps, such as norms and attention.
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region_mut(&mut self, name: &str) -> Result<BufferMut<'_>, Error> {
        let range = self.range(name)?;
        Ok(self.buffer.slice_mut(range)?)
    }

    /// The bytes of a region here.
    pub(super) fn range(&self, name: &str) -> Result<Range<usize>, Error> {
        let region = self.regions.iter().find(|region| region.name == name);
        let region = region.ok_or_else(|| Error::NotInPlan { what: "region", name: name.to_owned() })?;
        Ok(self.bytes_of(region))
    }

    /// The bytes of a region that an operation may have; no byte of the arena where it has none.
    pub(super) fn given(&self, name: &Option<String>) -> Result<Range<usize>, Error> {
        name.as_deref().map_or(Ok(0..0), |name| self.range(name))
    }

    /// The workspace of an operation that needs so many bytes of it; no byte of the arena where it needs none.
    pub(super) fn workspace(&self, bytes: usize) -> Result<Range<usize>, Error> {
        if bytes == 0 { Ok(0..0) } else { self.range(WORKSPACE) }
    }

    fn bytes_of(&self, region: &Region) -> Range<usize> {
        let first = region.offset - self.start;
        first..first + region.bytes
    }

    /// The bytes of a region's canary.
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

    /// Puts canaries behind the regions whose lives begin with operation `op`, or have begun.
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
            // Others may use the bytes of what does not live.
            self.armed[place] = lives;
        }
        Ok(())
    }

    /// Waits for `stream` and looks at the canaries of all that lives.
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

//! [`StepGraph`]: a step of a loaded plan as a CUDA graph.

use std::sync::Arc;

use qgemm_hal::Stream;

use super::arena::PlanArena;
use super::load::LoadedPlan;
use super::weights::PlanWeights;
use crate::error::Error;

/// A captured step, which one call launches. It owns plan and weights; the memory of its
/// arena is the caller's and lent for each replay.
#[derive(Debug)]
pub struct StepGraph {
    plan: Arc<LoadedPlan>,
    #[cfg(feature = "cuda")]
    graph: qgemm_cuda::LentGraph<'static>,
}

impl LoadedPlan {
    /// Captures a step instead of running it. [`StepGraph::replay`] then runs it in the memory
    /// of `arena`. None on devices without graphs, and for collectives that no graph captures.
    ///
    /// Inputs stay where they are and may change between replays. The arena must not check
    /// canaries, which waits.
    ///
    /// # Errors
    /// As [`LoadedPlan::step`].
    pub fn capture(
        self: &Arc<Self>,
        stream: &Stream,
        arena: &mut PlanArena,
        weights: &Arc<PlanWeights>,
    ) -> Result<Option<StepGraph>, Error> {
        self.prepare()?;
        if self.exec_plan().runtime.ranks.is_some() && !self.ctx.communicator().is_some_and(|c| c.is_captured()) {
            return Ok(None);
        }
        self.captured(stream, arena, weights)
    }

    #[cfg(feature = "cuda")]
    fn captured(
        self: &Arc<Self>,
        stream: &Stream,
        arena: &mut PlanArena,
        weights: &Arc<PlanWeights>,
    ) -> Result<Option<StepGraph>, Error> {
        if self.ctx.info().id.kind != qgemm_hal::DeviceKind::Cuda {
            return Ok(None);
        }
        let (plan, weights, own) = (Arc::clone(self), Arc::clone(weights), stream.clone());
        let memory = arena.memory_of(&self.regions)?;
        let graph = qgemm_cuda::capture_lent(&**self.ctx.device(), stream, memory, move |memory| {
            plan.step_in(&own, memory, &weights)
        })?;
        Ok(Some(StepGraph { plan: Arc::clone(self), graph }))
    }

    #[cfg(not(feature = "cuda"))]
    fn captured(
        self: &Arc<Self>,
        _: &Stream,
        _: &mut PlanArena,
        _: &Arc<PlanWeights>,
    ) -> Result<Option<StepGraph>, Error> {
        Ok(None)
    }
}

impl StepGraph {
    /// The plan of the step.
    pub fn plan(&self) -> &Arc<LoadedPlan> {
        &self.plan
    }

    /// Submits the step to `stream`. `arena` is the one that it was captured with, in this
    /// plan's form ([`LoadedPlan::enter`]).
    ///
    /// # Errors
    /// [`Error::Hal`] for the memory of another arena, and device errors.
    pub fn replay(&self, stream: &Stream, arena: &mut PlanArena) -> Result<(), Error> {
        let memory = arena.memory_of(&self.plan.regions)?;
        #[cfg(feature = "cuda")]
        self.graph.replay(stream, memory)?;
        #[cfg(not(feature = "cuda"))]
        let _ = (stream, memory);
        Ok(())
    }
}

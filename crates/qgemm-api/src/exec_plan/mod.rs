//! Execution plans: all operations of a model and the arena of
//! their operands, as files.

mod architecture;
mod arena;
mod backward;
mod build;
mod check;
mod describe;
mod feed_forward;
mod file;
mod layers;
mod layout;
mod load;
mod numbers;
mod operands;
mod product;
mod run;

pub use arena::PlanArena;
pub use build::PlanOptions;
pub use file::{
    Barrier, BarrierKind, ExecPlan, MemoryPlan, ModelRecord, Phase, PhaseRange, PlannedOp, PlannedWeight, Region,
    RegionKind, Runtime, RuntimeMode,
};
pub use load::LoadedPlan;
pub use operands::{PlannedHeads, PlannedNorm, PlannedOptimizer, PlannedRotary, PlannedScaling};

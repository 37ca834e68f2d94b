//! Execution plans: all operations of a model and the arena of
//! their operands, as files.

mod arena;
mod backward;
mod build;
mod check;
mod collectives;
mod cut;
mod describe;
mod divided_heads;
mod ends;
mod feed_forward;
mod file;
mod graph;
mod kv_cache;
mod layers;
mod layout;
mod load;
mod mismatch;
mod operands;
mod parallel;
mod post_norms;
mod product;
mod projections;
mod rank_network;
mod ranks;
mod ready;
mod recurrent;
mod recurrent_mixers;
mod recurrent_ops;
mod rotary;
mod run;
mod sizes;
mod stated;
mod weights;

pub use arena::PlanArena;
pub use build::PlanOptions;
pub use file::{
    Barrier, BarrierKind, ExecPlan, MemoryPlan, ModelRecord, Phase, PhaseRange, PlannedOp, PlannedRows, PlannedWeight,
    Region, RegionKind, Runtime, RuntimeMode,
};
pub use graph::StepGraph;
pub use load::LoadedPlan;
pub use operands::{
    PlannedCache, PlannedGate, PlannedHeads, PlannedNorm, PlannedOptimizer, PlannedPages, PlannedRotation,
    PlannedSegment,
};
pub use ranks::{PlannedShard, Ranks};
pub use recurrent::{PlannedConv, PlannedLinear, PlannedState};
pub use rotary::{PlannedRotary, PlannedScaling, PlannedTables};
pub use weights::{OpWeights, PlanWeights};

//! Rotary embedding, and new keys and values written to the cache: what is to be done, and its plan.

mod description;
mod plan;
mod rotary;

pub use description::KvAppend;
pub use plan::{KvAppendArgs, KvAppendPlan};
pub use rotary::{Rotary, RotaryScaling};

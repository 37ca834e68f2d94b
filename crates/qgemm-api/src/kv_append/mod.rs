//! Rotary embedding and KV-cache append: builder and plan.

mod description;
mod plan;
mod rotary;

pub use description::KvAppend;
pub use plan::{KvAppendArgs, KvAppendPlan};
pub use rotary::{Rotary, RotaryScaling};

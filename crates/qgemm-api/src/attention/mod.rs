//! Attention: builder and plan.

mod description;
mod plan;

pub use description::{Attention, Keys, KvStrides, Queries};
pub(crate) use description::{HeadsOf, MOST_HEADS, addressing, check_count, check_head_dims, extent_bytes};
pub use plan::{AttentionArgs, AttentionPlan};

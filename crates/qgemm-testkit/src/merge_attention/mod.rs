//! `merge_attention`: cases, oracle and runner.

mod case;
mod groups;
mod oracle;
mod run;

use qgemm_api::Context;
use qgemm_hal::{CheckedMergeAttention, Operation};

pub use case::{MergeAttentionCase, MergeAttentionLayout, MergeAttentionValues};

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for MergeAttentionCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `merge_attention`.
pub(crate) const SUITE: CaseList<MergeAttentionCase> =
    CaseList { operation: CheckedMergeAttention::NAME, groups: groups::GROUPS, random_case: groups::random_case };

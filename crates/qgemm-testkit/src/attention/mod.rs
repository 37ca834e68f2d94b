//! `attention`: oracle, cases and runner.

mod cache;
mod case;
mod every_kernel;
mod groups;
mod mask;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;

pub(crate) use cache::{KvOperand, api_keys, api_queries};
pub(crate) use case::e4m3;
pub use case::{AttentionCase, AttentionStorage, AttentionValues};
pub use mask::{AttentionMask, MaskPattern};
pub use run::run as run_attention;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for AttentionCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `attention`.
pub(crate) const SUITE: CaseList<AttentionCase> =
    CaseList { operation: "attention", groups: groups::GROUPS, random_case: stress::random_case };

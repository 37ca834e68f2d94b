//! `linear_attention`: cases, oracle and runner.

mod case;
mod groups;
mod oracle;
mod run;

use qgemm_api::Context;
use qgemm_hal::{CheckedLinearAttention, Operation};

pub use case::{LinearAttentionCase, LinearAttentionGates};

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for LinearAttentionCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `linear_attention`.
pub(crate) const SUITE: CaseList<LinearAttentionCase> =
    CaseList { operation: CheckedLinearAttention::NAME, groups: groups::GROUPS, random_case: groups::random_case };

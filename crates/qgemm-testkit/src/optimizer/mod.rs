//! `optimizer`: oracle, cases and runner.

mod case;
mod run;

use qgemm_api::Context;

pub use case::OptimizerCase;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for OptimizerCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `optimizer`.
pub(crate) const SUITE: CaseList<OptimizerCase> =
    CaseList { operation: "optimizer", groups: case::GROUPS, random_case: case::random_case };

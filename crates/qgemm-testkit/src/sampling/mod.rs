//! `sampling`: cases, oracle and runner.

mod case;
mod groups;
mod oracle;
mod run;

use qgemm_api::Context;
use qgemm_hal::{CheckedSampling, Operation};

pub use case::{SamplingCase, SamplingLogits, SamplingRules};

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for SamplingCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `sampling`.
pub(crate) const SUITE: CaseList<SamplingCase> =
    CaseList { operation: CheckedSampling::NAME, groups: groups::GROUPS, random_case: groups::random_case };

//! `norm`: its oracle, its cases, and how one is run.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{NormCase, NormLayout, NormPlace, NormValues};
pub use oracle::normalized_row;
pub use run::run as run_norm;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for NormCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `norm`.
pub(crate) const SUITE: CaseList<NormCase> =
    CaseList { operation: "norm", groups: groups::GROUPS, random_case: stress::random_case };

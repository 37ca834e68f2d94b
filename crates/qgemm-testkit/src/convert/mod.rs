//! `convert`: oracle, cases and runner.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{ConvertCase, ConvertLayout, ConvertOrder, ConvertValues};
pub use oracle::{convert, converted_row, nearest};
pub use run::run as run_conversion;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for ConvertCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `convert`.
pub(crate) const SUITE: CaseList<ConvertCase> =
    CaseList { operation: "convert", groups: groups::GROUPS, random_case: stress::random_case };

//! `short_conv`: cases, oracle and runner.

mod case;
mod groups;
mod oracle;
mod run;

use qgemm_api::Context;
use qgemm_hal::{CheckedShortConv, Operation};

pub use case::{ShortConvAdvance, ShortConvCase, ShortConvState};

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for ShortConvCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `short_conv`.
pub(crate) const SUITE: CaseList<ShortConvCase> =
    CaseList { operation: CheckedShortConv::NAME, groups: groups::GROUPS, random_case: groups::random_case };

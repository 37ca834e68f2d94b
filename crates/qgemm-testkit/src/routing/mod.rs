//! `routing`: oracle, cases and runner.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{RoutingCase, RoutingFrom, RoutingValues};
pub use run::run as run_routing;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for RoutingCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `routing`.
pub(crate) const SUITE: CaseList<RoutingCase> =
    CaseList { operation: "routing", groups: groups::GROUPS, random_case: stress::random_case };

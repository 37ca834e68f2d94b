//! `kv_append`: oracle, cases and runner.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{KvAppendCase, RotaryCase};
pub use run::run as run_kv_append;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for KvAppendCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `kv_append`.
pub(crate) const SUITE: CaseList<KvAppendCase> =
    CaseList { operation: "kv_append", groups: groups::GROUPS, random_case: stress::random_case };

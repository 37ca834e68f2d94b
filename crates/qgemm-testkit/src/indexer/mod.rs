//! `indexer`: oracle, cases and runner.

mod case;
mod groups;
mod oracle;
mod run;
mod stored;
mod stress;

use qgemm_api::Context;

pub use case::{IndexedKeys, IndexerCase, IndexerValues};
pub use run::run as run_indexer;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for IndexerCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `indexer`.
pub(crate) const SUITE: CaseList<IndexerCase> =
    CaseList { operation: "indexer", groups: groups::GROUPS, random_case: stress::random_case };

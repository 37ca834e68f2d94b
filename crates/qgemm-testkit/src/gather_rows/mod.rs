//! `gather_rows`: cases, groups and runner. The oracle is the host's
//! dequantization, rounded once.

mod case;
mod groups;
mod run;

use qgemm_api::Context;
use qgemm_hal::{CheckedGatherRows, Operation};

pub use case::GatherRowsCase;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for GatherRowsCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `gather_rows`.
#[derive(Debug)]
pub(crate) struct GatherRowsSuite;

impl Suite for GatherRowsSuite {
    fn operation(&self) -> &'static str {
        CheckedGatherRows::NAME
    }

    fn groups(&self) -> Vec<Group> {
        groups::GROUPS.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        let boxed = |case| Box::new(case) as Box<dyn TestCase>;
        wanted.formats.iter().flat_map(|&format| cases(format)).map(boxed).collect()
    }

    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase> {
        Box::new(groups::random_case(&wanted.formats, seed))
    }
}

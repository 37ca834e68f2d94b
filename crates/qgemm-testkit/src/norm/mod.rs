//! `norm`: its oracle, its cases, and how one is run.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

pub use case::{NormCase, NormLayout, NormPlace, NormValues};
pub use oracle::normalized_row;
pub use run::run as run_norm;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for NormCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }

    fn expected_kernel(&self, _: &Context) -> Option<KernelId> {
        None
    }
}

/// The suite of `norm`.
#[derive(Debug)]
pub(crate) struct NormSuite;

impl Suite for NormSuite {
    fn operation(&self) -> &'static str {
        "norm"
    }

    fn groups(&self) -> Vec<Group> {
        groups::GROUPS.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, _: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        cases().into_iter().map(|case| Box::new(case) as Box<dyn TestCase>).collect()
    }

    fn random_case(&self, _: &Selection, seed: u64) -> Box<dyn TestCase> {
        Box::new(stress::random_case(seed))
    }
}

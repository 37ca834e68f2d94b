//! `attention`: its oracle, its cases, and how one is run.

mod case;
mod groups;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

pub use case::{AttentionCase, AttentionPlaces, AttentionValues};
pub use run::run as run_attention;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for AttentionCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }

    fn expected_kernel(&self, _: &Context) -> Option<KernelId> {
        None
    }
}

/// The suite of `attention`.
#[derive(Debug)]
pub(crate) struct AttentionSuite;

impl Suite for AttentionSuite {
    fn operation(&self) -> &'static str {
        "attention"
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

//! `norm`: oracle, cases and runner.

mod case;
mod groups;
mod oracle;
mod quantized;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{NormAliasing, NormCase, NormGateCase, NormLayout, NormValues};
pub use oracle::normalized_row;
pub use run::run as run_norm;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for NormCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
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

    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        let is_wanted = |case: &NormCase| wanted.x_format.is_none() || case.to == wanted.x_format;
        cases().into_iter().filter(is_wanted).map(|case| Box::new(case) as Box<dyn TestCase>).collect()
    }

    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase> {
        Box::new(stress::random_case(wanted.x_format, seed))
    }
}

//! `quantize`: cases and runner. The oracle is the host's
//! reference; devices must match its bits.

mod case;
mod groups;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{QuantizeCase, QuantizeLayout};
pub use run::run as run_quantize;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for QuantizeCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `quantize`.
#[derive(Debug)]
pub(crate) struct QuantizeSuite;

impl Suite for QuantizeSuite {
    fn operation(&self) -> &'static str {
        "quantize"
    }

    fn groups(&self) -> Vec<Group> {
        groups::GROUPS.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        let is_wanted = |case: &QuantizeCase| wanted.x_format.is_none_or(|format| case.to == format);
        cases().into_iter().filter(is_wanted).map(|case| Box::new(case) as Box<dyn TestCase>).collect()
    }

    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase> {
        Box::new(stress::random_case(wanted.x_format, seed))
    }
}

//! `experts`: cases of MoE GEMM. The oracle is that of `gemm`,
//! applied per expert.

mod case;
mod groups;
mod index;
mod oracle;
mod run;
mod stress;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

pub use case::{ExpertCase, FormCase, IndexKind};

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for ExpertCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }

    fn expected_kernel(&self, _: &Context) -> Option<KernelId> {
        None
    }
}

/// The suite of `experts`.
#[derive(Debug)]
pub(crate) struct ExpertSuite;

impl ExpertSuite {
    fn boxed(case: ExpertCase, wanted: &Selection) -> Box<dyn TestCase> {
        let each = crate::gemm::Case { family: wanted.family, ..case.each };
        Box::new(ExpertCase { each, ..case })
    }
}

impl Suite for ExpertSuite {
    fn operation(&self) -> &'static str {
        "experts"
    }

    fn groups(&self) -> Vec<Group> {
        groups::GROUPS.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        let is_wanted = |case: &ExpertCase| wanted.x_format.is_none_or(|format| case.each.x_format == Some(format));
        wanted
            .formats
            .iter()
            .flat_map(|&format| cases(format))
            .filter(is_wanted)
            .map(|case| Self::boxed(case, wanted))
            .collect()
    }

    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase> {
        let case = stress::random_case(&wanted.formats, seed);
        let each = wanted.x_format.map_or(case.each, |format| case.each.with_x_format(format));
        Self::boxed(ExpertCase { each, ..case }, wanted)
    }
}

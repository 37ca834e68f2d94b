//! `gradient`: products with a packed weight that sum over its
//! output features. The oracle is that of `gemm` on the
//! transposed weight.

mod case;
mod groups;
mod run;

use qgemm_api::Context;

pub use case::{GradientCase, GradientExperts, RowGroups};

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for GradientCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `gradient`.
#[derive(Debug)]
pub(crate) struct GradientSuite;

impl Suite for GradientSuite {
    fn operation(&self) -> &'static str {
        "gradient"
    }

    fn summary(&self) -> &'static str {
        "Gradient through a packed weight: dX = dY·W"
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
        Box::new(GradientCase::random(&wanted.formats, seed))
    }
}

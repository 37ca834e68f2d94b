//! `gemm`: oracle, cases and runner.

mod activation;
mod case;
mod configurations;
mod forms_of_x;
mod fused;
mod groups;
pub(crate) mod host;
pub(crate) mod launch;
mod normed;
mod oracle;
mod projections;
pub(crate) mod quantized_x;
mod rounding;
pub(crate) mod run;
mod sizes;
mod stress;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

pub use activation::{OF_PAIRS, activate};
pub use case::{ActOrder, Case, Epilogue, Layout};
pub use oracle::{Added, Resolution, multiply, multiply_gated};
pub use rounding::{Rounding, rounded};
pub use run::{exemptions, run};
pub use sizes::TOKENS;
pub use stress::random_case;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for Case {
    fn run(&self, ctx: &Context) -> Outcome {
        run(ctx, self)
    }

    fn expected_kernel(&self, ctx: &Context) -> Option<KernelId> {
        run::expected_kernel(ctx, self)
    }
}

/// The suite of `gemm`.
#[derive(Debug)]
pub(crate) struct GemmSuite;

impl Suite for GemmSuite {
    fn operation(&self) -> &'static str {
        "gemm"
    }

    fn groups(&self) -> Vec<Group> {
        groups::GROUPS.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = groups::GROUPS.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        let boxed = |case| Box::new(Case { family: wanted.family, ..case }) as Box<dyn TestCase>;
        let is_wanted = |case: &Case| wanted.x_format.is_none_or(|format| case.x_format == Some(format));
        wanted.formats.iter().flat_map(|&format| cases(format)).filter(is_wanted).map(boxed).collect()
    }

    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase> {
        let case = random_case(&wanted.formats, seed);
        let case = wanted.x_format.map_or(case, |format| case.with_x_format(format));
        Box::new(Case { family: wanted.family, ..case })
    }
}

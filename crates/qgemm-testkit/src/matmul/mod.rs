//! `matmul`: its cases, and how one is run. Its oracle is that of `gemm`, on B as the weight.

mod case;
mod groups;
mod run;
mod stress;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

pub use case::{MatmulCase, MatmulStrides};
pub use run::run as run_matmul;

use crate::outcome::Outcome;
use crate::suite::{Group, Selection, Suite, TestCase};

impl TestCase for MatmulCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }

    fn expected_kernel(&self, _: &Context) -> Option<KernelId> {
        None
    }
}

/// The suite of `matmul`.
#[derive(Debug)]
pub(crate) struct MatmulSuite;

impl Suite for MatmulSuite {
    fn operation(&self) -> &'static str {
        "matmul"
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

//! `matmul`: cases and runner. The oracle is that of `gemm`, with
//! B as the weight.

mod blocks;
mod case;
mod groups;
mod run;
mod stress;

use qgemm_api::Context;

pub use case::{MatmulCase, MatmulStrides};
pub use run::run as run_matmul;

use crate::outcome::Outcome;
use crate::suite::{CaseList, TestCase};

impl TestCase for MatmulCase {
    fn run(&self, ctx: &Context) -> Outcome {
        run::run(ctx, self)
    }
}

/// The suite of `matmul`.
pub(crate) const SUITE: CaseList<MatmulCase> =
    CaseList { operation: "matmul", groups: groups::GROUPS, random_case: stress::random_case };

//! [`TuneProblem`]: what is tuned.

use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertProblem, Experts};
use crate::gemm::Problem;
use crate::matmul::Matmul;
use crate::weight::Weight;

/// Problem to tune, with its weights. C, bias, residual, norm and token scales are not
/// used: they hardly change the time.
#[derive(Debug)]
#[non_exhaustive]
pub enum TuneProblem<'a> {
    /// Product with one weight.
    Gemm {
        /// Problem.
        problem: Problem,
        /// Copies of the weight, at least one. Launches rotate through
        /// them to avoid cache hits.
        weights: &'a [Weight],
    },
    /// Expert products, with rows spread evenly over the experts.
    Experts {
        /// Problem.
        problem: ExpertProblem,
        /// Copies of the experts' weights, used in rotation.
        experts: &'a [Experts],
    },
    /// Product of two matrices.
    Matmul(Matmul),
}

impl<'a> TuneProblem<'a> {
    /// Product with one weight, in rotating copies.
    pub fn new(problem: Problem, weights: &'a [Weight]) -> Self {
        Self::Gemm { problem, weights }
    }

    /// Expert products, with rotating copies.
    pub fn experts(problem: ExpertProblem, experts: &'a [Experts]) -> Self {
        Self::Experts { problem, experts }
    }

    /// Validates the problem and its weights, whether or not there is time for a launch.
    pub(super) fn check(&self, ctx: &Context) -> Result<(), Error> {
        let no_weight = Error::MissingOperand { operand: "weight", why: "a problem is measured with its weight" };
        match self {
            Self::Gemm { weights: [], .. } | Self::Experts { experts: [], .. } => Err(no_weight),
            Self::Gemm { problem, weights } => {
                let own = problem.weight();
                ctx.check_weight(own.device)?;
                weights.iter().try_for_each(|weight| {
                    ctx.check_weight(weight.device())?;
                    own.check_serves(weight.shape())
                })?;
                problem.check().map(drop)
            }
            Self::Experts { problem, experts } => {
                let own = problem.shape();
                ctx.check_weight(own.each.device)?;
                experts.iter().try_for_each(|experts| {
                    ctx.check_weight(experts.device())?;
                    own.check_serves(experts.shape())
                })?;
                problem.check().map(drop)
            }
            Self::Matmul(matmul) => matmul.check().map(drop),
        }
    }
}

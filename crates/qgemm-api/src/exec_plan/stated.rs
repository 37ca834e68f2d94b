//! [`Stated`]: options of a planned product. Types, rounding,
//! activation, bias, residual, norm and segments.

use qgemm_formats::DType;
use qgemm_hal::{Activation, GemmOperand, NormFunction, Operand, Segment, XPrecision};

use super::operands::PlannedSegment;
use crate::error::Error;
use crate::gemm::Problem;
use crate::operand::{Stored, WIDE_ACCESS};

/// Options of a product.
pub(super) struct Stated {
    pub x: DType,
    pub d: DType,
    pub x_precision: XPrecision,
    pub batch_invariant: bool,
    pub activation: Activation,
    pub bias: Option<DType>,
    pub residual: Option<DType>,
    /// Norm of X in a prologue, and the type of its result.
    pub norm: Option<(NormFunction, DType)>,
}

impl Stated {
    /// The problem with everything stated.
    pub fn of(&self, problem: Problem) -> Problem {
        let problem = problem.x_dtype(self.x).d_dtype(self.d).x_precision(self.x_precision);
        let problem = problem.batch_invariant(self.batch_invariant).activation(self.activation);
        let problem = self.bias.into_iter().fold(problem, Problem::bias);
        let problem = self.residual.into_iter().fold(problem, Problem::residual);
        self.norm.into_iter().fold(problem, |problem, (norm, dtype)| problem.norm(norm).normed_dtype(dtype))
    }
}

/// The problem of these rows and features with an output for
/// each segment. D has the features before the first.
///
/// # Errors
/// [`Error::PlanMismatch`] when the segments are no cut of the
/// features.
pub(super) fn with_segments(
    problem: Problem,
    segments: &[PlannedSegment],
    [rows, features]: [usize; 2],
) -> Result<Problem, Error> {
    let Some(first) = segments.first() else { return Ok(problem) };
    let dtype = problem.check()?.d.dtype;
    let wrong =
        |expected: String, got: usize| Error::PlanMismatch { at: "segments".into(), expected, got: got.to_string() };
    if segments.len() >= Segment::MOST {
        return Err(wrong(format!("at most {}", Segment::MOST - 1), segments.len()));
    }
    let mut end = first.first;
    let mut checked = Vec::with_capacity(segments.len());
    for (segment, operand) in segments.iter().zip(GemmOperand::OF_SEGMENTS) {
        if segment.first != end || !end.is_multiple_of(Segment::STEP) {
            return Err(wrong(format!("a first feature of {end}, a multiple of {}", Segment::STEP), segment.first));
        }
        let stored = Stored { name: operand.name(), rows, columns: segment.features, dtype, alignment: WIDE_ACCESS };
        checked.push(Segment { first: end, d: stored.check(None)? });
        end = end.saturating_add(segment.features);
    }
    if end != features {
        return Err(wrong(format!("{features} features in all"), end));
    }
    Ok(problem.segments(checked).d_row_stride(first.first as u64))
}

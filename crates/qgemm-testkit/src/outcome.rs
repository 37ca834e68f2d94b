//! What becomes of a case.

use std::fmt;

use qgemm_api::tuning::{KernelId, LaunchSequence};
use qgemm_api::{Context, DeviceKind, Error};
use qgemm_hal::DeviceInfo;

use crate::compare::{Comparison, Mismatch};

/// A kind of case that a backend does not serve yet, and why: the only way not to run one.
#[derive(Clone, Copy, Debug)]
pub struct Exemption<C> {
    /// The backend.
    pub device: DeviceKind,
    /// Which cases, on which of its devices.
    pub applies: fn(&C, &DeviceInfo) -> bool,
    /// Why, as a sentence for the table.
    pub reason: &'static str,
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Everything was as it should be.
    Pass,
    /// It was not run, for this reason.
    Skip(&'static str),
    /// Something was wrong.
    Fail(Failure),
}

impl Verdict {
    /// The verdict over `case`, with which an exemption may be due.
    pub(crate) fn of<C>(result: Result<(), Failure>, ctx: &Context, case: &C, exemptions: &[Exemption<C>]) -> Self {
        let info = ctx.info();
        let exemption = exemptions.iter().find(|e| e.device == info.id.kind && (e.applies)(case, info));
        match (result, exemption) {
            (Err(Failure::NotPlanned(_)), Some(exemption)) => Verdict::Skip(exemption.reason),
            (_, Some(exemption)) => Verdict::Fail(Failure::StaleExemption(exemption.reason)),
            (Ok(()), None) => Verdict::Pass,
            (Err(failure), None) => Verdict::Fail(failure),
        }
    }
}

/// What was wrong with a case.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// The weight could not be made or loaded.
    Weight(String),
    /// No kernel was found for it, and no exemption says why.
    NotPlanned(String),
    /// An exemption covers it, and yet a kernel was found.
    StaleExemption(&'static str),
    /// The device reported an error.
    Device(String),
    /// No launch of the plan is of the kernel that it says it chose.
    NotLaunched(String),
    /// The kernel computes in a way that the oracle does not model, which this says.
    NoModel(String),
    /// The result is further off than the limit.
    Inaccurate(Comparison),
    /// Sums are exact and the result is not.
    NotExact(Mismatch),
    /// An element has other bits than it must have.
    WrongBits(WrongBits),
    /// A code is not the nearest, or a scale not what the largest value asks for.
    WrongCode(String),
    /// A token has other experts or weights than it must have, or the status says otherwise.
    Misrouted(String),
    /// A log-sum-exp is further off than it may be; rows are queries, columns heads.
    WrongLogSumExp(Mismatch),
    /// This byte outside of D's rows, counted from the start of the buffer, was written.
    WroteOutside(usize),
    /// A second run gave other bits, first in this byte.
    NotRepeatable(usize),
    /// What the run reported of its index is not what is wrong with it.
    WrongStatus {
        /// What is wrong.
        expected: String,
        /// What was reported.
        got: String,
    },
    /// This row belongs to no expert and was written.
    WroteRow(usize),
    /// This row has other bits when it is multiplied alone.
    DependsOnBatch(usize),
    /// Something was wrong with this of all configurations.
    Of(String, Box<Failure>),
}

/// An element whose bits are wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WrongBits {
    /// The matrix: `D`.
    pub operand: &'static str,
    /// Its row.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// The bits that it must have, of the element type.
    pub expected: u32,
    /// The bits that it has.
    pub got: u32,
}

impl fmt::Display for WrongBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operand, row, column, expected, got } = self;
        write!(f, "{operand}[{row}, {column}] is {got:#x}, expected {expected:#x}")
    }
}

impl Failure {
    /// Why there is no plan.
    pub(crate) fn of_plan(error: Error) -> Self {
        match error {
            // Chosen, and then not made ready: it may not compile.
            Error::Hal(error) => Failure::Device(error.to_string()),
            error => Failure::NotPlanned(error.to_string()),
        }
    }

    /// What went wrong while it ran.
    pub(crate) fn of_run(error: Error) -> Self {
        Failure::Device(error.to_string())
    }

    /// That a plan's sequence, if there is one, launches the kernel that it names.
    pub(crate) fn check_launched(sequence: Option<&LaunchSequence>, kernel: Option<KernelId>) -> Result<(), Self> {
        let (Some(sequence), Some(kernel)) = (sequence, kernel) else { return Ok(()) };
        match sequence.steps().iter().any(|step| *step.kernel_id() == kernel) {
            true => Ok(()),
            false => Err(Failure::NotLaunched(kernel.to_string())),
        }
    }

    /// That two runs gave the same.
    pub(crate) fn check_same(first: &[u8], second: &[u8]) -> Result<(), Self> {
        let differs = first.iter().zip(second).position(|(a, b)| a != b);
        differs.map_or(Ok(()), |byte| Err(Failure::NotRepeatable(byte)))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Weight(why) => write!(f, "no weight: {why}"),
            Failure::NotPlanned(why) => write!(f, "no kernel: {why}"),
            Failure::StaleExemption(reason) => write!(f, "can be planned, though exempt ({reason})"),
            Failure::Device(why) => write!(f, "device: {why}"),
            Failure::NotLaunched(kernel) => write!(f, "no launch is of the kernel chosen, {kernel}"),
            Failure::NoModel(what) => write!(f, "the oracle has no model of {what}"),
            Failure::Inaccurate(Comparison { nmse, worst_tile, worst_tile_at, worst_row, worst_row_at, first_bad }) => {
                let (row, column) = worst_tile_at;
                write!(f, "inaccurate: {nmse:.1e} overall, {worst_tile:.1e} in the tile at [{row}, {column}], ")?;
                write!(f, "{worst_row:.1e} in row {worst_row_at}")?;
                first_bad.map_or(Ok(()), |bad| write!(f, "; {bad}"))
            }
            Failure::NotExact(bad) => write!(f, "not exact: {bad}"),
            Failure::WrongBits(wrong) => write!(f, "wrong bits: {wrong}"),
            Failure::WrongCode(why) => write!(f, "wrong code: {why}"),
            Failure::Misrouted(why) => write!(f, "misrouted: {why}"),
            Failure::WrongLogSumExp(bad) => write!(f, "wrong log-sum-exp: {bad}"),
            Failure::WroteOutside(byte) => write!(f, "wrote byte {byte} outside of D's rows"),
            Failure::NotRepeatable(byte) => write!(f, "a second run differs, first in byte {byte}"),
            Failure::WrongStatus { expected, got } => write!(f, "reported `{got}` of its index, expected `{expected}`"),
            Failure::WroteRow(row) => write!(f, "wrote row {row}, which no expert has"),
            Failure::DependsOnBatch(row) => write!(f, "row {row} has other bits when multiplied alone"),
            Failure::Of(configuration, failure) => write!(f, "{configuration}: {failure}"),
        }
    }
}

/// A row of the result table.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was computed: the case's text.
    pub case: String,
    /// Name of the kernel that did it, where one was chosen.
    pub kernel: Option<String>,
    /// Its identity.
    pub kernel_id: Option<KernelId>,
    /// Distance from the oracle, where results may have one.
    pub comparison: Option<Comparison>,
    /// The largest error allowed.
    pub limit: Option<f64>,
    /// What rounding activations before the multiplication cost, where the plan does that.
    pub rounding_loss: Option<f64>,
    /// What became of it.
    pub verdict: Verdict,
}

impl Outcome {
    /// Of a case that nothing is known of yet.
    pub(crate) fn new(case: &impl fmt::Display) -> Self {
        Self {
            case: case.to_string(),
            kernel: None,
            kernel_id: None,
            comparison: None,
            limit: None,
            rounding_loss: None,
            verdict: Verdict::Pass,
        }
    }

    /// How near the result came to the limit.
    pub(crate) fn share_of_limit(&self) -> f64 {
        self.comparison.map_or(0.0, |c| c.nmse.max(c.worst_tile)) / self.limit.unwrap_or(f64::INFINITY)
    }
}

//! Outcome of a case.

use std::fmt;

use qgemm_api::tuning::{KernelId, LaunchSequence};
use qgemm_api::{Context, DeviceKind, Error};
use qgemm_hal::DeviceInfo;

use crate::compare::{Comparison, Mismatch};

/// A kind of case that a backend does not support, and why. Only
/// exempt cases are skipped.
#[derive(Clone, Copy, Debug)]
pub struct Exemption<C> {
    /// The backend.
    pub device: DeviceKind,
    /// The cases and devices that are exempt.
    pub applies: fn(&C, &DeviceInfo) -> bool,
    /// The reason, as a sentence for the table.
    pub reason: &'static str,
}

/// Verdict on a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The result was right.
    Pass,
    /// The case was skipped, for this reason.
    Skip(&'static str),
    /// The case failed.
    Fail(Failure),
}

impl Verdict {
    /// The verdict on `case`, after its exemption if it has one.
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

/// Why a case failed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// The weight could not be made or loaded.
    Weight(String),
    /// No kernel exists for the case, and no exemption says why.
    NotPlanned(String),
    /// A kernel was found although the case is exempt.
    StaleExemption(&'static str),
    /// The device reported an error.
    Device(String),
    /// The plan does not launch the kernel that it names.
    NotLaunched(String),
    /// The oracle does not model the kernel's arithmetic, named here.
    NoModel(String),
    /// The error exceeds the limit.
    Inaccurate(Comparison),
    /// Sums are exact, but the result is not.
    NotExact(Mismatch),
    /// An element has the wrong bits.
    WrongBits(WrongBits),
    /// A code is not the nearest, or a scale does not follow from the
    /// largest value.
    WrongCode(String),
    /// A token has the wrong experts or weights, or the status is
    /// wrong.
    Misrouted(String),
    /// A row has the wrong token, log-probability or status.
    WrongToken(String),
    /// A log-sum-exp exceeds its limit; rows are queries, columns
    /// heads.
    WrongLogSumExp(Mismatch),
    /// This byte of the buffer, outside D's rows, was written.
    WroteOutside(usize),
    /// A second run differs, first in this byte.
    NotRepeatable(usize),
    /// The run reported a wrong status of its index.
    WrongStatus {
        /// The actual fault of the index.
        expected: String,
        /// The reported fault.
        got: String,
    },
    /// This row belongs to no expert, but was written.
    WroteRow(usize),
    /// This row has other bits when it is computed alone.
    DependsOnBatch(usize),
    /// One of several configurations, named here, failed.
    Of(String, Box<Failure>),
}

/// An element whose bits are wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WrongBits {
    /// The matrix, such as `D`.
    pub operand: &'static str,
    /// Its row.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// The correct bits, in the element type.
    pub expected: u32,
    /// The actual bits.
    pub got: u32,
}

impl fmt::Display for WrongBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operand, row, column, expected, got } = self;
        write!(f, "{operand}[{row}, {column}] is {got:#x}, expected {expected:#x}")
    }
}

impl Failure {
    /// Classifies an error of planning.
    pub(crate) fn of_plan(error: Error) -> Self {
        match error {
            // A kernel was chosen but could not be loaded: it may not
            // compile.
            Error::Hal(error) => Failure::Device(error.to_string()),
            error => Failure::NotPlanned(error.to_string()),
        }
    }

    /// Classifies an error of a run.
    pub(crate) fn of_run(error: Error) -> Self {
        Failure::Device(error.to_string())
    }

    /// Checks that a plan's launch sequence has the kernel that the
    /// plan names.
    pub(crate) fn check_launched(sequence: Option<&LaunchSequence>, kernel: Option<KernelId>) -> Result<(), Self> {
        let (Some(sequence), Some(kernel)) = (sequence, kernel) else { return Ok(()) };
        match sequence.steps().iter().any(|step| *step.kernel_id() == kernel) {
            true => Ok(()),
            false => Err(Failure::NotLaunched(kernel.to_string())),
        }
    }

    /// Checks that two runs gave the same bytes.
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
            Failure::WrongToken(why) => write!(f, "wrong token: {why}"),
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
    /// The case's text.
    pub case: String,
    /// Name of the chosen kernel, if any.
    pub kernel: Option<String>,
    /// Identity of the kernel.
    pub kernel_id: Option<KernelId>,
    /// Distance from the oracle, if results may differ from it.
    pub comparison: Option<Comparison>,
    /// The largest error allowed.
    pub limit: Option<f64>,
    /// Error from rounding activations before the product, if the
    /// plan does so.
    pub rounding_loss: Option<f64>,
    /// The verdict.
    pub verdict: Verdict,
}

impl Outcome {
    /// Outcome of a case that has not run yet.
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

    /// Error as a share of the limit.
    pub(crate) fn share_of_limit(&self) -> f64 {
        self.comparison.map_or(0.0, |c| c.nmse.max(c.worst_tile)) / self.limit.unwrap_or(f64::INFINITY)
    }
}

//! Errors of kernel choice and of reading measurements.

use std::fmt;

use qgemm_hal::Unsupported;
use thiserror::Error;

/// Why an operation cannot be planned.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum SchedError {
    /// No kernel family serves the operation.
    #[error("no kernel family of {device} serves {operation}{}", list(.refusals))]
    NoFamily {
        /// Device name.
        device: String,
        /// The operation: format, element types and shape.
        operation: String,
        /// Every family that was asked, with its reason.
        refusals: Vec<Refusal>,
    },
    /// The requested family does not exist.
    #[error("{device} has no kernel family `{family}`: it has {}", .known.join(", "))]
    UnknownFamily {
        /// Device name.
        device: String,
        /// The requested family.
        family: String,
        /// The existing families.
        known: Vec<&'static str>,
    },
}

/// Why a tuned table cannot be written or read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TunedError {
    /// Not a tuned table, or it holds a number that
    /// JSON cannot represent.
    #[error("invalid table of tuned configurations")]
    Json(#[from] serde_json::Error),
    /// Another version wrote it.
    #[error(
        "table of tuned configurations: expected version {expected}, got {got}, which has other kernel ids: measure again"
    )]
    Version {
        /// The supported version.
        expected: u32,
        /// The version in the file.
        got: u32,
    },
}

/// A family that does not support an operation, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The family.
    pub family: &'static str,
    /// Its reason.
    pub reason: Unsupported,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.reason.why)
    }
}

fn list(refusals: &[Refusal]) -> String {
    match refusals {
        [] => ": it has none".into(),
        _ => format!(": {}", refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; ")),
    }
}

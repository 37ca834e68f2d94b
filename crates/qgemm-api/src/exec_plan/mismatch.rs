//! Differences between a plan file and what
//! this device expects.

use std::fmt::Display;

use crate::error::Error;

/// Checks that the file has the expected value.
pub(super) fn expect(at: impl Display, expected: impl Display, got: impl Display) -> Result<(), Error> {
    let (expected, got) = (expected.to_string(), got.to_string());
    if expected == got { Ok(()) } else { Err(Error::PlanMismatch { at: at.to_string(), expected, got }) }
}

/// Error of a value that is none of the expected ones.
pub(super) fn wrong(field: &str, expected: &str, got: &str) -> Error {
    Error::PlanMismatch { at: field.into(), expected: expected.into(), got: got.into() }
}

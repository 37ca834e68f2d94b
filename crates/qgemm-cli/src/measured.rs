//! Measured numbers in files. Compared with any other number, nothing would ever be slower.

use std::ops::Range;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Microseconds: from less than a clock's tick to a year.
const TIMES: Range<f64> = 1e-6..1e14;
/// Shares of something, such as a median or a bandwidth.
const SHARES: Range<f64> = 0.0..1e9;

/// A time in microseconds.
pub fn time<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    within(from, "microseconds", &TIMES)
}

/// A share of something.
pub fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    within(from, "a share", &SHARES)
}

fn within<'de, D: Deserializer<'de>>(from: D, what: &str, range: &Range<f64>) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    let fits = range.contains(&value);
    if fits { Ok(value) } else { Err(D::Error::custom(format!("expected {what} within {range:?}, got {value}"))) }
}

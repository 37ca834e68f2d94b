//! Range checks of measured numbers in files. Otherwise a bad
//! baseline would hide every regression.

use std::ops::Range;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Microseconds: from less than a clock tick to years.
const TIMES: Range<f64> = 1e-6..1e14;
/// Ratios, such as relative noise or a bandwidth share.
const SHARES: Range<f64> = 0.0..1e9;

/// A time in microseconds.
pub fn time<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    within(from, "microseconds", &TIMES)
}

/// A ratio.
pub fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    within(from, "a share", &SHARES)
}

fn within<'de, D: Deserializer<'de>>(from: D, what: &str, range: &Range<f64>) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    let fits = range.contains(&value);
    if fits { Ok(value) } else { Err(D::Error::custom(format!("expected {what} within {range:?}, got {value}"))) }
}

//! Measured numbers in files: with others nothing would ever be slower than them.

use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// A time: more than 0.
pub fn time<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(D::Error::custom(format!("expected a time, got {value}")))
    }
}

/// A share of something: 0 or more.
pub fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(D::Error::custom(format!("expected a share, got {value}")))
    }
}

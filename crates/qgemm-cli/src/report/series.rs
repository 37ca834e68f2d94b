//! Series of points.

use serde::Serialize;

/// Drawing of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// A line with markers.
    Line,
    /// A dashed line with markers.
    Dashed,
    /// A thin grey line without markers.
    Guide,
    /// Markers.
    Dots,
}

/// A named series of points.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    pub name: String,
    pub mark: Mark,
    pub points: Vec<(f64, f64)>,
}

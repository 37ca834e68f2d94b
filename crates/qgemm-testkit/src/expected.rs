//! [`Expected`]: what an oracle computes, with the error that is allowed.

/// Correct outputs, with the magnitude of each output's summands.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Rows (tokens).
    pub m: usize,
    /// Columns (output features).
    pub n: usize,
    /// `D[M, N]`, row-major.
    pub values: Vec<f64>,
    /// Sum of squares of an output's summands: `alpha² Σ w²x² +
    /// (beta·c)² + bias²`, plus the residual's.
    /// alpha includes the token scale. w counts as at least a few
    /// steps of its code.
    /// The activation's slope and the product of a gated pair are
    /// applied.
    /// Errors are relative to this where summands cancel.
    pub energy: Vec<f64>,
    /// Error of each output because f32's normal range ends at 2⁻¹²⁶.
    /// Errors up to it are ignored.
    pub floor: Vec<f64>,
}

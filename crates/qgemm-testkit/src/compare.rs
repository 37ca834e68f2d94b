//! Comparison of a result with the oracle, by region.
//! Regions are the whole output, every 32×32 tile (a large matrix
//! must not average away one wrong tile) and every row (tokens
//! may differ in magnitude by any factor).

use crate::expected::Expected;
use crate::limits::Tolerance;

/// Edge of a compared tile.
pub const TILE: usize = 32;

/// Smallest region for averages: smaller ones are judged as if
/// the other elements were right.
const FEW: usize = 4;

/// An element is bad if its error is this many times the average
/// that the limit allows.
const BAD: f64 = 10.0;

/// An element whose error exceeds its limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// Token.
    pub row: usize,
    /// Output feature.
    pub column: usize,
    /// The oracle's value.
    pub expected: f64,
    /// The kernel's value.
    pub got: f64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "D[{}, {}] is {:e}, expected {:e}", self.row, self.column, self.got, self.expected)
    }
}

/// Distance of a result from the oracle.
/// The error of a region is `Σ(ŷ−y)² / max(Σy², Σ energy)`.
/// It is infinite where exactly one of result and oracle is NaN
/// or infinite.
/// Infinite activations may give NaN or an infinity, depending on
/// the order of summation.
/// If only a weight is NaN, the result must be NaN.
/// Values beyond the output type's range must be infinities of
/// their sign. Near the end of the range a finite number is
/// right, too.
/// Where cancellation leaves the sign open, either infinity is
/// right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Error of the whole output.
    pub nmse: f64,
    /// Error of the worst tile.
    pub worst_tile: f64,
    /// First row and column of the worst tile.
    pub worst_tile_at: (usize, usize),
    /// Error of the worst row.
    pub worst_row: f64,
    /// Index of the worst row.
    pub worst_row_at: usize,
    /// The first element, in row-major order, that is NaN, infinite,
    /// or ten times further off than the limit allows on average.
    pub first_bad: Option<Mismatch>,
}

impl Comparison {
    /// Whether the output and each tile and row are within their
    /// limit.
    pub fn within(&self, tolerance: Tolerance) -> bool {
        self.nmse <= tolerance.nmse && self.worst_tile <= tolerance.nmse && self.worst_row <= tolerance.nmse
    }
}

/// Compares `got[M, N]`, contiguous, with the oracle.
///
/// # Panics
/// When the lengths differ.
pub fn compare(got: &[f32], expected: &Expected, tolerance: Tolerance) -> Comparison {
    assert_eq!(got.len(), expected.values.len(), "result and oracle differ in length");
    let (m, n) = (expected.m, expected.n);
    let mut whole = Region::default();
    let mut rows: Vec<Region> = (0..m).map(|_| Region::default()).collect();
    let mut worst = (0.0, (0, 0));
    let mut first_bad: Option<Mismatch> = None;
    for top in (0..m).step_by(TILE) {
        for left in (0..n).step_by(TILE) {
            let mut tile = Region::default();
            for (row, whole_row) in rows.iter_mut().enumerate().skip(top).take(TILE) {
                for column in left..n.min(left + TILE) {
                    let at = row * n + column;
                    let element = Element::new(got[at].into(), expected, at, tolerance);
                    tile.add(&element);
                    whole_row.add(&element);
                    let earlier = first_bad.is_none_or(|bad| (row, column) < (bad.row, bad.column));
                    if earlier && element.is_bad(tolerance.nmse) {
                        first_bad = Some(Mismatch { row, column, expected: element.y, got: element.got });
                    }
                }
            }
            if tile.error() > worst.0 {
                worst = (tile.error(), (top, left));
            }
            whole.merge(&tile);
        }
    }
    let (worst_row_at, worst_row) = rows
        .iter()
        .map(Region::error)
        .enumerate()
        .fold((0, 0.0), |worst, row| if row.1 > worst.1 { row } else { worst });
    Comparison { nmse: whole.error(), worst_tile: worst.0, worst_tile_at: worst.1, worst_row, worst_row_at, first_bad }
}

/// The first element of `got` that differs from `expected`, for
/// inputs whose sums are exact.
/// `round` rounds an exact value to the output's type.
///
/// # Panics
/// When the lengths differ.
pub fn first_difference(got: &[f32], expected: &Expected, round: impl Fn(f32) -> f32) -> Option<Mismatch> {
    assert_eq!(got.len(), expected.values.len(), "result and oracle differ in length");
    // `==` also accepts −0 for 0, which depends on the order of summation.
    let at = got.iter().zip(&expected.values).position(|(&got, &y)| got != round(y as f32))?;
    let (row, column) = (at / expected.n, at % expected.n);
    Some(Mismatch { row, column, expected: expected.values[at], got: got[at].into() })
}

struct Element {
    got: f64,
    y: f64,
    squared_error: f64,
    energy: f64,
}

impl Element {
    fn new(got: f64, expected: &Expected, at: usize, tolerance: Tolerance) -> Self {
        let (y, energy) = (expected.values[at], expected.energy[at]);
        // A correct element without a magnitude that errors could be
        // relative to.
        let measures_nothing = |ok: bool| {
            let squared_error = if ok { 0.0 } else { f64::INFINITY };
            Self { got, y: f64::NAN, squared_error, energy: 0.0 }
        };
        if !y.is_finite() {
            // Finite energy: no activation is infinite, so only a NaN weight
            // makes the output NaN.
            let must_be_nan = y.is_nan() && energy.is_finite();
            return Self { y, ..measures_nothing(if must_be_nan { got.is_nan() } else { !got.is_finite() }) };
        }
        let reach = BAD * (tolerance.nmse * energy.max(y * y)).sqrt();
        // A sum that cancels may have either sign within the limit, and
        // so become either infinity beyond the type's range.
        if got.is_infinite() && y * got.signum() + reach >= tolerance.overflow {
            return measures_nothing(true);
        }
        if y.abs() - reach >= tolerance.overflow {
            return Self { y, ..measures_nothing(false) };
        }
        // Rounding at the end of the type's range may add to the error
        // of the sums.
        let error = ((got - y).abs() - tolerance.absolute - expected.floor[at]).max(0.0);
        // NaN would make every comparison with the limit false.
        let squared_error = if (got - y).is_finite() { error * error } else { f64::INFINITY };
        Self { got, y, squared_error, energy }
    }

    fn is_bad(&self, limit: f64) -> bool {
        self.squared_error > BAD * BAD * limit * self.energy.max(self.y * self.y)
    }
}

#[derive(Default)]
struct Region {
    elements: usize,
    error: f64,
    signal: f64,
    energy: f64,
}

impl Region {
    fn add(&mut self, element: &Element) {
        self.elements += 1;
        self.error += element.squared_error;
        // Infinities and NaN have no magnitude for relative errors.
        self.signal += if element.y.is_finite() { element.y * element.y } else { 0.0 };
        self.energy += element.energy;
    }

    fn merge(&mut self, other: &Region) {
        self.elements += other.elements;
        self.error += other.error;
        self.signal += other.signal;
        self.energy += other.energy;
    }

    fn error(&self) -> f64 {
        match (self.error, self.signal.max(self.energy)) {
            (0.0, _) => 0.0,
            (_, 0.0) => f64::INFINITY,
            (error, scale) => error / scale * (self.elements.min(FEW) as f64 / FEW as f64),
        }
    }
}

//! The test kit of qgemm: an f64 oracle, makers of weights and activations, comparison by region, and the
//! conformance suite that every backend passes.
//!
//! A backend adopts the suite in one line of an integration test:
//!
//! ```text
//! qgemm_testkit::conformance!("cpu");
//! ```
//!
//! `qgemm verify` runs the same cases from the command line.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod activation;
mod activations;
mod case;
mod compare;
mod conformance;
mod limits;
mod operand;
mod oracle;
mod rounding;
mod run;
mod stress;
mod suite;
mod weights;

pub use activation::activate;
pub use activations::{ActivationKind, activations};
pub use case::{ActOrder, Case, Epilogue, Layout};
pub use compare::{Comparison, Mismatch, TILE, compare, first_difference};
pub use conformance::{check_group, skipped};
pub use limits::{OUTPUT_ROUNDING, OutputRounding, PATHS, PathLimit, Tolerance, WEIGHT_ROUNDING, WeightRounding, path};
pub use oracle::{Added, Expected, multiply, multiply_gated};
pub use rounding::{Rounding, rounded};
pub use run::{Exemption, Failure, Outcome, Verdict, exemptions, run};
pub use stress::random_case;
pub use suite::{GROUPS, Group, TOKENS, group};
pub use weights::{TestWeightError, WeightKind, gated_weights, weight};

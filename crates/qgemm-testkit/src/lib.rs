//! Test kit: f64 oracles, generators of weights and activations,
//! comparison by region, and the conformance suite that every
//! backend passes.
//!
//! An operation's folder (`gemm`, `convert`, `attention`, …) has
//! its oracle, groups of cases, runner and random cases.
//! [`SUITES`] lists the operations.
//! A backend adopts all suites in one line of an integration
//! test:
//!
//! ```text
//! qgemm_testkit::conformance!("cpu");
//! ```
//!
//! `qgemm verify` runs the same cases from the command line.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod activations;
mod attention;
mod compare;
mod conformance;
mod convert;
mod expected;
mod experts;
pub mod fuzz;
mod gather_rows;
mod gemm;
mod gradient;
mod indexer;
mod kv_append;
mod limits;
mod linear_attention;
mod matmul;
mod merge_attention;
mod norm;
mod operand;
mod optimizer;
mod outcome;
mod planes;
mod quantize;
mod random;
mod routing;
mod sampling;
mod short_conv;
mod suite;
mod weights;

pub use activations::{ActivationKind, activations};
pub use attention::{AttentionCase, AttentionMask, AttentionStorage, AttentionValues, MaskPattern, run_attention};
pub use compare::{Comparison, Mismatch, TILE, compare, first_difference};
pub use conformance::{check_group, open_for_ranks_or_skip, open_or_skip, skipped};
pub use convert::{
    ConvertCase, ConvertLayout, ConvertOrder, ConvertValues, convert, converted_row, nearest, run_conversion,
};
pub use expected::Expected;
pub use experts::{ExpertCase, FormCase, IndexKind};
pub use gather_rows::GatherRowsCase;
pub use gemm::{
    ActOrder, Added, Case, Epilogue, Layout, Resolution, Rounding, TOKENS, activate, exemptions, multiply,
    multiply_gated, random_case, rounded, run,
};
pub use gradient::{GradientCase, GradientExperts, RowGroups};
pub use indexer::{IndexedKeys, IndexerCase, IndexerValues, run_indexer};
pub use kv_append::{KvAppendCase, RotaryCase, run_kv_append};
pub use limits::{OUTPUT_ROUNDING, OutputRounding, PATHS, PathLimit, Tolerance, WEIGHT_ROUNDING, WeightRounding, path};
pub use linear_attention::{LinearAttentionCase, LinearAttentionGates};
pub use matmul::{MatmulCase, MatmulStrides, run_matmul};
pub use merge_attention::{MergeAttentionCase, MergeAttentionLayout, MergeAttentionValues};
pub use norm::{NormAliasing, NormCase, NormGateCase, NormLayout, NormValues, normalized_row, run_norm};
pub use optimizer::OptimizerCase;
pub use outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};
pub use quantize::{QuantizeCase, QuantizeLayout, run_quantize};
pub use routing::{RoutingCase, RoutingFrom, RoutingValues, run_routing};
pub use sampling::{SamplingCase, SamplingLogits, SamplingRules};
pub use short_conv::{ShortConvAdvance, ShortConvCase, ShortConvState};
pub use suite::{Group, SUITES, Selection, Suite, TestCase, group_names, suite, suite_with};
pub use weights::{TestWeightError, WeightKind, gated_weights, weight};

//! Operations of the command: one line and one file each. A file has the
//! cases of `verify --shape`, the record of `explain` and the
//! measurements of `bench`.

pub mod attention;
pub mod convert;
pub mod experts;
pub mod gather_rows;
pub mod gemm;
pub mod gradient;
pub mod indexer;
pub mod kv_append;
pub mod linear_attention;
pub mod matmul;
pub mod merge_attention;
pub mod norm;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod sampling;
pub mod short_conv;

use std::fmt;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use qgemm_api::{Context, PlanRecord};
use qgemm_testkit::{Selection, Suite, TestCase};

use crate::bench::BenchRow;
use crate::choice::Sizes;
use crate::{bench, explain, verify};

/// A measurement to make.
pub trait Work: fmt::Display {
    /// Measures it.
    ///
    /// # Errors
    /// When no kernel supports it, or the device fails.
    fn measure(&self, ctx: &Context, args: &bench::Args, bandwidth: f64) -> anyhow::Result<BenchRow>;
}

/// Measures a subject of an operation.
type Measure<S> = fn(&Context, &bench::Args, &S, f64) -> anyhow::Result<BenchRow>;

/// A subject of an operation with the function that measures it.
struct Subject<S>(S, Measure<S>);

impl<S: fmt::Display> fmt::Display for Subject<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<S: fmt::Display> Work for Subject<S> {
    fn measure(&self, ctx: &Context, args: &bench::Args, bandwidth: f64) -> anyhow::Result<BenchRow> {
        (self.1)(ctx, args, &self.0, bandwidth)
    }
}

/// Subjects to measure.
fn work<S: fmt::Display + 'static>(subjects: Vec<S>, measure: Measure<S>) -> Vec<Box<dyn Work>> {
    subjects.into_iter().map(|subject| Box::new(Subject(subject, measure)) as Box<dyn Work>).collect()
}

macro_rules! operations {
    ($($op:ident: $module:ident,)*) => {
        /// An operation; the test kit has its summary.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Op {
            $(
                #[doc = concat!("`", stringify!($module), "`.")]
                $op,
            )*
        }

        impl Op {
            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(Op::$op => stringify!($module),)* }
            }

            /// The cases of `verify --shape`.
            ///
            /// # Errors
            /// When a shape is invalid, or a format cannot store it.
            pub fn cases(self, args: &verify::Args, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
                match self { $(Op::$op => $module::cases(args, wanted),)* }
            }

            /// Plan record of the shape.
            ///
            /// # Errors
            /// When the shape is invalid.
            pub fn explain(self, args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
                match self { $(Op::$op => $module::explain(args, ctx, sizes),)* }
            }

            /// The measurements of `bench`.
            ///
            /// # Errors
            /// When a shape or an option is invalid.
            pub fn work(self, args: &bench::Args) -> anyhow::Result<Vec<Box<dyn Work>>> {
                match self { $(Op::$op => Ok(work($module::subjects(args)?, $module::measure)),)* }
            }

            /// Sizes of `--shape`.
            pub fn shape(self) -> &'static str {
                match self { $(Op::$op => $module::SHAPE,)* }
            }

            /// Options of `bench` that apply to the operation, but not to all.
            pub fn bench_options(self) -> &'static [&'static str] {
                match self { $(Op::$op => $module::BENCH_OPTIONS,)* }
            }
        }

        impl ValueEnum for Op {
            fn value_variants<'a>() -> &'a [Self] {
                &[$(Op::$op),*]
            }

            fn to_possible_value(&self) -> Option<PossibleValue> {
                let summary = qgemm_testkit::suite(self.name()).map_or("", Suite::summary);
                Some(PossibleValue::new(self.name()).help(format!("{summary}; --shape {}", self.shape())))
            }
        }
    };
}

operations! {
    Gemm: gemm,
    Convert: convert,
    Experts: experts,
    Routing: routing,
    Matmul: matmul,
    Quantize: quantize,
    Attention: attention,
    Norm: norm,
    KvAppend: kv_append,
    Indexer: indexer,
    Gradient: gradient,
    Optimizer: optimizer,
    GatherRows: gather_rows,
    Sampling: sampling,
    MergeAttention: merge_attention,
    LinearAttention: linear_attention,
    ShortConv: short_conv,
}

impl Op {
    /// Its conformance suite.
    ///
    /// # Errors
    /// When the test kit has none.
    pub fn suite(self) -> anyhow::Result<&'static dyn Suite> {
        qgemm_testkit::suite(self.name()).with_context(|| format!("there are no cases of {}", self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_is_an_operation_of_the_command() {
        let suites: Vec<&str> = qgemm_testkit::SUITES.iter().map(|suite| suite.operation()).collect();
        assert_eq!(Op::value_variants().iter().map(|op| op.name()).collect::<Vec<_>>(), suites);
        for op in Op::value_variants() {
            let value = op.to_possible_value().expect("none is hidden");
            assert_eq!((value.get_name(), op.suite().expect("it has cases").operation()), (op.name(), op.name()));
            assert!(value.get_help().is_some_and(|help| !help.to_string().is_empty()), "{}", op.name());
        }
    }
}

//! Suites: an operation's cases, in named groups.

use std::fmt;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;
use qgemm_formats::{Format, XFormat};
use qgemm_hal::OPERATIONS;

use crate::experts::ExpertSuite;
use crate::gather_rows::GatherRowsSuite;
use crate::gemm::GemmSuite;
use crate::gradient::GradientSuite;
use crate::norm::NormSuite;
use crate::outcome::Outcome;
use crate::quantize::QuantizeSuite;
use crate::{
    attention, convert, indexer, kv_append, linear_attention, matmul, merge_attention, optimizer, routing, sampling,
    short_conv,
};

/// A case of an operation, as data. Its text names everything
/// that it depends on.
pub trait TestCase: fmt::Display + fmt::Debug + Send + Sync {
    /// Runs it on a device and judges the result.
    fn run(&self, ctx: &Context) -> Outcome;

    /// The kernel that the cost model would choose, without compiling
    /// it. [`TestCase::run`] most probably needs it.
    /// `None` if no kernel exists, or if kernels are too few for it
    /// to matter.
    fn expected_kernel(&self, _: &Context) -> Option<KernelId> {
        None
    }
}

/// A named part of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The group's name, and that of its test. Names are unique over
    /// all suites.
    pub name: &'static str,
    /// Subject of the group, as half a sentence.
    pub summary: &'static str,
}

/// Selected cases.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// Weight formats, for operations with a weight; never empty.
    pub formats: Vec<Format>,
    /// Restricts plans to one kernel family, if the operation can.
    pub family: Option<&'static str>,
    /// Restricts cases to one format of quantized activations, if the
    /// operation has any.
    pub x_format: Option<XFormat>,
}

impl Default for Selection {
    /// Every case.
    fn default() -> Self {
        Self { formats: Format::all().collect(), family: None, x_format: None }
    }
}

/// The suite of one operation.
pub trait Suite: fmt::Debug + Send + Sync {
    /// Name of the operation.
    fn operation(&self) -> &'static str;

    /// One line of what the operation computes.
    fn summary(&self) -> &'static str {
        OPERATIONS.iter().find(|info| info.name == self.operation()).map_or("", |info| info.summary)
    }

    /// The groups, in the order of tables.
    fn groups(&self) -> Vec<Group>;

    /// The cases of a group; empty for a group of another suite.
    fn cases(&self, group: &str, wanted: &Selection) -> Vec<Box<dyn TestCase>>;

    /// The random case of `seed`. The same arguments give the same case.
    fn random_case(&self, wanted: &Selection, seed: u64) -> Box<dyn TestCase>;
}

/// A group and the function that makes its cases.
pub(crate) type Cases<C> = (Group, fn() -> Vec<C>);

/// An entry of a suite's groups.
pub(crate) const fn group<C>(name: &'static str, summary: &'static str, cases: fn() -> Vec<C>) -> Cases<C> {
    (Group { name, summary }, cases)
}

/// The suite of an operation whose cases no [`Selection`]
/// restricts.
#[derive(Debug)]
pub(crate) struct CaseList<C: 'static> {
    /// Name of the operation.
    pub operation: &'static str,
    /// The groups.
    pub groups: &'static [Cases<C>],
    /// The random case of a seed.
    pub random_case: fn(u64) -> C,
}

impl<C: TestCase> Suite for CaseList<C> {
    fn operation(&self) -> &'static str {
        self.operation
    }

    fn groups(&self) -> Vec<Group> {
        self.groups.iter().map(|&(group, _)| group).collect()
    }

    fn cases(&self, group: &str, _: &Selection) -> Vec<Box<dyn TestCase>> {
        let Some((_, cases)) = self.groups.iter().find(|(known, _)| known.name == group) else { return Vec::new() };
        cases().into_iter().map(|case| Box::new(case) as Box<dyn TestCase>).collect()
    }

    fn random_case(&self, _: &Selection, seed: u64) -> Box<dyn TestCase> {
        Box::new((self.random_case)(seed))
    }
}

/// Every operation's suite.
pub const SUITES: &[&dyn Suite] = &[
    &GemmSuite,
    &convert::SUITE,
    &ExpertSuite,
    &routing::SUITE,
    &matmul::SUITE,
    &QuantizeSuite,
    &attention::SUITE,
    &NormSuite,
    &kv_append::SUITE,
    &indexer::SUITE,
    &GradientSuite,
    &optimizer::SUITE,
    &GatherRowsSuite,
    &sampling::SUITE,
    &merge_attention::SUITE,
    &linear_attention::SUITE,
    &short_conv::SUITE,
];

/// The suite of an operation.
pub fn suite(operation: &str) -> Option<&'static dyn Suite> {
    SUITES.iter().find(|suite| suite.operation() == operation).copied()
}

/// The names of all groups of all suites.
pub fn group_names() -> Vec<&'static str> {
    SUITES.iter().flat_map(|suite| suite.groups()).map(|group| group.name).collect()
}

/// The suite that has a group of this name.
pub fn suite_with(group: &str) -> Option<&'static dyn Suite> {
    SUITES.iter().find(|suite| suite.groups().iter().any(|known| known.name == group)).copied()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn groups_have_names_of_their_own_and_cases() {
        let names = group_names();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        for name in names {
            let suite = suite_with(name).expect("it is listed");
            assert!(!suite.cases(name, &Selection::default()).is_empty(), "{name}");
            let others = SUITES.iter().filter(|other| other.operation() != suite.operation());
            assert!(others.into_iter().all(|other| other.cases(name, &Selection::default()).is_empty()), "{name}");
        }
    }

    #[test]
    fn a_seed_is_a_case() {
        for suite in SUITES {
            let case = |seed| suite.random_case(&Selection::default(), seed).to_string();
            assert!(case(1) == case(1) && case(1) != case(2), "{}", suite.operation());
        }
    }
}

//! One grouped product to check, as data.

use std::fmt;

use crate::gemm::Case;

/// How rows are given to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FormCase {
    /// Sorted rows, by offsets.
    Contiguous,
    /// So many rows an expert, by counts.
    Masked {
        /// Rows of an expert.
        capacity: usize,
    },
    /// Slots, by ids.
    Indexed {
        /// Slots of a token.
        top_k: usize,
        /// Whether X has a row for each slot.
        x_per_slot: bool,
        /// Whether the slots of a token are added up.
        combined: bool,
    },
}

/// What the index looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKind {
    /// Every expert is as likely.
    Uniform,
    /// A few experts have most rows, and some none.
    Skewed,
    /// One expert has all rows.
    Hot,
    /// Rows that no expert has: offsets that end early, counts of 0, or, where ids must be some, as `Uniform`.
    Sparse,
    /// Ids out of range, offsets that descend or go too far, counts beyond the capacity, router weights that are NaN.
    Faulty,
}

impl IndexKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Uniform, Self::Skewed, Self::Hot, Self::Sparse, Self::Faulty];

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            IndexKind::Uniform => "uniform",
            IndexKind::Skewed => "skewed",
            IndexKind::Hot => "hot",
            IndexKind::Sparse => "sparse",
            IndexKind::Faulty => "faulty",
        }
    }
}

/// One grouped product to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertCase {
    /// One expert's product. Its `m` is the number of all rows: with slots, a multiple of them; with a capacity, that times the
    /// experts.
    pub each: Case,
    /// Experts.
    pub experts: usize,
    /// How rows are given to them.
    pub form: FormCase,
    /// What the index looks like.
    pub index: IndexKind,
    /// Whether the slots of each expert are listed by who gives the ids; only of slots.
    pub listed: bool,
    /// Whether kernels are told that the index is there before the run.
    pub settled: bool,
    /// Whether all of them have the same weight, which lies on the device once.
    pub shared: bool,
}

impl ExpertCase {
    /// `rows` rows, as far as the form leaves the number open, for `experts` experts like `each`.
    pub fn new(each: Case, experts: usize, rows: usize, form: FormCase) -> Self {
        let m = match form {
            FormCase::Contiguous => rows,
            FormCase::Masked { capacity } => experts * capacity,
            FormCase::Indexed { top_k, .. } => rows * top_k,
        };
        let index = IndexKind::Uniform;
        Self { each: Case { m, ..each }, experts, form, index, listed: false, settled: false, shared: false }
    }

    /// Rows of X.
    pub fn x_rows(&self) -> usize {
        match self.form {
            FormCase::Indexed { top_k, x_per_slot: false, .. } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// The row of X that a row of products is of.
    pub fn x_row(&self, row: usize) -> usize {
        match self.form {
            FormCase::Indexed { top_k, x_per_slot: false, .. } => row / top_k,
            _ => row,
        }
    }

    /// Slots that are added up to a row of D; 1 where none are.
    pub fn summed(&self) -> usize {
        match self.form {
            FormCase::Indexed { top_k, combined: true, .. } => top_k,
            _ => 1,
        }
    }
}

/// The text of the product, and what makes it one of experts.
impl fmt::Display for ExpertCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} experts={}", self.each, self.experts)?;
        match self.form {
            FormCase::Contiguous => f.write_str(" contiguous")?,
            FormCase::Masked { capacity } => write!(f, " masked capacity={capacity}")?,
            FormCase::Indexed { top_k, x_per_slot, combined } => {
                write!(f, " indexed top-k={top_k}")?;
                for (_, name) in [(x_per_slot, "x-per-slot"), (combined, "combined")].iter().filter(|(on, _)| *on) {
                    write!(f, " {name}")?;
                }
            }
        }
        let listed = if self.listed { " listed" } else { "" };
        let settled = if self.settled { " settled" } else { "" };
        let shared = if self.shared { " shared" } else { "" };
        write!(f, " index={}{listed}{settled}{shared}", self.index.name())
    }
}

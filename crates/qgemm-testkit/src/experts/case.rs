//! A case of `experts` (MoE GEMM), as data.

use std::fmt;

use crate::gemm::Case;

/// Assignment of rows to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FormCase {
    /// Rows sorted by expert, with offsets.
    Contiguous,
    /// A fixed capacity per expert, with counts.
    Masked {
        /// Rows per expert.
        capacity: usize,
    },
    /// Slots with expert ids.
    Indexed {
        /// Slots per token.
        top_k: usize,
        /// Whether X has a row for each slot.
        x_per_slot: bool,
        /// Whether a token's slots are combined.
        combined: bool,
    },
}

/// Kind of index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKind {
    /// All experts are equally likely.
    Uniform,
    /// A few experts have most rows, and some none.
    Skewed,
    /// One expert has all rows.
    Hot,
    /// Rows without an expert: offsets that end early, or counts of
    /// 0. If ids must be valid, as `Uniform`.
    Sparse,
    /// Invalid ids, descending or too large offsets, counts beyond
    /// the capacity, NaN router weights.
    Faulty,
}

impl IndexKind {
    /// All kinds.
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

/// A MoE GEMM to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertCase {
    /// An expert's product. `m` counts all rows: a multiple of the
    /// slots per token, or capacity times experts.
    pub each: Case,
    /// Experts.
    pub experts: usize,
    /// Assignment of rows to experts.
    pub form: FormCase,
    /// Kind of index.
    pub index: IndexKind,
    /// Whether the caller gives the slot lists of experts, for slots
    /// only.
    pub listed: bool,
    /// Whether the index is declared ready before launch.
    pub ready: bool,
    /// Whether experts share one weight on the device.
    pub shared: bool,
}

impl ExpertCase {
    /// `rows` rows, as far as the form allows, for `experts` experts
    /// like `each`.
    pub fn new(each: Case, experts: usize, rows: usize, form: FormCase) -> Self {
        let m = match form {
            FormCase::Contiguous => rows,
            FormCase::Masked { capacity } => experts * capacity,
            FormCase::Indexed { top_k, .. } => rows * top_k,
        };
        let index = IndexKind::Uniform;
        Self { each: Case { m, ..each }, experts, form, index, listed: false, ready: false, shared: false }
    }

    /// Rows of X.
    pub fn x_rows(&self) -> usize {
        match self.form {
            FormCase::Indexed { top_k, x_per_slot: false, .. } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// The row of X for a row of products.
    pub fn x_row(&self, row: usize) -> usize {
        match self.form {
            FormCase::Indexed { top_k, x_per_slot: false, .. } => row / top_k,
            _ => row,
        }
    }

    /// Slots per row of D: 1 if not combined.
    pub fn summed(&self) -> usize {
        match self.form {
            FormCase::Indexed { top_k, combined: true, .. } => top_k,
            _ => 1,
        }
    }
}

/// The text of the product, then the fields of experts.
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
        let ready = if self.ready { " ready" } else { "" };
        let shared = if self.shared { " shared" } else { "" };
        write!(f, " index={}{listed}{ready}{shared}", self.index.name())
    }
}

//! [`Nothing`]: operations of no tokens, rows or columns, which are planned and launch nothing.

use qgemm_hal::{
    CheckedAttention, CheckedConvert, CheckedExperts, CheckedIndexer, CheckedKvAppend, CheckedMatmul, CheckedNorm,
    CheckedOptimizer, CheckedQuantize, CheckedRouting, IndexerResult,
};

/// Whether an operation has nothing to compute. Families are not asked then: they count on something.
pub(crate) trait Nothing {
    fn is_nothing(&self) -> bool;
}

impl Nothing for CheckedExperts {
    fn is_nothing(&self) -> bool {
        self.each.m == 0
    }
}

impl Nothing for CheckedConvert {
    /// Factors of rows without columns are not written, either.
    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.d_columns == 0
    }
}

impl Nothing for CheckedRouting {
    fn is_nothing(&self) -> bool {
        self.tokens == 0
    }
}

impl Nothing for CheckedMatmul {
    fn is_nothing(&self) -> bool {
        self.batch == 0 || self.m == 0 || self.n == 0
    }
}

impl Nothing for CheckedQuantize {
    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }
}

impl Nothing for CheckedAttention {
    fn is_nothing(&self) -> bool {
        self.sequences == 0 || self.tokens == 0 || self.most_queries() == 0
    }
}

impl Nothing for CheckedNorm {
    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }
}

impl Nothing for CheckedOptimizer {
    fn is_nothing(&self) -> bool {
        self.len == 0
    }
}

impl Nothing for CheckedKvAppend {
    fn is_nothing(&self) -> bool {
        self.addressing.tokens == 0 || self.addressing.sequences == 0
    }
}

impl Nothing for CheckedIndexer {
    fn is_nothing(&self) -> bool {
        let columns = match self.result {
            IndexerResult::Scores { .. } => self.most_keys(),
            IndexerResult::Best { count } => count,
        };
        self.queries == 0 || columns == 0
    }
}

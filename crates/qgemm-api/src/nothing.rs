//! Empty operations ([`Nothing`]): no tokens, rows or columns. They are
//! planned and launch nothing.

use qgemm_hal::{
    CheckedAttention, CheckedConvert, CheckedExperts, CheckedIndexer, CheckedKvAppend, CheckedMatmul, CheckedNorm,
    CheckedOptimizer, CheckedQuantize, CheckedRouting, IndexerResult,
};

/// Whether an operation has nothing to compute. Families are not asked then,
/// because they assume work.
pub(crate) trait Nothing {
    fn is_nothing(&self) -> bool;
}

impl Nothing for CheckedExperts {
    fn is_nothing(&self) -> bool {
        self.each.m == 0
    }
}

impl Nothing for CheckedConvert {
    /// Without columns, row factors are not written, either.
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

//! Registers of a warp that an instruction reads and writes.

/// Maximum words that a lane passes to or
/// gets from an operation.
pub const MAX_WORDS: usize = 16;

/// Words of every lane. Words beyond an operation's count are ignored.
pub type WarpWords = [[u32; MAX_WORDS]; 32];

/// Zeroed words, to be filled.
pub const NO_WORDS: WarpWords = [[0; MAX_WORDS]; 32];

/// Words of a lane for the operands of a matrix instruction,
/// in this order: A, B, accumulators, scales.
#[derive(Clone, Copy)]
pub(crate) struct WordCounts {
    pub a: usize,
    pub b: usize,
    pub d: usize,
    pub scales: usize,
}

impl WordCounts {
    pub const fn first_b(self) -> usize {
        self.a
    }

    pub const fn first_d(self) -> usize {
        self.a + self.b
    }

    pub const fn first_scale(self) -> usize {
        self.a + self.b + self.d
    }
}

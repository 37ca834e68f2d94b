//! Parameters of the norm kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Shape of one `norm`, for the kernels of every backend.
    pub struct NormShape {
        /// Rows of X and D.
        pub rows: u32,
        /// Columns of X.
        pub columns: u32,
        /// Columns of D.
        pub d_columns: u32,
        /// `K_ORDER`, `RESIDUAL` and those of the `FLAG_`
        /// constants that are a norm's.
        pub flags: u32,
        /// Element types (0 = f32, 1 = f16, 2 = bf16),
        /// four bits each, from the lowest: X,
        /// residual, sum, D, gamma, beta.
        pub types: u32,
        /// Threads that share a row.
        pub row_threads: u32,
        /// Columns, the first of a row, that are
        /// kept in shared memory.
        pub kept_columns: u32,
        /// Added to the mean of squares.
        pub eps: f32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements)
    /// of one `norm`; CUDA only.
    pub struct NormPointers {
        /// X.
        pub x: u64,
        /// Residual.
        pub residual: u64,
        /// Factor of every column.
        pub gamma: u64,
        /// What is added to every column.
        pub beta: u64,
        /// Column of D → column of X: as many
        /// entries as D has columns.
        pub order: u64,
        /// The sum.
        pub sum: u64,
        /// D.
        pub d: u64,
        /// Elements from one row of X to the next.
        pub x_row: u64,
        /// Elements from one row of the residual to the next.
        pub residual_row: u64,
        /// Elements from one row of the sum to the next.
        pub sum_row: u64,
        /// Elements from one row of D to the next.
        pub d_row: u64,
    }
}

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
        /// `FLAG_` constants: `K_ORDER`, `RESIDUAL` and the norm flags.
        pub flags: u32,
        /// Element types (0 = f32, 1 = f16, 2 = bf16),
        /// four bits each, from the lowest: X,
        /// residual, sum, D, gamma, beta.
        pub types: u32,
        /// Threads that share a row.
        pub row_threads: u32,
        /// First columns of a row that are cached in shared memory.
        pub kept_columns: u32,
        /// Epsilon, added to the mean of squares.
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
        /// Gamma.
        pub gamma: u64,
        /// Beta.
        pub beta: u64,
        /// Column of D → column of X, one
        /// entry per column of D.
        pub order: u64,
        /// The sum.
        pub sum: u64,
        /// D.
        pub d: u64,
        /// Stride between rows of X, in elements.
        pub x_row: u64,
        /// Stride between rows of the residual, in elements.
        pub residual_row: u64,
        /// Stride between rows of the sum, in elements.
        pub sum_row: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
    }
}

abi_struct! {
    /// Gate and groups of features of one `norm`; CUDA only. The
    /// columns of [`NormShape`] are those of a group, its rows
    /// groups of rows.
    pub struct NormGatePointers {
        /// z.
        pub z: u64,
        /// Stride between rows of z, in elements.
        pub z_row: u64,
        /// Groups of features.
        pub groups: u64,
    }
}

//! Parameters of the `matmul` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes and scalars of one `matmul`, for the
    /// kernels of every backend.
    pub struct MatmulShape {
        /// Rows of A and D.
        pub m: u32,
        /// Columns of B and D.
        pub n: u32,
        /// Columns of A and rows of B.
        pub k: u32,
        /// `FLAG_` constants: `C`, `BIAS`, `D_ALIGNED16`, `C_ALIGNED16`,
        /// `ACCUMULATES`, `SLOPE`, `K_GROUPED`, `A_SCALE`, `B_SCALE`.
        pub flags: u32,
        /// Scale of the product.
        pub alpha: f32,
        /// Scale of C, or of the old contents of D.
        pub beta: f32,
    }
}

abi_struct! {
    /// Epilogue types of one `matmul`; CUDA only. Element types are
    /// 0 = f32, 1 = f16, 2 = bf16.
    pub struct MatmulTypes {
        /// Activation, applied last: `ACTIVATION_` constants.
        pub activation: u32,
        /// Element type of D.
        pub d_dtype: u32,
        /// Element type of C.
        pub c_dtype: u32,
        /// Element type of the bias.
        pub bias_dtype: u32,
    }
}

abi_struct! {
    /// Tiles of one `matmul`; CUDA only.
    pub struct MatmulTiles {
        /// Tiles along M.
        pub m_tiles: u32,
        /// Tiles along N.
        pub n_tiles: u32,
        /// CTAs that share a tile's K (split-K).
        pub splits: u32,
        /// Stages along K.
        pub k_tiles: u32,
        /// Whether contiguous rows or columns of A are 16-byte aligned.
        pub a_aligned16: u32,
        /// Whether contiguous rows or columns of B are 16-byte aligned.
        pub b_aligned16: u32,
    }
}

abi_struct! {
    /// Strides of block scales; CUDA only.
    pub struct MatmulScales {
        /// Stride between rows of A's scales, in elements.
        pub a_row: u64,
        /// Stride of B's scales between columns, in elements.
        pub b_row: u64,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements) of
    /// one `matmul`; CUDA only.
    pub struct MatmulPointers {
        /// A.
        pub a: u64,
        /// B.
        pub b: u64,
        /// C.
        pub c: u64,
        /// Bias.
        pub bias: u64,
        /// D.
        pub d: u64,
        /// Counters and partial sums.
        pub workspace: u64,
        /// Offset of the partial sums in the workspace, in bytes.
        pub partials: u64,
        /// Stride between rows of A, in elements.
        pub a_row: u64,
        /// Stride between columns of A, in elements.
        pub a_col: u64,
        /// Stride between matrices A, in elements.
        pub a_batch: u64,
        /// Stride between rows of B, in elements.
        pub b_row: u64,
        /// Stride between columns of B, in elements.
        pub b_col: u64,
        /// Stride between matrices B, in elements.
        pub b_batch: u64,
        /// Stride between rows of C, in elements.
        pub c_row: u64,
        /// Stride between matrices C, in elements.
        pub c_batch: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
        /// Stride between matrices D, in elements.
        pub d_batch: u64,
        /// Start of each product's K range, plus the end.
        pub offsets: u64,
        /// Factor of A, f32, or 0.
        pub a_scale: u64,
        /// Factor of B, f32, or 0.
        pub b_scale: u64,
    }
}

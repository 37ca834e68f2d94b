//! Parameters of the `merge_attention` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `merge_attention`, for the kernels of every
    /// backend. Element types are 0 = f32, 1 = f16, 2 = bf16.
    pub struct MergeAttentionShape {
        /// Parts.
        pub parts: u32,
        /// Rows of D: a head of a token each.
        pub rows: u32,
        /// Heads.
        pub heads: u32,
        /// Head dimension.
        pub dim: u32,
        /// Threads that share a row: a power of two.
        pub row_threads: u32,
        /// `FLAG_` constants: `LSE`; on CUDA also `X_ALIGNED16` (of
        /// the partial results) and `D_ALIGNED16`.
        pub flags: u32,
        /// Element type of the partial results; wgpu only.
        pub dtype: u32,
        /// Element type of D.
        pub d_dtype: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements) of
    /// one `merge_attention`; CUDA only.
    pub struct MergeAttentionPointers {
        /// Partial results.
        pub partial: u64,
        /// Log-sum-exps of the parts.
        pub partial_lse: u64,
        /// D.
        pub d: u64,
        /// Log-sum-exp.
        pub lse: u64,
        /// Stride between parts of the partial results.
        pub part_stride: u64,
        /// Stride between tokens of the partial results.
        pub token_stride: u64,
        /// Stride between heads of the partial results.
        pub head_stride: u64,
        /// Stride between tokens of D.
        pub d_token: u64,
        /// Stride between heads of D.
        pub d_head: u64,
    }
}

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
        /// `C`, `BIAS`, `D_ALIGNED16`, `C_ALIGNED16`, `ACCUMULATES`, `SLOPE`,
        /// `K_GROUPED`, `A_SCALE` and `B_SCALE` of the `FLAG_` constants.
        pub flags: u32,
        /// Factor of the product.
        pub alpha: f32,
        /// Factor of C, or of what D held.
        pub beta: f32,
    }
}

abi_struct! {
    /// Epilogue types of one `matmul`; CUDA only. Element types are
    /// 0 = f32, 1 = f16, 2 = bf16.
    pub struct MatmulTypes {
        /// Function applied last: see the `ACTIVATION_` constants.
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
        /// CTAs that share a tile's K.
        pub splits: u32,
        /// Stages along K.
        pub k_tiles: u32,
        /// Whether contiguous parts of A begin at multiples of 16 bytes.
        pub a_aligned16: u32,
        /// Whether those of B do.
        pub b_aligned16: u32,
    }
}

abi_struct! {
    /// Strides of block scales; CUDA only.
    pub struct MatmulScales {
        /// Elements from one row of A's scales to the next.
        pub a_row: u64,
        /// Elements from the scales of one column of B
        /// to those of the next.
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
        /// Counters and partial accumulators.
        pub workspace: u64,
        /// Bytes of the workspace before the partial accumulators.
        pub partials: u64,
        /// Elements from one row of A to the next.
        pub a_row: u64,
        /// Elements from one column of A to the next.
        pub a_col: u64,
        /// Elements from one A to the next.
        pub a_batch: u64,
        /// Elements from one row of B to the next.
        pub b_row: u64,
        /// Elements from one column of B to the next.
        pub b_col: u64,
        /// Elements from one B to the next.
        pub b_batch: u64,
        /// Elements from one row of C to the next.
        pub c_row: u64,
        /// Elements from one C to the next.
        pub c_batch: u64,
        /// Elements from one row of D to the next.
        pub d_row: u64,
        /// Elements from one D to the next.
        pub d_batch: u64,
        /// Where each product's range of K begins,
        /// and the last one ends.
        pub offsets: u64,
        /// The factor of all of A, an f32; 0
        /// where there is none.
        pub a_scale: u64,
        /// The factor of all of B.
        pub b_scale: u64,
    }
}

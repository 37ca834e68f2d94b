//! Parameters of the `unpack` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `unpack`; CUDA only. Element types are 0
    /// = f32, 1 = f16, 2 = bf16.
    pub struct UnpackShape {
        /// Rows of W, or of each weight of a gated pair.
        pub out_features: u32,
        /// Input feature of D's first row.
        pub first: u32,
        /// Rows of D.
        pub features: u32,
        /// K-tiles of a row of W.
        pub k_tiles: u32,
        /// First k-tile that may hold a column of D.
        pub first_k_tile: u32,
        /// Row groups of W, with a CTA for every k-tile.
        pub row_groups: u32,
        /// `FLAG_` constants: `ROW_SCALE`, `K_ORDER`, `GATED`, `D_ALIGNED16`.
        pub flags: u32,
        /// Element type of D.
        pub d_dtype: u32,
    }
}

abi_struct! {
    /// Device addresses of one `unpack`, and the row stride of
    /// D in elements; CUDA only.
    pub struct UnpackPointers {
        /// Packed W.
        pub w: u64,
        /// Row scales.
        pub row_scale: u64,
        /// Stored column of W → input feature.
        pub k_order: u64,
        /// D.
        pub d: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
    }
}

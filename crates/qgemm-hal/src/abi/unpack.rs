//! Parameters of the `unpack` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `unpack`; CUDA only. Element types are 0
    /// = f32, 1 = f16, 2 = bf16.
    pub struct UnpackShape {
        /// Rows of W, or, of a gated pair,
        /// those of each weight.
        pub out_features: u32,
        /// The input feature that D's first row is.
        pub first: u32,
        /// Rows of D.
        pub features: u32,
        /// K-tiles of a row of W.
        pub k_tiles: u32,
        /// The first k-tile with a column that D may have.
        pub first_k_tile: u32,
        /// Groups of rows of W, a CTA each for every k-tile.
        pub row_groups: u32,
        /// `ROW_SCALE`, `K_ORDER`, `GATED` and `D_ALIGNED16`
        /// of the `FLAG_` constants.
        pub flags: u32,
        /// Element type of D.
        pub d_dtype: u32,
    }
}

abi_struct! {
    /// Device addresses of one `unpack`, and the row stride of
    /// D in elements; CUDA only.
    pub struct UnpackPointers {
        /// Packed codes and scales of W.
        pub w: u64,
        /// Row factors.
        pub row_scale: u64,
        /// Stored column of W to input feature.
        pub k_order: u64,
        /// D.
        pub d: u64,
        /// Elements from one row of D to the next.
        pub d_row: u64,
    }
}

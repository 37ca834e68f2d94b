//! Parameters of the `gather_rows` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `gather_rows`; CUDA only. Element types are 0
    /// = f32, 1 = f16, 2 = bf16.
    pub struct GatherRowsShape {
        /// Ids, and rows of D.
        pub rows: u32,
        /// Rows of W.
        pub table_rows: u32,
        /// Columns of D.
        pub k: u32,
        /// K-tiles of a row of W.
        pub k_tiles: u32,
        /// CTAs of a row.
        pub row_ctas: u32,
        /// `FLAG_` constants: `ROW_SCALE`, `K_ORDER`.
        pub flags: u32,
        /// Element type of D.
        pub d_dtype: u32,
        /// Factor of every element.
        pub scale: f32,
    }
}

abi_struct! {
    /// Device addresses of one `gather_rows`, and the row stride of
    /// D in elements; CUDA only.
    pub struct GatherRowsPointers {
        /// Packed W.
        pub w: u64,
        /// Row scales.
        pub row_scale: u64,
        /// Stored column of W → column of D.
        pub k_order: u64,
        /// Row of W for each row of D.
        pub ids: u64,
        /// D.
        pub d: u64,
        /// Status words.
        pub status: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
    }
}

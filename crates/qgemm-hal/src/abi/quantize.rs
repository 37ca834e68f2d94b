//! Parameters of the `quantize` and `dequantize` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Shape of one `quantize`, for the kernels of every backend.
    pub struct QuantizeShape {
        /// Rows of X.
        pub rows: u32,
        /// Columns of X.
        pub columns: u32,
        /// Columns of codes; zero beyond the columns of X.
        pub stored_columns: u32,
        /// `FLAG_` constants: `X_ALIGNED16`, `ROW_IN_SHARED`.
        pub flags: u32,
        /// CTAs or workgroups that share a row.
        pub chunks: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides of one `quantize`, in elements for
    /// X and in bytes for outputs; CUDA only.
    pub struct QuantizePointers {
        /// X.
        pub x: u64,
        /// Given factor for all of X.
        pub factor: u64,
        /// Codes.
        pub codes: u64,
        /// Scales.
        pub scales: u64,
        /// Token factors.
        pub token_factors: u64,
        /// X block sums.
        pub sums: u64,
        /// Stride between rows of X, in elements.
        pub x_row: u64,
        /// Stride between columns of X, in elements.
        pub x_col: u64,
        /// Row stride of codes, in bytes.
        pub codes_row: u64,
        /// Row stride of scales, in bytes.
        pub scales_row: u64,
        /// Row stride of sums, in bytes.
        pub sums_row: u64,
    }
}

abi_struct! {
    /// Shape of one `dequantize`, for the kernels of every backend.
    pub struct DequantizeShape {
        /// Rows of X.
        pub rows: u32,
        /// Columns of codes and of D.
        pub columns: u32,
        /// CTAs or workgroups that share a row.
        pub chunks: u32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

abi_struct! {
    /// Device addresses and strides in bytes of one `dequantize`; CUDA only.
    pub struct DequantizePointers {
        /// Codes.
        pub codes: u64,
        /// Scales.
        pub scales: u64,
        /// Token factors, or the given factor for all of X.
        pub factors: u64,
        /// D, contiguous.
        pub d: u64,
        /// Row stride of codes, in bytes.
        pub codes_row: u64,
        /// Row stride of scales, in bytes.
        pub scales_row: u64,
    }
}

abi_struct! {
    /// Device addresses and strides in bytes of a quantized X's
    /// planes beside the codes; CUDA only.
    pub struct XPlanePointers {
        /// Scales.
        pub scales: u64,
        /// Token factors, or the given factor for all of X.
        pub factors: u64,
        /// X block sums.
        pub sums: u64,
        /// Row stride of scales, in bytes.
        pub scales_row: u64,
        /// Row stride of sums, in bytes.
        pub sums_row: u64,
        /// log2 of the columns that share a scale: shifts a column
        /// to the index of its scale.
        pub block_shift: u32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

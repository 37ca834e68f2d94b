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
        /// Columns of codes, of which those beyond X's are zeros.
        pub stored_columns: u32,
        /// `X_ALIGNED16` and `ROW_IN_SHARED` of the `FLAG_` constants.
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
        /// The factor that is given for all of X.
        pub factor: u64,
        /// Codes.
        pub codes: u64,
        /// Scales.
        pub scales: u64,
        /// Factors of tokens.
        pub token_factors: u64,
        /// Sums.
        pub sums: u64,
        /// Elements from one row of X to the next.
        pub x_row: u64,
        /// Elements from one column of X to the next.
        pub x_col: u64,
        /// Bytes from one row of codes to the next.
        pub codes_row: u64,
        /// Bytes from one row of scales to the next.
        pub scales_row: u64,
        /// Bytes from one row of sums to the next.
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
        /// Factors of tokens, or the one that is
        /// given for all of X.
        pub factors: u64,
        /// D, without gaps.
        pub d: u64,
        /// Bytes from one row of codes to the next.
        pub codes_row: u64,
        /// Bytes from one row of scales to the next.
        pub scales_row: u64,
    }
}

abi_struct! {
    /// Device addresses and strides in bytes of a quantized X's
    /// planes beside the codes; CUDA only.
    pub struct XPlanePointers {
        /// Scales.
        pub scales: u64,
        /// Factors of tokens, or the one that is
        /// given for all of X.
        pub factors: u64,
        /// Sums.
        pub sums: u64,
        /// Bytes from one row of scales to the next.
        pub scales_row: u64,
        /// Bytes from one row of sums to the next.
        pub sums_row: u64,
        /// Columns that share a scale, as a power of
        /// two: by how much a column is shifted to
        /// the index of its scale.
        pub block_shift: u32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

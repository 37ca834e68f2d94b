//! Parameters of the `sampling` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `sampling`, for the kernels of every backend.
    pub struct SamplingShape {
        /// Rows of logits.
        pub rows: u32,
        /// Logits of a row.
        pub vocabulary: u32,
        /// Maximum earlier tokens of a row; 0 without a penalty.
        pub earlier: u32,
        /// Alternatives of a row.
        pub alternatives: u32,
    }
}

abi_struct! {
    /// Device addresses of one `sampling`, and row strides in
    /// elements; CUDA only.
    pub struct SamplingPointers {
        /// Logits.
        pub logits: u64,
        /// Parameter words of the rows.
        pub parameters: u64,
        /// Earlier tokens.
        pub earlier: u64,
        /// Number of earlier tokens of each row.
        pub earlier_lengths: u64,
        /// Orders of the penalized logits.
        pub orders: u64,
        /// Sampled tokens.
        pub ids: u64,
        /// Log-probabilities of the sampled tokens.
        pub log_probabilities: u64,
        /// Most likely tokens.
        pub alternative_ids: u64,
        /// Log-probabilities of the most likely tokens.
        pub alternative_log_probabilities: u64,
        /// Status words of the rows.
        pub status: u64,
        /// Stride between rows of the logits.
        pub logits_row: u64,
        /// Stride between rows of the earlier tokens.
        pub earlier_row: u64,
    }
}

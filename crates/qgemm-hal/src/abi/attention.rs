//! Parameters of the attention kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes and options of one `attention`; CUDA only. wgpu kernels
    /// have the options as constants.
    pub struct AttentionShape {
        /// Sequences.
        pub sequences: u32,
        /// Query tokens of all sequences.
        pub tokens: u32,
        /// Most query tokens of a sequence; all have as many
        /// where there are no offsets.
        pub most_queries: u32,
        /// Most keys of a sequence.
        pub most_keys: u32,
        /// Heads of queries.
        pub heads: u32,
        /// Heads of keys and values.
        pub kv_heads: u32,
        /// Features of a query and a key.
        pub qk_dim: u32,
        /// Features of a value.
        pub v_dim: u32,
        /// Pages of keys.
        pub pages: u32,
        /// Rows of a page.
        pub page_size: u32,
        /// Pages of a row of the block table; 0
        /// where there is none.
        pub table_width: u32,
        /// Keys that a query sees at most; 2^32 - 1
        /// where there is no window.
        pub window: u32,
        /// `CAUSAL`, `SOFT_CAP`, `Q_OFFSETS`, `KV_OFFSETS`, `KV_LENGTHS`, `LSE`,
        /// `Q_ALIGNED`, `KV_ALIGNED` and `D_ALIGNED` of the `FLAG_` constants.
        pub flags: u32,
        /// Element type of Q and D (0 = f32, 1
        /// = f16, 2 = bf16).
        pub dtype: u32,
        /// Factor of products before they are bounded: of the soft cap's
        /// tanh, or of the exponent to base 2.
        pub factor: f32,
        /// The soft cap as an exponent to base 2.
        pub soft_cap: f32,
    }
}

abi_struct! {
    /// Device addresses, strides in elements and split-KV of one
    /// `attention` kernel; CUDA only.
    pub struct AttentionPointers {
        /// Queries.
        pub q: u64,
        /// Keys.
        pub k: u64,
        /// Values.
        pub v: u64,
        /// Factors of the heads of keys.
        pub k_factors: u64,
        /// Factors of the heads of values.
        pub v_factors: u64,
        /// Scales of blocks of keys.
        pub k_scales: u64,
        /// Scales of blocks of values.
        pub v_scales: u64,
        /// Where the query tokens of each sequence begin.
        pub q_offsets: u64,
        /// Where the rows of keys of each sequence begin.
        pub kv_offsets: u64,
        /// How many keys each sequence has.
        pub kv_lengths: u64,
        /// The pages of each sequence.
        pub block_table: u64,
        /// Results.
        pub d: u64,
        /// Log-sum-exp.
        pub lse: u64,
        /// Partial results.
        pub workspace: u64,
        /// From one token of Q to the next.
        pub q_token: u64,
        /// From one head of Q to the next.
        pub q_head: u64,
        /// From one page of K to the next.
        pub k_page: u64,
        /// From one token of K to the next.
        pub k_token: u64,
        /// From one head of K to the next.
        pub k_head: u64,
        /// From one page of V to the next.
        pub v_page: u64,
        /// From one token of V to the next.
        pub v_token: u64,
        /// From one head of V to the next.
        pub v_head: u64,
        /// From one token of D to the next.
        pub d_token: u64,
        /// From one head of D to the next.
        pub d_head: u64,
        /// Parts that the keys of a sequence are
        /// cut into at most.
        pub parts: u32,
        /// Keys of a part.
        pub part_keys: u32,
        /// CTAs for the queries of a sequence
        /// and a head of keys.
        pub row_ctas: u32,
        /// Shift that divides by the rows of a page; 32 where
        /// these are no power of two.
        pub page_shift: u32,
    }
}

abi_struct! {
    /// Location of a bit mask; CUDA only, for
    /// kernels with a mask.
    pub struct AttentionBits {
        /// The first word of the first row.
        pub address: u64,
        /// Words from one head to the next; 0 where all
        /// heads have the same rows.
        pub head_words: u64,
        /// Words of a row.
        pub row_words: u32,
        /// 1 where sequences have the same rows, 0
        /// where each token has one.
        pub is_shared: u32,
    }
}

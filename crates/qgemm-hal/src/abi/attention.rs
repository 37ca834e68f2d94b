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
        /// Maximum query tokens of a sequence; without offsets, of each sequence.
        pub most_queries: u32,
        /// Maximum keys of a sequence.
        pub most_keys: u32,
        /// Query heads.
        pub heads: u32,
        /// KV heads.
        pub kv_heads: u32,
        /// Features of a query and a key.
        pub qk_dim: u32,
        /// Features of a value.
        pub v_dim: u32,
        /// Pages of keys.
        pub pages: u32,
        /// Rows of a page.
        pub page_size: u32,
        /// Columns of the block table; 0 without one.
        pub table_width: u32,
        /// Sliding window: maximum visible keys; 2^32 - 1 without a window.
        pub window: u32,
        /// `FLAG_` constants: `CAUSAL`, `SOFT_CAP`, `Q_OFFSETS`, `KV_OFFSETS`,
        /// `KV_LENGTHS`, `LSE`, `Q_ALIGNED`, `KV_ALIGNED`, `D_ALIGNED`,
        /// `GATE_ALIGNED`, `KEYS_READY`.
        pub flags: u32,
        /// Element type of Q and D (0 = f32, 1
        /// = f16, 2 = bf16).
        pub dtype: u32,
        /// Scale of q · k: for the soft cap's tanh, or
        /// for the base-2 exponent.
        pub factor: f32,
        /// Soft cap, for the base-2 exponent.
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
        /// Factors of the key heads.
        pub k_factors: u64,
        /// Factors of the value heads.
        pub v_factors: u64,
        /// Block scales of the keys.
        pub k_scales: u64,
        /// Block scales of the values.
        pub v_scales: u64,
        /// Query offsets of each sequence.
        pub q_offsets: u64,
        /// Key offsets of each sequence.
        pub kv_offsets: u64,
        /// Key count of each sequence.
        pub kv_lengths: u64,
        /// Block table: page numbers of each sequence.
        pub block_table: u64,
        /// Results.
        pub d: u64,
        /// Log-sum-exp.
        pub lse: u64,
        /// Split-KV partial results.
        pub workspace: u64,
        /// Stride between tokens of Q.
        pub q_token: u64,
        /// Stride between heads of Q.
        pub q_head: u64,
        /// Stride between pages of K.
        pub k_page: u64,
        /// Stride between tokens of K.
        pub k_token: u64,
        /// Stride between heads of K.
        pub k_head: u64,
        /// Stride between pages of V.
        pub v_page: u64,
        /// Stride between tokens of V.
        pub v_token: u64,
        /// Stride between heads of V.
        pub v_head: u64,
        /// Stride between tokens of D.
        pub d_token: u64,
        /// Stride between heads of D.
        pub d_head: u64,
        /// Maximum split-KV parts of a sequence.
        pub parts: u32,
        /// Keys of a split-KV part.
        pub part_keys: u32,
        /// CTAs for the rows of a sequence and KV head.
        pub row_ctas: u32,
        /// log2 of the rows of a page; 32 if they are
        /// not a power of two.
        pub page_shift: u32,
        /// Sink of each query head; 0 without sinks.
        pub sinks: u64,
        /// Output gate; 0 without one.
        pub gate: u64,
        /// Stride between tokens of the gate.
        pub gate_token: u64,
        /// Stride between heads of the gate.
        pub gate_head: u64,
    }
}

abi_struct! {
    /// Location of a bit mask; CUDA only, for
    /// kernels with a mask.
    pub struct AttentionBits {
        /// The first word of the first row.
        pub address: u64,
        /// Words between heads; 0 when all heads share the rows.
        pub head_words: u64,
        /// Words of a row.
        pub row_words: u32,
        /// 1 when all sequences share the rows, 0
        /// for a row per token.
        pub is_shared: u32,
    }
}

abi_struct! {
    /// Plain keys and values that a launch in front of the attention
    /// dequantizes to the workspace; CUDA only.
    ///
    /// Row `index · sequence_rows + row + key` is a key of sequence
    /// `index`, whose rows start at `row` if offsets say so. A row is
    /// contiguous: KV heads, then features.
    pub struct AttentionPlainKv {
        /// Keys: byte offset in the workspace.
        pub keys: u64,
        /// Values: byte offset in the workspace.
        pub values: u64,
        /// Block table of the plain rows: byte offset in the workspace.
        pub table: u64,
        /// Rows of a sequence; 0 with offsets.
        pub sequence_rows: u64,
        /// Columns of the block table; 0 without one.
        pub table_width: u32,
        /// Format of the keys (0 = f32, 1 = f16, 2 = bf16, 3
        /// = E4M3, 4 = Q8_0, 5 = Q4_0).
        pub key_format: u32,
        /// Format of the values.
        pub value_format: u32,
        /// CTAs of a sequence.
        pub sequence_ctas: u32,
    }
}

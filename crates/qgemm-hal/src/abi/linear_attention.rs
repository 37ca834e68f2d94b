//! Parameters of the `linear_attention` kernels; CUDA only.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `linear_attention`. Element types are 0 = f32,
    /// 1 = f16, 2 = bf16.
    pub struct LinearAttentionShape {
        /// Tokens of all sequences.
        pub tokens: u32,
        /// Maximum tokens of a sequence.
        pub most_tokens: u32,
        /// Heads of values.
        pub heads: u32,
        /// Heads of values that share a key head.
        pub group: u32,
        /// Features of a key.
        pub qk_dim: u32,
        /// Features of a value.
        pub v_dim: u32,
        /// Slots of states.
        pub slots: u32,
        /// CTAs that share the values of a head.
        pub slices: u32,
        /// Lanes that share a row of the state: a power of two.
        pub row_lanes: u32,
        /// Tokens in shared memory at a time.
        pub chunk: u32,
        /// `FLAG_` constants: `X_ALIGNED16` (of queries, keys and
        /// values), `DELTA`, `DECAY_FEATURES`,
        /// `L2_NORM`, `FROM_ZERO`, `SIGMOID`,
        /// `TIME_STEP`, `TILED_HEADS`.
        pub flags: u32,
        /// Element type of `a`.
        pub a_dtype: u32,
        /// Scale of the queries.
        pub scale: f32,
        /// Epsilon of the L2 norm.
        pub epsilon: f32,
    }
}

abi_struct! {
    /// Device addresses, 0 for absent operands, and 64-bit strides
    /// (in elements) of one `linear_attention`.
    pub struct LinearAttentionPointers {
        /// Queries.
        pub q: u64,
        /// Keys.
        pub k: u64,
        /// Values.
        pub v: u64,
        /// Log-decay or `a`.
        pub decay: u64,
        /// Logarithm of the decay rate; 0 when the log-decay is given.
        pub a_log: u64,
        /// Summand of `a`.
        pub dt_bias: u64,
        /// Beta.
        pub beta: u64,
        /// Factor of V in D.
        pub skip: u64,
        /// States.
        pub states: u64,
        /// Token offsets.
        pub q_offsets: u64,
        /// Slot of each sequence.
        pub slots: u64,
        /// Tokens that enter the stored state.
        pub advance: u64,
        /// First tokens without output.
        pub pending: u64,
        /// D.
        pub d: u64,
        /// Stride between tokens of the queries.
        pub q_token: u64,
        /// Stride between heads of the queries.
        pub q_head: u64,
        /// Stride between tokens of the keys.
        pub k_token: u64,
        /// Stride between heads of the keys.
        pub k_head: u64,
        /// Stride between tokens of the values.
        pub v_token: u64,
        /// Stride between heads of the values.
        pub v_head: u64,
        /// Stride between tokens of D.
        pub d_token: u64,
        /// Stride between heads of D.
        pub d_head: u64,
        /// Stride between tokens of the decay.
        pub decay_token: u64,
        /// Stride between tokens of beta.
        pub beta_token: u64,
        /// Stride between slots.
        pub slot_stride: u64,
    }
}

abi_struct! {
    /// Segment of all sequences that a launch of the chunked kernels
    /// processes, and its workspace.
    pub struct LinearAttentionChunks {
        /// First token of a sequence, a multiple of the chunk.
        pub first: u32,
        /// Tokens of a sequence at most, a multiple of the chunk.
        pub tokens: u32,
        /// Matrices of each token as two bf16 numbers: `[sequences, heads, tokens, 2, 2, 32]`.
        pub matrices: u64,
        /// Factors of each token: f32 `[sequences, heads, tokens, 4]`.
        /// With a decay for each feature, those of each chunk: f32 `[sequences, heads, chunks, 128]`.
        pub factors: u64,
        /// With a decay for each feature, decayed queries and keys of each chunk as two bf16
        /// numbers: `[sequences, heads, chunks, 3, 2, 32, 128]`.
        pub decayed: u64,
        /// States between segments: f32
        /// `[sequences, heads, v_dim, qk_dim]`.
        pub states: u64,
    }
}

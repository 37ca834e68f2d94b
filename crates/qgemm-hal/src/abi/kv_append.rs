//! Parameters of the `kv_append` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Parameters of `kv_append` beside the shape and pointers
    /// of an attention; CUDA only.
    pub struct KvAppendPointers {
        /// New keys.
        pub new_k: u64,
        /// New values.
        pub new_v: u64,
        /// Position of each token; 0 where it is
        /// the place of its key.
        pub positions: u64,
        /// Parts of a turn, in units of 2^-64; 0 where there
        /// are tables or nothing is turned.
        pub frequencies: u64,
        /// Cosines.
        pub cos: u64,
        /// Sines.
        pub sin: u64,
        /// From one token of the new keys to the next.
        pub new_k_token: u64,
        /// From one head of the new keys to the next.
        pub new_k_head: u64,
        /// From one token of the new values to the next.
        pub new_v_token: u64,
        /// From one head of the new values to the next.
        pub new_v_head: u64,
        /// From one row of cosines and of sines to the next.
        pub table_row: u64,
        /// Rows of cosines and sines.
        pub table_positions: u32,
        /// Features of a head that are turned; 0 where nothing is.
        pub rotary_dim: u32,
        /// Whether pairs are neighbours, not halves.
        pub interleaved: u32,
        /// Whether eight features of new keys and
        /// values are loaded at once.
        pub new_aligned: u32,
        /// Lanes that share a head: a power of two.
        pub head_lanes: u32,
        /// CTAs that share a token.
        pub splits: u32,
        /// Heads that a lane has one after the other.
        pub lane_heads: u32,
        /// What turned features are multiplied with.
        pub amplitude: f32,
    }
}

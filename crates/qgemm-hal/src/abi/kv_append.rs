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
        /// Position of each token; 0 when it is
        /// the index of its key.
        pub positions: u64,
        /// Rotation per position, in turns of 2^-64; 0 with
        /// tables or without rotation.
        pub frequencies: u64,
        /// Cosines.
        pub cos: u64,
        /// Sines.
        pub sin: u64,
        /// Gamma of the query heads; 0 without head norms.
        pub q_gamma: u64,
        /// Gamma of the key heads; 0 without head norms.
        pub k_gamma: u64,
        /// Stride between tokens of the new keys.
        pub new_k_token: u64,
        /// Stride between heads of the new keys.
        pub new_k_head: u64,
        /// Stride between tokens of the new values.
        pub new_v_token: u64,
        /// Stride between heads of the new values.
        pub new_v_head: u64,
        /// Stride between rows of cosines and of sines.
        pub table_row: u64,
        /// Rows of cosines and sines.
        pub table_positions: u32,
        /// Rotated features of a head; 0 without rotation.
        pub rotary_dim: u32,
        /// Whether pairs are adjacent features (GPT-J) instead of halves (NeoX).
        pub interleaved: u32,
        /// Whether new keys and values are loaded by
        /// vectors of eight features.
        pub new_aligned: u32,
        /// Lanes that share a head: a power of two.
        pub head_lanes: u32,
        /// CTAs that share a token.
        pub splits: u32,
        /// Heads that a lane processes in turn.
        pub lane_heads: u32,
        /// Factor of the rotated features.
        pub amplitude: f32,
        /// Factor of the sines: the amplitude, negative
        /// for the inverse rotation.
        pub sine_amplitude: f32,
        /// Lanes that share a block of the Hadamard rotation of
        /// queries and keys; 0 without.
        pub k_lanes: u32,
        /// Lanes that share a block of the Hadamard rotation of
        /// values; 0 without.
        pub v_lanes: u32,
        /// Factor behind the Hadamard rotation of queries and keys.
        pub k_scale: f32,
        /// Factor behind the Hadamard rotation of values.
        pub v_scale: f32,
        /// Whether the rotary embedding follows the Hadamard rotation.
        pub turns_last: u32,
        /// Whether query and key heads are normalized.
        pub is_normed: u32,
        /// Element type of gamma.
        pub gamma_dtype: u32,
        /// Epsilon of the head norms.
        pub eps: f32,
        /// Inverse of the features of a head.
        pub head_inverse: f32,
    }
}

//! Parameters of the `short_conv` kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Sizes of one `short_conv`, for the kernels of every backend.
    pub struct ShortConvShape {
        /// Sequences.
        pub sequences: u32,
        /// Tokens of all sequences.
        pub tokens: u32,
        /// Maximum tokens of a sequence.
        pub most_queries: u32,
        /// Channels.
        pub channels: u32,
        /// Kernel width.
        pub width: u32,
        /// Slots of the state; 0 without state.
        pub slots: u32,
        /// `FLAG_` constants: `SILU`, `FROM_ZEROS`; on CUDA also
        /// `ALIGNED16` and `BIAS_ALIGNED16`, on wgpu `BIAS`, `Q_OFFSETS`, `ADVANCE`,
        /// `INPUT_GATE`, `OUTPUT_GATE`.
        pub flags: u32,
        /// Element type (0 = f32, 1 = f16, 2 = bf16); wgpu only.
        pub dtype: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements) of one
    /// `short_conv`; CUDA only. An absent operand has the address 0.
    pub struct ShortConvPointers {
        /// X.
        pub x: u64,
        /// Weights, f32.
        pub weight: u64,
        /// Bias, f32.
        pub bias: u64,
        /// Input gate.
        pub input_gate: u64,
        /// Output gate.
        pub output_gate: u64,
        /// Token offsets, u32.
        pub q_offsets: u64,
        /// Slot of each sequence, i32.
        pub slots: u64,
        /// Tokens that enter the state of each sequence, u32.
        pub advance: u64,
        /// State.
        pub state: u64,
        /// D.
        pub d: u64,
        /// Stride between rows of X.
        pub x_row: u64,
        /// Stride between rows of the input gate.
        pub input_gate_row: u64,
        /// Stride between rows of the output gate.
        pub output_gate_row: u64,
        /// Stride between rows of D.
        pub d_row: u64,
        /// Stride between slots of the state.
        pub slot_stride: u64,
        /// Tokens of a CTA.
        pub tile_tokens: u64,
    }
}

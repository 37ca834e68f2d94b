//! Parameters of the optimizer kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Coefficients of one `optimizer` step, for the kernels of every backend.
    pub struct OptimizerShape {
        /// Parameters; on wgpu, of a dispatch.
        pub len: u32,
        /// `FLAG_` constants: `ALIGNED16`, `COPY`.
        pub flags: u32,
        /// Element type of the gradient (0 = f32,
        /// 1 = f16, 2 = bf16).
        pub gradient: u32,
        /// Element type of the copy.
        pub copy: u32,
        /// Decay of the first moment.
        pub decay1: f32,
        /// Factor of the gradient in the first moment.
        pub gain1: f32,
        /// Decay of the second moment.
        pub decay2: f32,
        /// Factor of the squared gradient in the second moment.
        pub gain2: f32,
        /// Added to the root of the second moment.
        pub eps: f32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

abi_struct! {
    /// Device addresses of one `optimizer`; CUDA only.
    pub struct OptimizerPointers {
        /// Parameters.
        pub weights: u64,
        /// Gradient.
        pub gradient: u64,
        /// First moments.
        pub moment1: u64,
        /// Second moments.
        pub moment2: u64,
        /// The factors of the step.
        pub step: u64,
        /// 16-bit copy of the parameters.
        pub copy: u64,
        /// Number of parameters.
        pub len: u64,
    }
}

//! Parameters of the optimizer kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Coefficients of one `optimizer` step, for the kernels of every backend.
    pub struct OptimizerShape {
        /// Parameters, of wgpu those of a dispatch.
        pub len: u32,
        /// `ALIGNED16` and `COPY` of the `FLAG_` constants.
        pub flags: u32,
        /// Element type of the gradient (0 = f32,
        /// 1 = f16, 2 = bf16).
        pub gradient: u32,
        /// Element type of the copy.
        pub copy: u32,
        /// What the first moment is multiplied with.
        pub decay1: f32,
        /// What the gradient is multiplied with before it is
        /// added to the first moment.
        pub gain1: f32,
        /// What the second moment is multiplied with.
        pub decay2: f32,
        /// What the gradient's square is multiplied with before it is
        /// added to the second moment.
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
        /// The parameters in 16 bits.
        pub copy: u64,
        /// Parameters, all of them.
        pub len: u64,
    }
}
